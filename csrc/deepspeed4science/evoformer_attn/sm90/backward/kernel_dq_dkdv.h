// dk and dv, math.md (14) and (12) (Config::kKeys), or dq, (13), on Hopper: a warpgroup owns 64 keys or queries of one
// (b, n, h) and streams all queries or keys. Blocks are persistent. Producers: producer.h, row_delta.h; consumers:
// consumer.h; either of them: zero_gradients.h; warpgroups between them, for dq: dq_warpgroup.h, and for dbias2:
// row_pairs.h.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/cluster_sm90.hpp>

#include "sm90/backward/consumer.h"
#include "sm90/backward/dq_warpgroup.h"
#include "sm90/backward/producer.h"
#include "sm90/backward/row_delta.h"
#include "sm90/backward/row_pairs.h"
#include "sm90/backward/zero_gradients.h"

namespace ds4s::sm90 {

template <typename Config>
__global__ void __launch_bounds__(Config::kNumThreads, 1)
    kernel_dq_dkdv(const BackwardArgs args, const __grid_constant__ DqDkdvMaps maps) {
  constexpr int kWarpgroups = Config::kWarpgroups, kDqInShared = Config::kDqInShared;
  constexpr bool kClusterBlocks = Config::kClusterBlocks > 1;
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  typename Config::Shared& shared = *reinterpret_cast<typename Config::Shared*>(dynamic_shared);

  if (threadIdx.x == 128 * Config::kProducers) {
    prefetch_maps(maps.owned_first, maps.owned_second, maps.streamed_first, maps.streamed_second);
    if constexpr (Config::kHasBias2) prefetch_maps(maps.bias2);
    if constexpr (Config::kComputesDelta) prefetch_maps(maps.delta_o, maps.delta_do);
  }
  if (threadIdx.x == 0) {
    for (int b = 0; b < Config::kBuffers; ++b)
      shared.owned_full[b].init(1 + 32 * Config::kRows), shared.owned_empty[b].init(128 * Config::kProducers);
    const int readers =
        128 * (kWarpgroups + kDqInShared * (1 + Config::kPairsRows)) + (kClusterBlocks && args.stores_dbias2);
    for (int s = 0; s < Config::kStages; ++s)
      shared.full[s].init(1 + 32 * Config::kRows), shared.empty[s].init(readers);
    if constexpr (kDqInShared) DqShared<Config>::init(shared.dq);
    if constexpr (Config::kComputesDelta) RowDelta<Config>::init(shared.delta_barriers);
    if constexpr (Config::kDqInGlobal) DqGlobal<Config>::init(shared.dq_global_barriers);
    if constexpr (Config::kTakesTiles) shared.tile_queue.init();
    if constexpr (kClusterBlocks) ClusterReduce<Config>::init(shared.dq);
    if constexpr (Config::kPairsRows) RowPairs<Config>::init(shared.pairs);
    cutlass::arch::fence_barrier_init();
  }
  if (threadIdx.x < 8) Rank1Terms::clear(shared.ones, threadIdx.x), Rank1Terms::store_ones(shared.ones, threadIdx.x);
  if constexpr (!Config::kDenseProducts) {
    if (threadIdx.x < Config::kProductsBytes / Rank1Tile::kRowBytes) {
      for (auto& tile : shared.products.tiles) Rank1Terms::clear(tile, threadIdx.x);
    }
  }
  cutlass::arch::fence_view_async_shared();
  if (args.waits) ptx::wait_for_kernel_before();
  ptx::let_next_kernel_start();
  if constexpr (Config::kTakesTiles) {
    if (threadIdx.x == 0) shared.seen_tiles.load(args);
  }
  if constexpr (kClusterBlocks || Config::kPairsRows) {
    cute::cluster_sync();
  } else {
    __syncthreads();
  }

  if (threadIdx.x < 128 * kWarpgroups) {
    cutlass::arch::warpgroup_reg_alloc<Config::Registers::kConsumer>();
    DqDkdvConsumer<Config>::run(shared, args, maps);
    if constexpr (Config::kSplitsKeys) {
      cute::cluster_sync();  // all blocks have finished their parts of dq
      DqShared<Config>::sum_in_cluster(shared, args, maps);
    }
  } else if (threadIdx.x < 128 * Config::kProducers) {
    const bool for_dq = Config::kHasDqWarpgroup && threadIdx.x < 128 * (kWarpgroups + 1);
    if constexpr (Config::kHasDqWarpgroup) {
      if (for_dq) {
        cutlass::arch::warpgroup_reg_dealloc<Config::Registers::kHelper>();
        DqWarpgroup<Config>::run(shared, args, maps);
      }
    }
    if constexpr (Config::kPairsRows) {
      if (!for_dq) {
        cutlass::arch::warpgroup_reg_dealloc<Config::Registers::kSecondHelper>();
        RowPairs<Config>::run(shared, args);
      }
    }
  } else {
    cutlass::arch::warpgroup_reg_dealloc<Config::Registers::kProducer>();
    int warp = threadIdx.x / 32 - 4 * Config::kProducers;
    if (warp == 0 && cute::elect_one_sync()) DqDkdvProducer<Config>::run(shared, args, maps);
    if (warp >= 1 && warp <= Config::kRows)
      DqDkdvProducer<Config>::run_statistics(shared, args, maps.dq_rows, warp - 1);
    if constexpr (Config::kSplitsKeys) {
      if (args.stores_dbias2 && warp == 2 && cute::elect_one_sync()) {
        DqDkdvProducer<Config>::run_dbias2(shared, args, maps);
      }
    } else if constexpr (kDqInShared) {
      constexpr int kZeroWarps = ZeroGradients<Config>::kWarps;
      if constexpr (Config::kComputesDelta) {
        if (warp >= 2 && warp < 4 - kZeroWarps) RowDelta<Config>::run(shared, args, maps, warp - 2);
      }
      if constexpr (kZeroWarps > 0) {
        if (warp >= 4 - kZeroWarps) ZeroGradients<Config>::run(shared, args, maps);
      }
    }
    if constexpr (Config::kDqInGlobal) {
      if (warp == 2) DqGlobal<Config>::run_accumulators(shared, args, maps);
      if (warp == 3) DqGlobal<Config>::run_dq(shared, args, maps.dq_rows);
    }
    __syncwarp();
    if constexpr (Config::kSplitsKeys) cute::cluster_sync();
  }
  // The other blocks may still access this block's shared memory.
  if constexpr (kClusterBlocks || Config::kPairsRows) cute::cluster_sync();
}

}  // namespace ds4s::sm90
