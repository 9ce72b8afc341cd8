// Backward attention with biases for Sm70, Sm75 and Sm80, math.md (8) to (16): from q, k, v, the biases, o, lse and do,
//
//   P = 2^(log2e (scale Q K^T + bias1 - shift + bias2 - lse)),   delta = rowsum(do * o),   dS = P * (dO V^T - delta),
//   dq = scale dS K,   dk = scale dS^T Q,   dv = P^T dO,   dbias1 = sum over h and q of dS,
//   dbias2 = sum over n of dS.
//
// In separate kernels, each part of a gradient is computed by the one block that owns it, and results have the same
// bits in every run. From compute capability 9.0 up, where the order of additions is free, one kernel, fused, computes
// all gradients instead.
//
//   common/key_mask.h               hidden keys and the shift of bias1
//   common/preprocess.h             -delta, bias2 aligned and transposed; final sums of parts
//   sm80/backward/statistics.h      float in full precision: replaces lse and delta
//   sm80/backward/kernel_dq_dkdv.h  owned queries: dq;  owned keys: dk, dv, dbias1, and where fused dq and dbias2
//   sm80/backward/dq_accumulator.h  accumulators of dq in the fused kernel, by atomic additions
//   sm80/backward/kernel_dbias2.h   owned tiles of bias2: dbias2
//
// In the separate kernels, sums over blocks (dbias1 over heads, dbias2 over slices of the rows n) are atomic additions
// or, in deterministic mode, parts that are summed in a fixed order. Schedule, budgets and reasons:
// docs/kernels/sm80.md. This header has device code only; sm80/backward/plan.h decides what runs,
// sm80/backward/launch.h starts it.
#pragma once

#include "common/preprocess.h"
#include "sm80/backward/kernel_dbias2.h"
#include "sm80/backward/kernel_dq_dkdv.h"
#include "sm80/backward/prepare_fused.h"
#include "sm80/backward/statistics.h"

template <typename scalar_t_,           // half_t; bfloat16_t (Sm80); float
          typename ArchTag,             // cutlass::arch::Sm70, Sm75, Sm80
          bool isAligned_,              // tensors begin at 16 bytes, strides, D and Dv fill 16-byte chunks
          int kHeadDim_,                // tier: at least D and Dv, a multiple of 16
          bool kSupportsBias_ = false,  // bias2 is given; Params says whether bias1 is
          bool kTf32_ = false>          // float only: TF32 tensor cores instead of full precision
struct AttentionBackwardKernel {
  using scalar_t = scalar_t_;
  using accum_t = float;
  using Params = ds4s::BackwardInputs;
  using Gradients = ds4s::Gradients;
  using Config = ds4s::BackwardConfig<scalar_t, ArchTag, isAligned_, kHeadDim_, kSupportsBias_, kTf32_>;

  // The configuration of a block that computes the gradients kWhat of its queries or keys,
  template <Gradients kWhat, bool kWantsDbias1 = false>
  using Owned = ds4s::OwnedTileConfig<Config, kWhat, kWantsDbias1>;
  // of one that computes dk and dv of its keys, and adds to dq and dbias2,
  template <bool kWantsDbias1>
  using Fused = ds4s::FusedConfig<Config, kWantsDbias1>;
  // and of one that computes a tile of dbias2.
  using Dbias2 = ds4s::Dbias2TileConfig<Config>;

  // Dynamic shared memory.
  template <Gradients kWhat>
  static constexpr int shared_bytes(int stages) {
    return ds4s::KernelDqDkdv<Owned<kWhat>>::shared_bytes(stages);
  }
  static constexpr int fused_shared_bytes() { return ds4s::KernelDqDkdv<Fused<false>>::shared_bytes(/*stages=*/2); }
  static constexpr int dbias2_shared_bytes(int stages) { return ds4s::KernelDbias2<Dbias2>::shared_bytes(stages); }
};

// The launchable forms, each for one of these configurations.
namespace ds4s {

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    backward_dq_dkdv(const __grid_constant__ BackwardInputs args, const __grid_constant__ TileOrder order, int stages) {
  extern __shared__ __align__(16) char shared[];
  KernelDqDkdv<Config>::run(args, order, stages, shared);
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    backward_fused(const __grid_constant__ BackwardInputs args, const __grid_constant__ TileOrder order,
                   const __grid_constant__ DqAccumulatorPool pool) {
  extern __shared__ __align__(16) char shared[];
  KernelDqDkdv<Config>::run(args, order, /*stages=*/2, shared, pool);
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    backward_dbias2(const __grid_constant__ BackwardInputs args, int stages) {
  extern __shared__ __align__(16) char shared[];
  KernelDbias2<Config>::run(args, stages, shared);
}

}  // namespace ds4s
