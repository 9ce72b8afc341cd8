// dbias2, math.md (16), on Hopper: a warpgroup owns 64 x 64 elements of one (b, h) and iterates over the rows n that
// see its keys, with dbias2 += P (dP - delta), math.md (11), in its registers. So that all blocks end at the same time,
// the rows n of tiles are divided (row_partition.h), or cut into slices.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "sm90/backward/mainloop_dbias2.h"
#include "sm90/backward/producer_dbias2.h"

namespace ds4s::sm90 {

// A consumer warpgroup, which computes one tile after another.
template <typename Config>
struct Dbias2Consumer {
  using Shared = typename Config::Shared;
  using Coordinates = typename Config::Coordinates;

  CUTLASS_DEVICE static void run(Shared& shared, const BackwardArgs& args) {
    const int keys = uniform(shared.tile_queue.tile_keys) / Config::kKeyTiles;  // of this warpgroup
    if constexpr (Config::kCutsEvenly) {
      if (keys == 48) run_tiles<48>(shared, args);
      if (keys == 56) run_tiles<56>(shared, args);
    }
    if (keys == Config::kKeys) run_tiles<Config::kKeys>(shared, args);
    ptx::wait_for_kernel_before();
  }

 private:
  template <int kKeys>
  CUTLASS_DEVICE static void run_tiles(Shared& shared, const BackwardArgs& args) {
    using Mainloop = Dbias2Mainloop<Config, kKeys>;
    ConsumerCoord at = ConsumerCoord::of_thread<Config::kKeyTiles>();  // its row: the tile of queries
    typename Config::Pipe pipe;
    for (ClusterTileScheduler<Config, /*kTakes=*/false> tiles(shared.tile_queue, args);
         tiles.tile < shared.tile_queue.num_tiles; tiles.advance()) {
      Coordinates block = Config::locate(args, kKeys * Config::kKeyTiles, tiles.tile);
      if (block.query + at.row * Config::kQueries < args.Lq && block.key + at.tile * kKeys < args.Lk) {
        typename Mainloop::Sums bias2;
        typename Mainloop::Sums dbias2 = {};
        Mainloop::load_bias2(bias2, args, block, at);
        Mainloop::run_steps(shared, args, pipe, bias2, dbias2, at);
        Mainloop::store(dbias2, args, block, tiles.adds(), at);
      } else {  // nothing to compute, but the stages must be released
        int left = 0;
        do {
          for (int product = 0; product < 2; ++product, pipe.advance()) {
            shared.full[pipe.index].wait(pipe.phase);
            if (product == 0 && left == 0) left = shared.num_rows[pipe.index];
            shared.empty[pipe.index].arrive();
          }
        } while (--left != 0);
      }
    }
  }
};

template <typename Config>
__global__ void __launch_bounds__(Config::kNumThreads, 1)
    kernel_dbias2(const BackwardArgs args, const __grid_constant__ Dbias2Maps maps) {
  constexpr int kWarpgroups = Config::kWarpgroups;
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  typename Config::Shared& shared = *reinterpret_cast<typename Config::Shared*>(dynamic_shared);

  if (threadIdx.x == 128 * kWarpgroups) prefetch_maps(maps.q, maps.do_, maps.k, maps.v);
  if (threadIdx.x == 0) {
    for (int s = 0; s < Config::kStages; ++s) shared.full[s].init(1 + 32), shared.empty[s].init(128 * kWarpgroups);
    for (auto& barrier : shared.partner_empty) barrier.init(1);
    shared.tile_queue.init();
    cutlass::arch::fence_barrier_init();
  }
  for (auto& stage : shared.stages) {
    if (threadIdx.x < Config::kBlockQueries) Rank1Terms::clear(stage.queries.terms, threadIdx.x);
    if (threadIdx.x < Config::kBlockKeys) Rank1Terms::clear(stage.keys.terms, threadIdx.x);
  }
  if (threadIdx.x < 8) Rank1Terms::clear(shared.ones, threadIdx.x), Rank1Terms::store_ones(shared.ones, threadIdx.x);
  cutlass::arch::fence_view_async_shared();
  if (args.waits) ptx::wait_for_kernel_before();
  if (threadIdx.x < 32) shared.tile_queue.template count_tiles<Config::kPartitionsRows>(args, Config::kBlockKeys);
  ptx::let_next_kernel_start();
  cute::cluster_sync();

  if (threadIdx.x < 128 * kWarpgroups) {
    cutlass::arch::warpgroup_reg_alloc<Config::Registers::kConsumer>();
    Dbias2Consumer<Config>::run(shared, args);
  } else {
    cutlass::arch::warpgroup_reg_dealloc<Config::Registers::kProducer>();
    int warp = threadIdx.x / 32 - 4 * kWarpgroups;
    if (warp == 0 && cute::elect_one_sync()) Dbias2Producer<Config>::run(shared, args, maps);
    if (warp >= 1 && warp <= Config::kStatisticsWarps) {
      Dbias2Producer<Config>::run_statistics(shared, args, warp - 1);
    }
    __syncwarp();
  }
  cute::cluster_sync();  // until here the other block may use this one's barriers
}

}  // namespace ds4s::sm90
