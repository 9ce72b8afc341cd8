// The forward, docs/math.md (1) to (7), on Hopper: TMA, mbarriers, wgmma, registers moved between warpgroups.
//
// A block owns kRows rows n and kQueryTiles tiles of 64 queries of one (b, h) and streams the keys, 64 a step. It skips
// steps in which none of its rows n sees a key; a last step has 16 or 32 keys where its rows n see no others. A
// consumer warpgroup (mainloop.h) computes one tile of one n, or kSplits of them divide its keys (split_tile.h). The
// last warpgroup (producer.h) loads Q, and through kStages stages keys with their biases, and values. The rows n share
// tiles of bias2, the query tiles share keys and values. Blocks are persistent: they take tiles blockIdx.x,
// blockIdx.x + gridDim.x, ..., and the next tile is loaded while the last one is stored.
//
// Shared memory, D = 32, 2 x 2 tiles, 5 stages: Q and O 2 x 16 KiB; each stage K 8, V 8, bias2 16, bias1 and
// barriers 1 KiB.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/cluster_sm90.hpp>

#include "sm90/forward/first_mask.h"
#include "sm90/forward/mainloop.h"
#include "sm90/forward/producer.h"

namespace ds4s::sm90 {

template <typename Config>
__global__ void __launch_bounds__(Config::kNumThreads, Config::kBlocksPerSm)
    forward(const ForwardArgs args, const __grid_constant__ ForwardMaps maps) {
  constexpr int kWarpgroups = Config::kWarpgroups;
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  typename Config::Shared& shared = *reinterpret_cast<typename Config::Shared*>(dynamic_shared);

  if (threadIdx.x == 128 * kWarpgroups) {
    prefetch_maps(maps.q, maps.k, maps.v);
    if constexpr (Config::kHasBias2) prefetch_maps(maps.bias2);
  }
  if (threadIdx.x == 0) {
    for (int b = 0; b < 2; ++b) {
      shared.q_full[b].init(1), shared.q_empty[b].init(128 * kWarpgroups);
      shared.mask_full[b].init(32 * Config::kScanningWarps), shared.mask_empty[b].init(Config::kHasBias1 ? 33 : 1);
    }
    for (typename Config::Stage& stage : shared.stages) {
      stage.k_full.init(Config::kHasBias1 ? 33 : 1), stage.k_empty.init(128 * Config::kTiles);
      stage.v_full.init(1), stage.v_empty.init(128 * Config::kTiles);
    }
    cutlass::arch::fence_barrier_init();
  }
  ptx::wait_for_kernel_before();
  __syncthreads();

  if (threadIdx.x < 128 * kWarpgroups) {
    cutlass::arch::warpgroup_reg_alloc<Config::Registers::kConsumer>();
    if (FirstMask<Config>::is_found(args)) FirstMask<Config>::find(shared, args);
    ForwardMainloop<Config>::run(shared, args, maps.o);
  } else {
    cutlass::arch::warpgroup_reg_dealloc<Config::Registers::kProducer>();
    int warp = threadIdx.x / 32 - 4 * kWarpgroups;
    if (warp == 0 && cute::elect_one_sync()) ForwardProducer<Config>::run(shared, args, maps);
    if (Config::kHasBias1 && warp == 1) {
      if (args.bias1_in_vectors) {
        ForwardProducer<Config>::template run_bias1<Bias1Vectors<Config>>(shared, args);
      } else {
        ForwardProducer<Config>::template run_bias1<Bias1Elements<Config>>(shared, args);
      }
    }
    if (warp >= 2 && warp < 2 + Config::kScanningWarps && args.has_mask()) {
      ForwardProducer<Config>::run_mask(shared, args, warp - 2);
    }
  }
}

}  // namespace ds4s::sm90
