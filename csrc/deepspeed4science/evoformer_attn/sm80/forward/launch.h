// Host side of the forward: FwdParams -> plan -> AttentionKernel::Params -> launch. A generated unit names one
// Sm80Forward<...> and exports its functions.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

#include "common/key_mask_buffers.h"
#include "common/launch.h"
#include "kernel_forward.h"
#include "params.h"
#include "sm80/forward/plan.h"
#include "sm80/forward/prepare_biases.h"
#include "sm80/forward/tile_sizes.h"

namespace ds4s {

template <typename scalar_t_,  // half_t, bfloat16_t, float
          typename ArchTag,    // the family: Sm70, Sm75, Sm80
          bool kAligned,       // q, k, v, o: pointers and strides are multiples of 16 bytes, D and Dv of 16 / size
          int kHeadDim,        // tier of D (instantiations.py); above kLargestTier in several value iterations
          int kHeadDimValue,   // tier of Dv
          bool kHasBias1,      // bias1 is given
          bool kHasBias2,      // bias2 is given
          bool kTf32 = false>  // float on Sm80: TF32 tensor cores
struct Sm80Forward {
  using scalar_t = scalar_t_;
  static constexpr ForwardTileSizes kTiles =
      forward_tiles<scalar_t, ArchTag, kAligned, kHeadDim, kHeadDimValue, kHasBias1, kHasBias2>();
  static constexpr bool kSingleValueIteration = kHeadDim <= kLargestTier && kHeadDimValue <= kLargestTier;
  template <bool kGiven, template <typename, typename, typename> class Broadcast>
  struct Choose {
    template <typename M, typename S, typename T>
    using Type = typename cutlass::platform::conditional<kGiven, Broadcast<M, S, T>, BroadcastNoLoad<M, S, T>>::type;
  };
  using Kernel = AttentionKernel<scalar_t, ArchTag, kAligned, kTiles.queries, kTiles.keys, kSingleValueIteration,
                                 kHasBias1 || kHasBias2, Choose<kHasBias1, BroadcastA>::template Type,
                                 Choose<kHasBias2, BroadcastB>::template Type, kTiles.head_dim, kTiles.head_dim_value,
                                 kTf32, kTiles.stripes, kTiles.warps,
                                 /*kIsComplete=*/true, kTiles.stages_bias2>;

  static int64_t workspace_bytes(const FwdParams& p) { return make_plan(p, kUnit).workspace_bytes; }
  static void print_plan(const FwdParams& p, PlanText& text) { make_plan(p, kUnit).print(text, kUnit); }

  static cudaError_t run(const FwdParams& p, cudaStream_t stream) {
    const Sm80ForwardPlan plan = make_plan(p, kUnit);
    bool fits = p.D <= kHeadDim && p.Dv <= kHeadDimValue && p.Lq < (int64_t(1) << 31) && p.Lk < (int64_t(1) << 31) &&
                plan.blocks < (int64_t(1) << 31) && (p.bias1 != nullptr) == kHasBias1 &&
                (p.bias2 != nullptr) == kHasBias2;
    if (!fits) return cudaErrorInvalidValue;
    if (plan.blocks == 0) return cudaSuccess;
    if (plan.workspace_bytes > 0 && p.workspace == nullptr) return cudaErrorInvalidValue;

    typename Kernel::Params k;
    cudaError_t error = prepare(k, p, plan, stream);
    if (error != cudaSuccess) return error;
    set_tensors(k, p);
    error = allow_shared_memory();
    if (error != cudaSuccess) return error;
    return start(k, unsigned(plan.blocks), stream);
  }

 private:
  static constexpr ForwardUnit kUnit = {int(sizeof(scalar_t)), kTiles.queries, kTiles.keys, kHasBias1, kHasBias2,
                                        Kernel::kReadsTiles};

  // Finds the visible keys and copies biases that the kernel cannot read as they are.
  static cudaError_t prepare(typename Kernel::Params& k, const FwdParams& p, const Sm80ForwardPlan& plan,
                             cudaStream_t stream) {
    KeyMaskBuffers<FwdParams> key_mask(p);
    void* const mask = at<void>(p.workspace, plan.key_mask);
    void* const bias1 = at<void>(p.workspace, plan.bias1);
    void* const copy_of_bias2 = at<void>(p.workspace, plan.bias2);
    BiasRows bias2 = bias2_rows(p, kUnit);
    cudaError_t error;
    if (plan.bias2_in_tiles) {
      error = find_keys_and_copy_tiles(key_mask, mask, bias1, bias2, copy_of_bias2, stream);
    } else {
      error = key_mask.template fill<scalar_t>(mask, bias1, stream);
      if (error == cudaSuccess && plan.bias2 >= 0) error = copy(bias2, copy_of_bias2, stream);
    }
    k.key_mask = key_mask.at(mask);
    k.bias1_ptr = static_cast<scalar_t*>(const_cast<void*>(bias1 != nullptr ? bias1 : p.bias1));
    k.bias1_strideB = bias1 != nullptr ? p.N * p.Lk : p.bias1_stride[0];
    k.bias1_strideN = bias1 != nullptr ? p.Lk : p.bias1_stride[1];
    k.bias2_ptr = static_cast<scalar_t*>(const_cast<void*>(bias2.ptr));
    k.bias2_strideB = bias2.stride[0], k.bias2_strideH = bias2.stride[1], k.bias2_strideM = bias2.stride[2];
    k.bias2_key_stride = plan.bias2_in_tiles ? int32_t(BiasRows::kTile) : 1;
    k.bias2_row_vectors =
        uint32_t((plan.bias2_in_tiles ? BiasRows::kTile : bias2.stride[2]) * int64_t(sizeof(scalar_t)) / 16);
    k.group_log2 = plan.group_log2;
    return error;
  }
  // One kernel finds the visible keys, where some may be hidden, and copies bias2 into tiles, as `rows` describes then.
  static cudaError_t find_keys_and_copy_tiles(const KeyMaskBuffers<FwdParams>& key_mask, void* mask, void* bias1,
                                              BiasRows& rows, void* to, cudaStream_t stream) {
    if constexpr (Kernel::kReadsTiles) {
      const TileParams tiles{rows.ptr,
                             to,
                             {rows.stride[0], rows.stride[1], rows.stride[2], rows.stride[3]},
                             uint32_t(rows.count(1)),
                             uint32_t(ceil_div(rows.size[2], BiasRows::kTile)),
                             uint32_t(rows.pitch() / BiasRows::kTile),
                             rows.size[2],
                             rows.size[3],
                             rows.aligned()};
      const int64_t num_rows = key_mask.needed() ? key_mask.num_blocks() : 0, blocks = num_rows + rows.num_tiles();
      rows = rows.tiles(to);
      return launch_overlapping(prepare_biases<scalar_t>, blocks, kTileThreads, /*shared=*/0, stream,
                                key_mask.arguments(mask, bias1), uint32_t(num_rows), tiles);
    }
    return cudaErrorInvalidValue;
  }
  // Copies bias2 by rows, and makes `rows` describe the copy.
  static cudaError_t copy(BiasRows& rows, void* to, cudaStream_t stream) {
    const RepackParams params{rows.ptr,
                              to,
                              {rows.stride[0], rows.stride[1], rows.stride[2], rows.stride[3]},
                              rows.count(1),
                              rows.count(2),
                              rows.size[3],
                              rows.pitch(),
                              rows.num_elements() / rows.elements_of_chunk()};
    const int64_t blocks = ceil_div(params.num_vectors, 256);
    repack_rows<scalar_t><<<unsigned(blocks < 65536 ? blocks : 65536), 256, 0, stream>>>(params);
    rows = rows.copy(to);
    return cudaGetLastError();
  }

  static void set_tensors(typename Kernel::Params& k, const FwdParams& p) {
    k.query_ptr = static_cast<const scalar_t*>(p.q);
    k.key_ptr = static_cast<const scalar_t*>(p.k);
    k.value_ptr = static_cast<const scalar_t*>(p.v);
    k.output_ptr = static_cast<scalar_t*>(p.o);
    k.logsumexp_ptr = p.lse;
    k.scale = p.scale;
    k.head_dim = int32_t(p.D), k.head_dim_value = int32_t(p.Dv);
    k.num_queries = int32_t(p.Lq), k.num_keys = int32_t(p.Lk);
    k.num_heads = int32_t(p.H), k.num_batches = int32_t(p.B * p.N);
    k.B = int32_t(p.B), k.N = int32_t(p.N);
    k.by_blocks = cutlass::FastDivmod(int(ceil_div(p.Lq, kTiles.queries)));
    k.by_heads = cutlass::FastDivmod(int(p.H)), k.by_N = cutlass::FastDivmod(int(p.N));
    // Our strides are B, N, L, H; the kernel iterates over B * N by N's stride and adds the rest at each next B.
    auto set = [&](const int64_t (&stride)[4], int64_t& m, int64_t& h, int64_t& batch, int64_t& outer) {
      m = stride[2], h = stride[3], batch = stride[1], outer = stride[0] - p.N * stride[1];
    };
    set(p.q_stride, k.q_strideM, k.q_strideH, k.q_strideB, k.q_strideOuter);
    set(p.k_stride, k.k_strideM, k.k_strideH, k.k_strideB, k.k_strideOuter);
    set(p.v_stride, k.v_strideM, k.v_strideH, k.v_strideB, k.v_strideOuter);
    set(p.o_stride, k.o_strideM, k.o_strideH, k.o_strideB, k.o_strideOuter);
  }

  static cudaError_t start(const typename Kernel::Params& k, unsigned blocks, cudaStream_t stream) {
    if (kSingleValueIteration && k.key_mask.range != nullptr) {  // beside the last blocks of find_visible_keys
      return launch_overlapping(attention_forward<Kernel>, blocks, Kernel::kNumThreads, Kernel::kSharedBytes, stream,
                                k);
    }
    attention_forward<Kernel><<<blocks, unsigned(Kernel::kNumThreads), size_t(Kernel::kSharedBytes), stream>>>(k);
    return cudaGetLastError();
  }

  // More than 48 KiB of dynamic shared memory must be requested, once on each device.
  static cudaError_t allow_shared_memory() {
    if (Kernel::kSharedBytes <= 48 * 1024) return cudaSuccess;
    static std::atomic<uint64_t> done{0};
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess) return error;
    uint64_t bit = uint64_t(1) << (device % 64);
    if (device < 64 && (done.load() & bit)) return cudaSuccess;
    error = cudaFuncSetAttribute(attention_forward<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 Kernel::kSharedBytes);
    if (error == cudaSuccess) done.fetch_or(bit);
    return error;
  }
};

}  // namespace ds4s
