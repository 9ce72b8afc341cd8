// The parameters of a launch of AttentionKernel (kernel_forward.h): tensors, sizes, strides.
#pragma once

#include <cutlass/fast_math.h>

#include "../../common/key_mask.h"
#include "../mma/smem_tile.h"

namespace ds4s {

template <typename scalar_t, typename K>  // K: the AttentionKernel
struct ForwardParams {
  // [B, N, H, L, D] in any order of memory; D has stride 1. The contract calls B * N the batch, N the length.
  const scalar_t* query_ptr = nullptr;  // [batch, H, num_queries, head_dim]
  const scalar_t* key_ptr = nullptr;    // [batch, H, num_keys, head_dim]
  const scalar_t* value_ptr = nullptr;  // [batch, H, num_keys, head_dim_value]
  scalar_t* bias1_ptr = nullptr;        // [B, N, 1, 1, num_keys]
  scalar_t* bias2_ptr = nullptr;        // [B, 1, H, num_queries, num_keys]

  scalar_t* output_ptr = nullptr;  // [batch, H, num_queries, head_dim_value]
  // [batch, H, num_queries, head_dim_value] contiguous, where kSingleValueIteration = false keeps O between blocks of
  // keys; null: O's columns are computed in several passes over the keys instead.
  float* output_accum_ptr = nullptr;
  float* logsumexp_ptr = nullptr;  // [batch, H, num_queries] contiguous, or null

  float scale = 1;
  int32_t head_dim = 0, head_dim_value = 0;
  int32_t num_queries = 0, num_keys = 0;
  int32_t num_heads = 0, num_batches = 0;  // num_batches = B * N
  int32_t B = 1, N = 1;
  int32_t group_log2 = 0;  // order of the blocks; the grid then counts num_batches rounded up to whole groups
  // For kIsComplete: division by the number of blocks of queries, by num_heads and by N.
  cutlass::FastDivmod by_blocks, by_heads, by_N;
  KeyMask key_mask = {};  // [batch, ...]: hidden keys, and the shift of bias1; null: none, and 0

  // Strides in elements, to the next query or key (M), head (H), one of the B * N batches (B); Outer is added for each
  // step in B.
  int64_t q_strideM = 0, k_strideM = 0, v_strideM = 0, o_strideM = 0;
  int64_t q_strideH = 0, k_strideH = 0, v_strideH = 0, o_strideH = 0;
  int64_t q_strideB = 0, k_strideB = 0, v_strideB = 0, o_strideB = 0;
  int64_t q_strideOuter = 0, k_strideOuter = 0, v_strideOuter = 0, o_strideOuter = 0;
  int64_t bias1_strideB = 0, bias1_strideN = 0;
  int64_t bias2_strideB = 0, bias2_strideH = 0, bias2_strideM = 0;
  // K::kReadsTiles: bias2 lies in tiles of 32 x 32, or row by row. 32 keys further, from a multiple of 32 on, are 32
  // times the first number of elements; the next of 32 rows is the second number of 16-byte vectors further.
  int32_t bias2_key_stride = 1;
  uint32_t bias2_row_vectors = 0;

  // Fills in fields that are zero: heads and batches become the grid's, Dv becomes D, O contiguous, a bias without
  // strides contiguous, too.
  CUTLASS_HOST_DEVICE void complete(int32_t grid_heads, int32_t grid_batches) {
    if (num_heads == 0) num_heads = grid_heads;
    if (num_batches == 0) num_batches = grid_batches;
    if (head_dim_value == 0) head_dim_value = head_dim;
    if (o_strideM == 0) o_strideM = head_dim_value;
    if (o_strideH == 0) o_strideH = num_queries * o_strideM;
    if (o_strideB == 0) o_strideB = num_heads * o_strideH;
    if (bias1_strideB == 0 && bias1_strideN == 0) bias1_strideN = num_keys, bias1_strideB = int64_t(N) * num_keys;
    if (bias2_strideB == 0 && bias2_strideH == 0 && bias2_strideM == 0) {
      bias2_strideM = num_keys;
      bias2_strideH = num_queries * bias2_strideM;
      bias2_strideB = num_heads * bias2_strideH;
    }
  }

  // Advances the pointers to this block's queries; num_queries becomes the number of queries from there on. Returns
  // false where the block has nothing to do. The grid is (query blocks, heads, batches), or the product of the three on
  // x (no limit of 65,535 then), as it always is for kIsComplete. 2^group_log2 neighbouring batches vary fastest, since
  // they read the same tile of bias2.
  CUTLASS_DEVICE bool advance_to_block() {
    const Position at = position_of_block();
    if (at.batch < num_batches) advance_to(at);
    return at.batch < num_batches;
  }

  struct Position {
    int64_t batch, head;
    int32_t row;
  };
  CUTLASS_DEVICE Position position_of_block() const {
    constexpr int kQueriesPerBlock = K::QTile::kRows;
    const uint32_t num_blocks = uint32_t(num_queries + kQueriesPerBlock - 1) / kQueriesPerBlock;
    uint32_t id = blockIdx.x;
    if constexpr (!K::kIsComplete) id += gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    uint32_t in_group = id & ((1u << group_log2) - 1);
    id >>= group_log2;
    const uint32_t rest = divide(id, num_blocks, by_blocks);
    const uint32_t group = divide(rest, uint32_t(num_heads), by_heads);
    return {int64_t((group << group_log2) + in_group), int64_t(rest - group * uint32_t(num_heads)),
            int32_t(id - rest * num_blocks) * kQueriesPerBlock};
  }
  CUTLASS_DEVICE void advance_to(const Position& at) {
    const int64_t batch = at.batch, head = at.head, row = at.row;
    int64_t b = divide(uint32_t(batch), uint32_t(N), by_N);
    int64_t n = batch - b * N;
    query_ptr += batch * q_strideB + b * q_strideOuter + head * q_strideH + row * q_strideM;
    key_ptr += batch * k_strideB + b * k_strideOuter + head * k_strideH;
    value_ptr += batch * v_strideB + b * v_strideOuter + head * v_strideH;
    output_ptr += batch * o_strideB + b * o_strideOuter + head * o_strideH + row * o_strideM;
    int64_t out_row = (batch * num_heads + head) * num_queries + row;
    if (output_accum_ptr) output_accum_ptr += out_row * head_dim_value;
    if (logsumexp_ptr) logsumexp_ptr += out_row;
    bias1_ptr = to_tile<typename K::Bias1>(bias1_ptr, b, n, head, at.row);
    bias2_ptr = to_tile<typename K::Bias2>(bias2_ptr, b, n, head, at.row);
    key_mask = key_mask.from(batch);
    num_queries -= at.row;
  }

 private:
  // x / y; an integer division takes 40 dependent instructions.
  CUTLASS_DEVICE static uint32_t divide(uint32_t x, uint32_t y, const cutlass::FastDivmod& by_y) {
    if constexpr (K::kIsComplete) return uint32_t(by_y.div(int(x)));
    return x / y;
  }
  // A row bias has bias1's strides and a matrix bias has bias2's, whether it is Broadcast1_ or Broadcast2_.
  template <typename BiasT>
  CUTLASS_DEVICE scalar_t* to_tile(scalar_t* ptr, int64_t b, int64_t n, int64_t head, int32_t row) const {
    if constexpr (BiasT::kIsRow) {
      return BiasT::Row::advance(ptr, b, n, head, bias1_strideB, bias1_strideN, 0);
    } else if constexpr (BiasT::kIsMatrix) {
      return BiasT::Matrix::advance(ptr, b, n, head, bias2_strideB, 0, bias2_strideH) + row * bias2_strideM;
    } else {
      return ptr;
    }
  }
};

// The implementation of AttentionKernel::check_supported.
template <typename K>
const char* forward_obstacle(const typename K::Params& given) {
  typename K::Params p = given;
  p.complete(/*grid_heads=*/1, /*grid_batches=*/1);
  constexpr int64_t kPiece = 16 / int64_t(sizeof(typename K::scalar_t));
  auto has_pieces = [](const void* ptr, int64_t columns, int64_t stride_m, int64_t stride_h, int64_t stride_b) {
    return reinterpret_cast<unsigned long long>(ptr) % 16 == 0 &&
           (columns | stride_m | stride_h | stride_b) % kPiece == 0;
  };
  if (!p.query_ptr || !p.key_ptr || !p.value_ptr || !p.output_ptr) {
    return "query_ptr, key_ptr, value_ptr and output_ptr must be given";
  }
  if ((K::Bias1::kIsRow || K::Bias1::kIsMatrix) && !p.bias1_ptr) {
    return "bias1_ptr is null, and Broadcast1_ reads it: give it, or take BroadcastNoLoad";
  }
  if ((K::Bias2::kIsRow || K::Bias2::kIsMatrix) && !p.bias2_ptr) {
    return "bias2_ptr is null, and Broadcast2_ reads it: give it, or take BroadcastNoLoad";
  }
  if (p.head_dim < 1 || p.num_queries < 1 || p.num_keys < 1) {
    return "head_dim, num_queries and num_keys must be positive";
  }
  if (K::kSingleValueIteration && (p.head_dim > K::kHeadDim || p.head_dim_value > K::kHeadDimValue)) {
    return "head_dim or head_dim_value is above the kernel's kHeadDim: take kSingleValueIteration_ = false, smaller "
           "blocks, or a larger kHeadDim_";
  }
  if (K::kAligned && !(has_pieces(p.query_ptr, p.head_dim, p.q_strideM, p.q_strideH, p.q_strideB) &&
                       has_pieces(p.key_ptr, p.head_dim, p.k_strideM, p.k_strideH, p.k_strideB) &&
                       has_pieces(p.value_ptr, p.head_dim_value, p.v_strideM, p.v_strideH, p.v_strideB) &&
                       has_pieces(p.output_ptr, p.head_dim_value, p.o_strideM, p.o_strideH, p.o_strideB))) {
    return "isAligned_ = true: rows of query, key, value and output must begin at multiples of 16 bytes and be whole "
           "16-byte pieces; take isAligned_ = false";
  }
  return nullptr;
}

}  // namespace ds4s
