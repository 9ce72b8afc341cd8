// The mainloop of kernel_dq_dkdv where dq is added to accumulators (dq_global.h). It differs from mainloop.h in the
// order of products: the result products of a step follow both score products of the next step, and run while the
// exponentials of these scores are computed.
//
//   step k:   s, dp of k          wgmma
//             dv of k - 1         P from registers
//             dk of k - 1         dS of this warpgroup, from shared memory
//             dq of k - 2         dS of all warpgroups, one step later, when the other one has stored its part
#pragma once

#include "sm90/backward/dbias2_global.h"
#include "sm90/backward/dq_global.h"

namespace ds4s::sm90 {

template <typename Config>
struct DqGlobalMainloop {
  using Products = StepProducts<Config>;
  using Dq = DqGlobal<Config>;
  using Dbias2 = Dbias2Global<Config>;
  using Shared = typename Config::Shared;
  using Scores = typename Products::Scores;
  using Packed = typename Products::Packed;
  using Results = typename Products::Results;
  using Operands = typename Products::Operands;
  static constexpr int kColumns = Config::kColumns;

  // A warpgroup's state: products in flight and their operands.
  struct State {
    Scores s, dp;
    Packed p;
    typename Dq::Sum sum;
    typename Dbias2::TileIterator dbias2;
    bool adds = false;    // sum holds a step's dq, which must be added
    int last_stage = -1;  // the stage that result products in flight read
    CUTLASS_DEVICE explicit State(const typename Dbias2::TileIterator& of_tile) : dbias2(of_tile) {}
  };

  CUTLASS_DEVICE static void start_scores(State& state, const Operands& operands, int stage) {
    Products::start_scores(state.s, operands.owned, operands.streamed + stage * Operands::kNextStage);
    Products::start_products(state.dp, operands, stage, /*step=*/0);
  }
  // Starts dv and dk, math.md (12), (14), of the last step and dq, math.md (13), of the one before. All dS that they
  // read must have been stored.
  CUTLASS_DEVICE static void start_results(State& state, Results& results, const typename Dq::ConsumerState& dq,
                                           const Shared& shared, const Operands& operands, const ConsumerCoord& at) {
    uint32_t streamed = operands.streamed + state.last_stage * Operands::kNextStage;
    Products::start_result(results.of_p, state.p, streamed + Operands::kStreamedSecond);
    Dq::start_own(results.of_ds, dq, shared, streamed, at);
    Dq::start(state.sum, dq, shared, operands.owned_tiles, at);
    wgmma_commit();
  }
  // Waits for these products, releases their operands and adds dq.
  CUTLASS_DEVICE static void finish_results(State& state, Results& results, typename Dq::ConsumerState& dq,
                                            const BackwardArgs& args, Shared& shared, const ConsumerCoord& at) {
    wgmma_wait<0>();
    Products::keep(state.p);
    fence_registers(results.of_ds);
    fence_registers(results.of_p);
    fence_registers(state.sum);
    if (state.last_stage >= 0) shared.empty[state.last_stage].arrive();
    if (state.adds) Dq::add(state.sum, dq, args, shared, at);
  }

  // Waits for s and dp; computes P, math.md (8), and packs it; computes dS, math.md (11), and stores it.
  CUTLASS_DEVICE static void finish_scores(State& state, Results& results, typename Dq::ConsumerState& dq,
                                           const BackwardArgs& args, Shared& shared, const ConsumerCoord& at) {
    Scores &s = state.s, &dp = state.dp;
    Packed p, ds;
    wgmma_wait<2>();
    fence_registers(s);
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < kColumns / 2; ++x) s[x] = ptx::exp2(fmaf(s[x], args.c, results.row[row_of(x)]));
    Products::pack(p, s);
    fence_registers(s);  // by the source, before the next wait, as in mainloop.h
    wgmma_wait<1>();
    fence_registers(dp);
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < kColumns / 2; ++x) s[x] *= dp[x];
    Products::pack(ds, s);
    Dq::store_ds(ds, dq, shared, Products::bias2_offset(at), at);
    if (args.dbias1 != nullptr) {  // behind the arrival that others wait for
      CUTLASS_PRAGMA_UNROLL
      for (int x = 0; x < kColumns / 2; ++x) results.sums[row_of(x)] += s[x];
    }
    if constexpr (Config::kAddsDbias2) Dbias2::add(state.dbias2, s, args, at);
    finish_results(state, results, dq, args, shared, at);
    replace(state.p, p, args);
  }

  // The compiler considers an operand's registers free from its last use on, although the product still reads them.
  // This is a later use of both, whose result it cannot know to be `next` alone.
  CUTLASS_DEVICE static void replace(Packed& p, const Packed& next, const BackwardArgs& args) {
    const uint32_t of_next = 0x3210 ^ uint32_t(args.Lq >> 31);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kColumns / 4; ++i) p[i] = __byte_perm(next[i], p[i], of_next);
  }

  CUTLASS_DEVICE static void run(Shared& shared, const BackwardArgs& args, typename Config::Pipe& pipe,
                                 const Operands& operands, Results& results, typename Dq::ConsumerState& dq,
                                 EmptyBarrier& owned_empty, const typename Config::Coordinates& block,
                                 const ConsumerCoord& at) {
    State state(typename Dbias2::TileIterator(args, block, at));
    if constexpr (Config::kHalfDqSums) dq.factor = uniform(shared.dq_global_barriers.factor);
    const int num_steps = Config::columns(args, block.part).num_steps();
    shared.full[pipe.index].wait(pipe.phase);
    Products::begin(state.s, shared, pipe.index, args.unit, at);
    fence_registers(results.of_ds);
    fence_registers(results.of_p);
    wgmma_begin();
    start_scores(state, operands, pipe.index);
    wgmma_commit();  // an empty group: there are no results yet
    for (int step = 1;; ++step) {
      finish_scores(state, results, dq, args, shared, at);
      state.last_stage = pipe.index, state.adds = step > 1;
      pipe.advance();
      if (step == num_steps) break;
      shared.full[pipe.index].wait(pipe.phase);
      Products::begin(state.s, shared, pipe.index, args.unit, at);
      wgmma_begin();
      start_scores(state, operands, pipe.index);
      Dq::wait_for_own(at);
      if (state.adds) Dq::wait_for_all(dq, shared);
      wgmma_begin();
      start_results(state, results, dq, shared, operands, at);
    }
    Dq::wait_for_own(at);
    if (state.adds) Dq::wait_for_all(dq, shared);
    wgmma_begin();
    start_results(state, results, dq, shared, operands, at);
    finish_results(state, results, dq, args, shared, at);
    Dq::wait_for_all(dq, shared);
    wgmma_begin();
    Dq::start(state.sum, dq, shared, operands.owned_tiles, at);
    wgmma_commit();
    wgmma_wait<0>();
    Dq::add(state.sum, dq, args, shared, at);
    owned_empty.arrive();
    Dq::end_tile(dq, shared);
  }
};

}  // namespace ds4s::sm90
