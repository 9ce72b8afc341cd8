// dq, math.md (13), by a warpgroup of its own (Config::kHasDqWarpgroup): it multiplies dS of all tiles of a step, which
// the consumers have stored in shared memory. dq of a (b, n, h) stays there as in dq_smem.h.
#pragma once

#include "sm90/backward/dq_smem.h"

namespace ds4s::sm90 {

template <typename Config>
class DqWarpgroup : DqShared<Config> {
  using Dq = DqShared<Config>;
  using Shared = typename Config::Shared;

 public:
  CUTLASS_DEVICE static void run(Shared& shared, const BackwardArgs& args, const DqDkdvMaps& maps) {
    const ConsumerCoord at = ConsumerCoord::of_helper();
    const int begin = Config::columns(args).begin;
    typename Config::Pipe pipe;
    typename Config::OwnedPipe owned_pipe;
    for (PublishedTileScheduler<Config> tiles(shared, args); tiles.tile < args.num_tiles;
         tiles.advance(shared, args), owned_pipe.advance()) {
      const typename Config::Visible visible = shared.visible[owned_pipe.index];
      const bool first = uniform(visible.first) != 0, last = uniform(visible.tile) + 1 == uniform(visible.end);
      const typename Dq::TileState state{maps, visible.at, owned_pipe, first, last};
      const int num_steps = uniform(visible.num_steps);
      const uint32_t keys = start_address(shared.owned[owned_pipe.index]);
      if (first) {  // the stores of the last (b, n, h) must have left shared memory
        if (at.issues()) cute::tma_store_wait<0>();
        at.sync();
      }
      CUTLASS_PRAGMA_NO_UNROLL
      for (int index = 0; index < num_steps; ++index, pipe.advance()) {
        auto& tile = shared.dq.tiles[index];
        float4* mine = reinterpret_cast<float4*>(tile.x[0][32 * at.warp + at.lane]);
        typename Dq::Sum sum = {};
        if (!first) Dq::load(sum, mine);
        shared.dq.full[pipe.index].wait(pipe.phase);
        cutlass::arch::fence_view_async_shared();  // for the consumers' stores
        Dq::multiply(sum, start_address(shared.stages[pipe.index].bias2), keys);
        shared.empty[pipe.index].arrive();
        if (!last) {
          Dq::store(mine, sum);
          continue;
        }
        at.sync();  // all threads have read the tile that store_out overwrites
        Dq::store_out(state, tile, sum, begin + index * Config::kColumns, args, at);
      }
      shared.owned_empty[owned_pipe.index].arrive();
      if (num_steps == 0 && first && last) Dq::store_zeros(state, shared, args, at);
    }
    if (at.issues()) cute::tma_store_wait<0>();  // the block's shared memory must outlive the reads of the stores
    ptx::wait_for_kernel_before();
  }
};

}  // namespace ds4s::sm90
