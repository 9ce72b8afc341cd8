// The first kernel of the Hopper backward: delta of each query, math.md (9), unless kernel_dq_dkdv computes it; lists
// of rows n; zeros where the other kernels add; and, of bfloat16 operands, maxima of dO, K and V for the range of dq
// (dq_range.h).
#pragma once

#include "common/preprocess.h"
#include "sm90/backward/delta_pieces.h"
#include "sm90/backward/tile_sizes.h"

namespace ds4s::sm90 {

// Config of PrepareRows: rows of tensors that TMA reads begin at 16 bytes.
template <typename scalar_t_, int kHeadDim_, bool kFindsDqMaxima_>
struct PrepareConfig {
  using scalar_t = scalar_t_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kAligned = true, kTf32 = false;
  static constexpr bool kFindsDqMaxima = kFindsDqMaxima_;  // where dq may be added up in float16 (dq_range.h)
};

// Floats or integers to be set to 0 before other kernels add to them.
struct Zeros {
  float* ptr;
  int64_t count;

  CUTLASS_DEVICE void store(int64_t thread, int64_t num_threads) const {
    if (reinterpret_cast<uintptr_t>(ptr) % 16 != 0) {
      CUTLASS_PRAGMA_NO_UNROLL  // most threads have one element, if any
          for (int64_t i = thread; i < count; i += num_threads) ptr[i] = 0.f;
      return;
    }
    CUTLASS_PRAGMA_NO_UNROLL
    for (int64_t i = thread; i < count / 4; i += num_threads) {
      reinterpret_cast<float4*>(ptr)[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    }
    if (thread < count % 4) ptr[count - 1 - thread] = 0.f;
  }
};

// The arguments of the kernel.
struct PreprocessArgs {
  ds4s::BackwardInputs rows;  // parameters and mask
  float* negative_delta;      // [B, N, H, Lq]
  PostprocessFlag flag;
  RowLists row_lists;
  int32_t num_lists;
  KeyMaskArgs key_mask;
  int32_t num_masked;  // rows n whose visible keys this kernel finds; 0: none
  int32_t num_early;   // blocks of queries that begin beside find_visible_keys
  Zeros dbias1, dbias2;
  Zeros accumulators, counters;  // accumulators of dq_global.h; counters of it, later_delta.h or row_delta.h
  DqRangeArgs dq_range;          // no pieces where dq has no float16 sums
  DeltaArgs delta;               // likewise
  int32_t num_later_pairs;       // likewise: the (b, n, h) that later_delta.h computes delta of
  bool computes_delta;           // false: kernel_dq_dkdv does
};

// Where dq is added up in float16: each warp of a block has a piece of the same row n. If preprocess has pieces of some
// (b, n, h) only, of the first ones that kernel_dq_dkdv reads, the block has those of one head.
constexpr int kPieceWarps = kPrepareThreads / 32;
inline int64_t num_piece_blocks(const PreprocessArgs& args, int64_t first_pairs) {
  const DqRangeArgs& range = args.dq_range;
  return args.num_later_pairs > 0 ? ceil_div(range.pieces, kPieceWarps) * first_pairs
                                  : ceil_div(int64_t(range.pieces) * range.heads, kPieceWarps) * range.rows;
}
template <typename Config, bool kFindsVisibleKeys>
CUTLASS_DEVICE void compute_delta_pieces(const PreprocessArgs& args, uint32_t block) {
  const BwdParams& p = args.rows.p;
  const DqRangeArgs& range = args.dq_range;
  const bool some = args.num_later_pairs > 0;
  const uint32_t heads = some ? 1 : range.heads, count = uint32_t(range.pieces) * heads;
  const uint32_t blocks = (count + kPieceWarps - 1) / kPieceWarps, number = block / blocks, warp = threadIdx.x / 32;
  const uint32_t i = (block - number * blocks) * kPieceWarps + warp, piece = i / heads;
  DqPair at = DqPair::at(int(number), int(p.N), some ? range.heads : 1);
  if (!some) at.h = int(i - piece * heads);
  const bool unseen = kFindsVisibleKeys ? sees_nothing<typename Config::scalar_t, kPrepareThreads>(p, at.b, at.n)
                                        : args.rows.mask.sees_nothing_now(at.b * p.N + at.n);
  if (i >= count) return;
  auto& stages = PieceStages<Config, kPieceWarps>::init();
  const DeltaPiece<Config> mine(p, args.delta, at, int(piece));
  if (unseen) return mine.store_zeros(range);
  mine.load(stages.of_warp[warp], stages.loaded[warp]);
  mine.compute(stages.of_warp[warp], stages.loaded[warp], /*phase=*/0, range);
}

// The first blocks find the visible keys of the rows n, or list the rows n that see each of kernel_dbias2's tiles of
// keys. The others set their part of the zeros and compute delta of their queries: of all heads or, in pieces, of a
// head for each warp.
//
// The first num_early of these others store zeros and, for delta, load O and dO before they wait for find_visible_keys.
// The kernels before that one have ended: each of its blocks waits for them, and only then lets this kernel start.
// Every block here waits before it ends, so that a kernel that waits for this one finds the mask complete.
template <typename Config, bool kFindsVisibleKeys>
__global__ void __launch_bounds__(kPrepareThreads, kPreprocessBlocks)
    preprocess(const __grid_constant__ PreprocessArgs args) {
  static_assert(kPrepareThreads == kKeyMaskThreads, "find_visible_keys_of");
  const uint32_t num_masks = uint32_t(kFindsVisibleKeys ? args.num_masked : args.num_lists);
  if (blockIdx.x < num_masks) {
    ptx::wait_for_kernel_before();
    if constexpr (kFindsVisibleKeys) {
      find_visible_keys_of<typename Config::scalar_t>(args.key_mask, blockIdx.x);
    } else {
      list_visible_rows<kPrepareThreads>(args.rows.mask, args.row_lists, int(args.rows.p.B), int(blockIdx.x));
    }
    return;
  }
  const uint32_t block = blockIdx.x - num_masks;
  const bool early = !kFindsVisibleKeys && block < uint32_t(args.num_early);
  if (!early) ptx::wait_for_kernel_before();
  const int64_t thread = int64_t(block) * kPrepareThreads + threadIdx.x;
  const int64_t num_threads = int64_t(gridDim.x - num_masks) * kPrepareThreads;
  args.dbias1.store(thread, num_threads), args.dbias2.store(thread, num_threads);
  args.accumulators.store(thread, num_threads), args.counters.store(thread, num_threads);
  if (!args.computes_delta) {
    if (early) ptx::wait_for_kernel_before();
    return;
  }
  if constexpr (Config::kFindsDqMaxima) {
    if (args.dq_range.pieces > 0) {
      if (early) ptx::wait_for_kernel_before();
      return compute_delta_pieces<Config, kFindsVisibleKeys>(args, block);
    }
  }
  PrepareRows<Config>::template run<kFindsVisibleKeys>(args.rows, args.negative_delta, block, args.flag, early);
}

}  // namespace ds4s::sm90
