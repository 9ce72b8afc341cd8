// The mainloop of kernel_dq_dkdv: a consumer warpgroup computes an owned tile of 64 rows, 16 rows a warp. If it owns
// keys, all matrices are the transposes of their names: rows of s are keys, columns queries. math.md (8) to (14):
//
//   step:   s = bias2 / scale + column terms              from shared memory
//           s += Q K^T, dp = dO V^T - delta               wgmma, both from shared memory; delta: sm90/mma/rank1_mma.h
//           P = 2^(c s + row term)                        in registers
//           dS = P dp                                     rounded to 16 bits, as P is
//           dv += P^T dO, dk += dS^T Q; or dq += dS K     wgmma, P and dS from registers
//
// The products of a step's last line shall run beside the exponentials of the next step. With dq in shared memory dS is
// stored there, too (dq_smem.h). The order of products with dq by additions: mainloop_dq_global.h.
#pragma once

#include "sm90/backward/dq_smem.h"
#include "sm90/backward/step_products.h"

namespace ds4s::sm90 {

template <typename Config>
struct DqDkdvMainloop : StepProducts<Config> {
  using Products = StepProducts<Config>;
  using Shared = typename Config::Shared;
  using Coordinates = typename Config::Coordinates;
  using BiasTile = typename Config::BiasTile;
  using DqTileState = typename DqShared<Config>::TileState;
  using Products::begin;
  using Products::bias2_address;
  using Products::keep;
  using Products::pack;
  using Products::start_products;
  using Products::start_result;
  using Products::start_scores;
  using typename Products::Operands;
  using typename Products::Packed;
  using typename Products::Results;
  using typename Products::Scores;
  static constexpr int kColumns = Config::kColumns, kColumnSteps = Config::kColumnSteps, kOwned = Config::kOwned;
  static constexpr bool kKeys = Config::kKeys, kHasBias2 = Config::kHasBias2, kDqInShared = Config::kDqInShared;
  static constexpr bool kStoresDbias2 = !kKeys && kHasBias2;  // where N is 1

  // Makes dS visible to the product for dq. A warpgroup for dq does so itself, while consumers go on.
  CUTLASS_DEVICE static void announce_ds(Shared& shared, int stage) {
    if constexpr (!Config::kHasDqWarpgroup) cutlass::arch::fence_view_async_shared();
    shared.dq.full[stage].arrive();
  }
  // Stores dS for dq, queries by keys, each element where this warp has read its bias2.
  CUTLASS_DEVICE static void store_ds(const Packed& ds, Shared& shared, int stage, const ConsumerCoord& at) {
    uint32_t address = bias2_address(shared, stage, at);
    CUTLASS_PRAGMA_UNROLL
    for (int g = 0; g < kColumnSteps; ++g) stmatrix_trans(address + g * 16 * BiasTile::kRowBytes, ds + 4 * g);
    announce_ds(shared, stage);
  }
  // Stores dS = 0 for hidden keys. For keys that do not exist, the tile holds zeros already: TMA has loaded bias2 as 0
  // (kPairsRows: not where it is the row n that does not exist).
  CUTLASS_DEVICE static void store_zero_ds(Shared& shared, int stage, bool exists, const ConsumerCoord& at) {
    if (!kHasBias2 || exists || Config::kPairsRows) {
      auto* rows = reinterpret_cast<uint4*>(shared.stages[stage].bias2[at.tile]);
      for (int x = threadIdx.x % 128; x < BiasTile::kBytes / 16; x += 128) rows[x] = make_uint4(0, 0, 0, 0);
    }
    announce_ds(shared, stage);
  }

  CUTLASS_DEVICE static void find_dbias2(Results& results, const BackwardArgs& args, const Coordinates& block,
                                         const ConsumerCoord& at) {
    int query = block.owned + at.tile * kOwned + 16 * at.warp + at.lane / 4 + (at.lane % 2 != 0 ? 8 : 0);
    int key = at.lane % 4 / 2 * 4;
    int64_t row = (int64_t(block.batch) * args.H + block.head) * args.Lq + query;
    results.dbias2 = args.dbias2 + row * args.Lk + key;
    results.keys_left = query < args.Lq ? args.Lk - key : 0;
  }
  CUTLASS_DEVICE static void store_dbias2(const Scores& ds, const Results& results, int first_key,
                                          const BackwardArgs& args, const ConsumerCoord& at) {
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < kColumns / 2; x += 4) {
      float four[4];
      four_of_a_row(four, ds + x, at.lane % 2 != 0);
      const int key = first_key + 2 * x;
      store_four(results.dbias2 + key, four, results.keys_left - key, args.Lk % 4 == 0);
    }
  }
  // Stores dbias2 = 0 of hidden keys, in the steps that are left out. N is 1.
  CUTLASS_DEVICE static void store_zero_dbias2(const BackwardArgs& args, const Coordinates& block,
                                               const ConsumerCoord& at) {
    const int query = block.owned + at.tile * kOwned + 16 * at.warp, rows = min(16, args.Lq - query);
    float* dbias2 = args.dbias2 + ((int64_t(block.batch) * args.H + block.head) * args.Lq + query) * args.Lk;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int first_key = 0; first_key < args.Lk; first_key += kColumns) {
      if (args.mask.units(block.batch, first_key, kColumns / KeyMask::kUnit) != 0) continue;
      CUTLASS_PRAGMA_NO_UNROLL
      for (int x = at.lane; x < rows * kColumns; x += 32) {
        const int key = first_key + x % kColumns;
        if (key < args.Lk) dbias2[int64_t(x / kColumns) * args.Lk + key] = 0.f;
      }
    }
  }

  // So many exponentials of a lane come before the wait for dP, the others after it, among the instructions for dS. Up
  // to D = 32, ptxas makes one run of the first ones, in which the unit for ex2 is the limit: with half of them 0.988
  // of the backward at 384 and 768, one H200. Above, 1.00.
  static constexpr int kEarly = Config::kHeadDim <= 32 ? kColumns / 4 : kColumns / 2;

  // P of the elements from kFirst to kEnd - 1 of a lane, math.md (8).
  template <int kFirst, int kEnd>
  CUTLASS_DEVICE static void exponentiate(Scores& s, const BackwardArgs& args, const Results& results) {
    CUTLASS_PRAGMA_UNROLL
    for (int x = kFirst; x < kEnd; ++x) s[x] = ptx::exp2(fmaf(s[x], args.c, results.row[row_of(x)]));
  }

  // Packs P and dS of a step whose products s and dp have been started. Also waits for the result products of the
  // previous step, whose stage was last_stage, and releases that stage.
  CUTLASS_DEVICE static void finish_scores(Packed& p, Packed& ds, Scores& s, Scores& dp, Results& results,
                                           Shared& shared, const BackwardArgs& args, int stage, int last_stage,
                                           PendingStore& pending, const ConsumerCoord& at) {
    int first_key = 0;
    if constexpr (kStoresDbias2) first_key = shared.first_key[stage];
    wgmma_wait<2>();
    fence_registers(s);
    exponentiate<0, kEarly>(s, args, results);
    // By the source, these come before the next wait. ptxas moves that up: docs/history/sm90-backward-steps.md.
    fence_registers(s);
    wgmma_wait<1>();
    if (kKeys) keep(p);
    keep(ds);
    if (last_stage >= 0) {
      shared.empty[last_stage].arrive();
    } else if constexpr (Config::kHasDqWarpgroup) {
      // The last tile's results have left their buffer. Also, ptxas moves no wait up across this branch: the wait for
      // dP stays behind the first exponentials.
      if (at.issues()) cute::tma_store_wait<0>();
    } else {
      pending.finish(shared.owned_empty, at);
    }
    wgmma_wait<0>();
    fence_registers(dp);
    fence_registers(results.of_ds);
    fence_registers(results.of_p);
    exponentiate<kEarly, kColumns / 2>(s, args, results);
    if constexpr (kKeys) pack(p, s);
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < kColumns / 2; ++x) s[x] *= dp[x];
    if constexpr (kStoresDbias2) {
      if (args.stores_dbias2) store_dbias2(s, results, first_key, args, at);
    }
    if (kKeys && args.dbias1 != nullptr) {
      CUTLASS_PRAGMA_UNROLL
      for (int x = 0; x < kColumns / 2; ++x) results.sums[row_of(x)] += s[x];
    }
    pack(ds, s);
    if constexpr (kDqInShared) store_ds(ds, shared, stage, at);
  }
  CUTLASS_DEVICE static void start_results(Results& results, const Packed& p, const Packed& ds,
                                           const Operands& operands, int stage) {
    uint32_t streamed = operands.streamed + stage * Operands::kNextStage;
    if constexpr (kKeys) start_result(results.of_p, p, streamed + Operands::kStreamedSecond);
    start_result(results.of_ds, ds, streamed);
    wgmma_commit();
  }

  // Runs num_steps steps.
  CUTLASS_DEVICE static void run_steps(Shared& shared, const BackwardArgs& args, typename Config::Pipe& pipe,
                                       int num_steps, const Operands& operands, PendingStore& pending, Results& results,
                                       const DqTileState& dq, const ConsumerCoord& at) {
    Scores s, dp;
    Packed p, ds;
    int last_stage = -1;
    typename Config::Pipe last_pipe;
    shared.full[pipe.index].wait(pipe.phase);
    begin(s, shared, pipe.index, args.unit, at);
    fence_registers(results.of_ds);
    fence_registers(results.of_p);
    wgmma_begin();
    start_scores(s, operands.owned, operands.streamed + pipe.index * Operands::kNextStage);
    wgmma_commit();  // an empty group in place of the previous step's results
    start_products(dp, operands, pipe.index, /*step=*/0);
    for (int step = 1;; ++step) {
      finish_scores(p, ds, s, dp, results, shared, args, pipe.index, last_stage, pending, at);
      if constexpr (Config::kHasDeltaTerms) {
        if (dq.last) shared.delta_barriers.empty[step - 1].arrive();
      }
      if constexpr (Config::kTakesTurns) {
        if (step > 1) DqShared<Config>::add(dq, step - 2, last_pipe, shared, args, at);
        last_pipe = pipe;
      }
      last_stage = pipe.index;
      pipe.advance();
      if (step == num_steps) break;
      // The products of this step's results run beside the exponentials of the next step.
      shared.full[pipe.index].wait(pipe.phase);
      begin(s, shared, pipe.index, args.unit, at);
      wgmma_begin();
      start_scores(s, operands.owned, operands.streamed + pipe.index * Operands::kNextStage);
      start_results(results, p, ds, operands, last_stage);
      start_products(dp, operands, pipe.index, step);
    }
    if constexpr (Config::kReleasesEarly) shared.owned_empty[dq.owned_pipe.index].arrive();
    wgmma_begin();
    start_results(results, p, ds, operands, last_stage);
    wgmma_wait<0>();
    if (kKeys) keep(p);
    keep(ds);
    fence_registers(results.of_ds);
    fence_registers(results.of_p);
    shared.empty[last_stage].arrive();
    if constexpr (Config::kTakesTurns) {
      DqShared<Config>::add(dq, num_steps - 1, last_pipe, shared, args, at);
      shared.dq.keys_read[dq.owned_pipe.index].arrive();
    }
  }
};

}  // namespace ds4s::sm90
