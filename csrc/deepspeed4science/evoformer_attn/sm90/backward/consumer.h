// A consumer warpgroup of kernel_dq_dkdv, which computes one owned tile after another.
#pragma once

#include "sm90/backward/epilogue.h"
#include "sm90/backward/mainloop.h"
#include "sm90/backward/mainloop_dq_global.h"
#include "sm90/backward/zero_gradients.h"

namespace ds4s::sm90 {

template <typename Config>
struct DqDkdvConsumer {
  using Shared = typename Config::Shared;
  using Coordinates = typename Config::Coordinates;
  using Mainloop = DqDkdvMainloop<Config>;
  using Operands = typename StepProducts<Config>::Operands;
  using Results = typename StepProducts<Config>::Results;
  using DqTileState = typename DqShared<Config>::TileState;
  static constexpr int kOwned = Config::kOwned;
  static constexpr bool kKeys = Config::kKeys, kDqInShared = Config::kDqInShared, kDqInGlobal = Config::kDqInGlobal;

  // kDqInGlobal: the warpgroup's position among the accumulators of dq.
  struct DqGlobalState {
    typename DqGlobal<Config>::ConsumerState state;
  };
  struct NoDqGlobal {};

  CUTLASS_DEVICE static void run(Shared& shared, const BackwardArgs& args, const DqDkdvMaps& maps) {
    ConsumerCoord at = ConsumerCoord::of_thread<Config::kTiles>();
    // Otherwise every step reads threadIdx again. At D = 128 no register is left.
    if constexpr (Config::kHeadDim <= 64) ptx::keep(at.lane);
    typename Config::Pipe pipe;
    typename Config::OwnedPipe owned_pipe;
    PendingStore pending;
    uint32_t exchanged = 0;  // parity of the number of exchanges of results
    cute::conditional_t<kDqInGlobal, DqGlobalState, NoDqGlobal> dq_global;
    for (typename Config::template Scheduler<TileReader::kConsumer> tiles(shared, args); tiles.tile < args.num_tiles;
         tiles.advance(shared, args), owned_pipe.advance()) {
      const int buffer = owned_pipe.index;
      Coordinates block;
      if constexpr (!kDqInShared) {
        block = Config::locate(args, tiles.tile);
        shared.owned_full[buffer].wait(owned_pipe.phase);
      }
      const typename Config::Visible visible = shared.visible[buffer];
      if constexpr (kDqInShared) block = visible.at;
      const bool computed = uniform(visible.num_steps > 0) != 0;  // uniform, so that the compiler uses uniform branches
      DqTileState dq{maps, block, owned_pipe, false, false};
      if constexpr (kDqInShared) {
        dq.first = visible.first, dq.last = visible.tile + 1 == visible.end && !Config::kSplitsKeys;
        if constexpr (Config::kSplitsKeys) dq.sees_keys = uniform(visible.warpgroups) != 0;
      }
      const bool exists = block.row + at.row < args.N && block.owned + at.tile * kOwned < Config::num_owned(args);
      // kDqInGlobal: every warpgroup computes a part of dq of all keys; hidden keys have P = 0.
      const bool computes = !kDqInGlobal         ? (visible.warpgroups >> at.warpgroup & 1) != 0
                            : Config::kPairsRows ? visible.warpgroups != 0  // or only the other row n sees keys
                                                 : computed;
      Results results{};
      if (computes) {
        const float* exponents = shared.exponents[buffer][at.warpgroup] + 16 * at.warp + at.lane / 4;
        results.row[0] = exponents[0], results.row[1] = exponents[8];
        if (Mainloop::kStoresDbias2 && args.stores_dbias2) Mainloop::find_dbias2(results, args, block, at);
        if constexpr (kDqInGlobal) {
          DqGlobalMainloop<Config>::run(shared, args, pipe, Operands(shared, buffer, at), results, dq_global.state,
                                        shared.owned_empty[buffer], block, at);
        } else {
          const int num_steps = kKeys ? Config::columns(args, block.part).num_steps() : uniform(visible.num_steps);
          Mainloop::run_steps(shared, args, pipe, num_steps, Operands(shared, buffer, at), pending, results, dq, at);
        }
      } else {  // nothing to compute, but stages must be released
        if constexpr (Config::kReleasesEarly && Config::kPairsRows) {
          arrive_after(visible.num_steps, shared.owned_empty[buffer]);
        } else if constexpr (Config::kReleasesEarly) {
          shared.owned_empty[buffer].arrive();
        }
        pending.finish(shared.owned_empty, at);
        if (Config::kHasDqWarpgroup && at.issues()) cute::tma_store_wait<0>();  // as in finish_scores
        const int num_steps = !computed ? 0
                              : kKeys   ? Config::columns(args, block.part).num_steps()
                                        : uniform(visible.num_steps);
        for (int step = 0; step < num_steps; ++step, pipe.advance()) {
          shared.full[pipe.index].wait(pipe.phase);
          if constexpr (kDqInShared) Mainloop::store_zero_ds(shared, pipe.index, exists, at);
          if constexpr (kDqInGlobal && Config::kPairsRows) {
            DqGlobal<Config>::store_zero_ds(dq_global.state, args, shared, at);
          }
          if constexpr (Config::kHasDeltaTerms) {
            if (dq.last) shared.delta_barriers.empty[step].arrive();
          }
          shared.empty[pipe.index].arrive();
          if constexpr (Config::kTakesTurns) DqShared<Config>::add(dq, step, pipe, shared, args, at);
        }
        if constexpr (kDqInGlobal) {
          if (num_steps == 0) DqGlobal<Config>::add_nothing(dq_global.state, args, shared);
          DqGlobal<Config>::end_tile(dq_global.state, shared);
        }
        if constexpr (Config::kTakesTurns) {
          if (!computed && dq.first && dq.last) DqShared<Config>::store_zeros(dq, shared, args, at);
          shared.dq.keys_read[buffer].arrive();
        }
      }
      if constexpr (Config::kHasDqWarpgroup) shared.owned_empty[buffer].arrive();
      if constexpr (Mainloop::kStoresDbias2) {
        const bool hides_keys = visible.num_steps * Config::kColumns < args.Lk;
        if (args.stores_dbias2 && exists && hides_keys) Mainloop::store_zero_dbias2(args, block, at);
      }
      if (exists)
        DqDkdvEpilogue<Config>::finish(shared, args, maps, block, owned_pipe, computes, results, exchanged, at);
      if constexpr (Config::kHasDeltaTerms) {
        if (dq.first && (!Config::kPairsRows || block.row < args.N)) {
          ZeroGradients<Config>::store(args, maps, block, visible.end - visible.tile, threadIdx.x);
        }
      }
      if constexpr (Config::kReleasesEarly || Config::kHasDqWarpgroup) continue;
      pending.buffer = buffer;
      if (Config::kBuffers == 1) pending.finish(shared.owned_empty, at);  // the next owned tiles need this buffer
    }
    if (at.issues()) cute::tma_store_wait<0>();  // the block's shared memory must outlive the reads of the stores
    ptx::wait_for_kernel_before();
  }
};

}  // namespace ds4s::sm90
