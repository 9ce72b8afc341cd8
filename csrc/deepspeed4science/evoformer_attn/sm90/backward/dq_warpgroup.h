// dq, math.md (13), by a warpgroup of its own (Config::kHasDqWarpgroup): it multiplies dS of all tiles of a step, which
// the consumers have stored in shared memory. dq of a (b, n, h) stays there as in dq_smem.h.
#pragma once

#include "sm90/backward/dq_smem.h"
#include "sm90/backward/row_pairs.h"

namespace ds4s::sm90 {

template <typename Config>
struct DqWarpgroup {
  using Dq = DqShared<Config>;
  using Shared = typename Config::Shared;

  CUTLASS_DEVICE static void run(Shared& shared, const BackwardArgs& args, const DqDkdvMaps& maps) {
    const ConsumerCoord at = ConsumerCoord::of_helper();
    typename Config::Pipe pipe;
    typename Config::OwnedPipe owned_pipe;
    typename RowPairs<Config>::Slots slots;
    for (PublishedTileScheduler<Config> tiles(shared, args); tiles.tile < args.num_tiles;
         tiles.advance(shared, args), owned_pipe.advance()) {
      const typename Config::Visible visible = shared.visible[owned_pipe.index];
      const bool first = uniform(visible.first) != 0, last = uniform(visible.tile) + 1 == uniform(visible.end);
      const bool sees_keys = uniform(visible.warpgroups) != 0;
      const typename Dq::TileState state{maps, visible.at, owned_pipe, first, last, sees_keys};
      const int num_steps = uniform(visible.num_steps);
      const int first_query = Config::columns(args, visible.at.part).begin;
      if (first) Dq::wait_for_stores(at);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int index = 0; index < num_steps; ++index, pipe.advance()) {
        Dq::add_step(state, index, first_query, pipe, shared, args, at, [&] {
          if constexpr (Config::kPairsRows)
            RowPairs<Config>::send(slots, shared, shared.stages[pipe.index].bias2[0], at);
        });
      }
      shared.owned_empty[owned_pipe.index].arrive();
      if (num_steps == 0 && first && last) Dq::store_zeros(state, shared, args, at);
    }
    if (at.issues()) cute::tma_store_wait<0>();  // the block's shared memory must outlive the reads of the stores
    ptx::wait_for_kernel_before();
  }
};

}  // namespace ds4s::sm90
