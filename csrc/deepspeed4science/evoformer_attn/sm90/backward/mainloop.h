// What computes in a row pass: a warpgroup for each owned tile of 64 rows, 16 rows a warp. Of keys, all of it is the
// transpose of what the names say: rows of s are keys then, columns queries.
//
//   step:   s = bias2 / scale + column terms       from shared memory
//           s += Q K^T, dp = dO V^T - delta        wgmma, both from shared memory; delta by sm90/mma/rank1_mma.h
//           P = 2^(c s + row term)                 in registers
//           dS = P dp                              rounded to 16 bits, as P is
//           dv += P^T dO, dk += dS^T Q; or dq += dS K        wgmma, P and dS from registers
//
// The products of a step's last line run beside the exponentials of the next one. In a fused pass dS also goes to
// shared memory, for dq (dq_smem.h). A pass that adds dq to accumulators walks in another order: mainloop_dq_global.h.
#pragma once

#include "sm90/backward/cluster_reduce.h"
#include "sm90/backward/dq_smem.h"
#include "sm90/backward/mainloop_dq_global.h"

namespace ds4s::sm90 {

template <typename Config>
struct DqDkdvMainloop {
  using PassConfig = Config;
  using Element = typename Config::Element;
  using Shared = typename Config::Shared;
  using Stage = typename Config::Stage;
  using Coordinates = typename Config::Coordinates;
  using OwnedTile = typename Config::OwnedTile;
  using WalkedTile = typename Config::WalkedTile;
  using BiasTile = typename Config::BiasTile;
  static constexpr int kHeadDim = Config::kHeadDim, kColumns = Config::kColumns, kOwned = Config::kOwned;
  static constexpr int kHeadSteps = Config::kHeadSteps, kColumnSteps = Config::kColumnSteps;
  static constexpr bool kKeys = Config::kKeys, kBias2 = Config::kBias2, kDqInShared = Config::kDqInShared;
  static constexpr bool kDqInGlobal = Config::kDqInGlobal;

  using DqWalk = typename DqShared<Config>::Walk;
  using Scores = float[kColumns / 2];
  using Packed = uint32_t[kColumns / 4];
  using Result = float[kHeadDim / 2];

  // Places of a warpgroup's operands, walked ones in stage 0.
  struct Operands {
    uint32_t owned, owned_tiles, walked, products, ones;
    static constexpr uint32_t kNextStage = sizeof(Stage) >> 4;
    static constexpr uint32_t kNextProducts = Config::kRows * Config::kProductsBytes >> 4;  // of queries walked over
    static constexpr uint32_t kOwnedSecond = OwnedTile::kBytes >> 4, kWalkedSecond = WalkedTile::kBytes >> 4;

    CUTLASS_DEVICE Operands(const Shared& shared, int buffer, const ConsumerCoord& at)
        : owned(place_of(&shared.owned[buffer][at.warpgroup])),
          owned_tiles(place_of(shared.owned[buffer])),
          walked(place_of(&shared.stages[0].walked[at.row])),
          products(place_of(shared.products[kKeys ? at.row : buffer * Config::kWarpgroups + at.warpgroup])),
          ones(place_of(shared.ones)) {}
  };

  // Of the row of an 8x8 matrix that a lane names to ldmatrix.
  CUTLASS_DEVICE static uint32_t bias2_offset(const ConsumerCoord& at) {
    return kKeys ? BiasTile::offset(at.lane % 8 + at.lane / 16 * 8, 2 * at.warp + at.lane / 8 % 2)
                 : BiasTile::offset(16 * at.warp + at.lane % 16, at.lane / 16);
  }
  CUTLASS_DEVICE static uint32_t bias2_address(const Shared& shared, int stage, const ConsumerCoord& at) {
    return shared_address(shared.stages[stage].bias2[kBias2 || kDqInShared ? at.tile : 0]) + bias2_offset(at);
  }
  // dS for dq: queries by keys, each element where this warp has read its bias2.
  CUTLASS_DEVICE static void hand_over(const Packed& ds, Shared& shared, int stage, const ConsumerCoord& at) {
    uint32_t address = bias2_address(shared, stage, at);
    CUTLASS_PRAGMA_UNROLL
    for (int g = 0; g < kColumnSteps; ++g) stmatrix_trans(address + g * 16 * BiasTile::kRowBytes, ds + 4 * g);
    cutlass::arch::fence_view_async_shared();
    shared.dq.full[stage][at.tile].arrive();
  }
  // dS of keys that are hidden or do not exist is 0, as bias2 is of the latter.
  CUTLASS_DEVICE static void hand_nothing_over(Shared& shared, int stage, bool exists, const ConsumerCoord& at) {
    if (!kBias2 || exists) {
      auto* rows = reinterpret_cast<uint4*>(shared.stages[stage].bias2[at.tile]);
      for (int x = threadIdx.x % 128; x < BiasTile::kBytes / 16; x += 128) rows[x] = make_uint4(0, 0, 0, 0);
      cutlass::arch::fence_view_async_shared();
    }
    shared.dq.full[stage][at.tile].arrive();
  }

  // s before its product: biases, and what belongs to columns.
  CUTLASS_DEVICE static void begin(Scores& s, const Shared& shared, int stage, float unit, const ConsumerCoord& at) {
    const float* columns = shared.scores[stage][at.row] + 2 * (at.lane % 4);
    uint32_t bias2 = bias2_address(shared, stage, at);
    CUTLASS_PRAGMA_UNROLL
    for (int g = 0; g < kColumnSteps; ++g) {
      uint32_t pairs[4];
      if constexpr (kBias2) {
        if constexpr (kKeys) {
          ldmatrix_trans(pairs, bias2 + g * 16 * BiasTile::kRowBytes);
        } else {  // offset(row, 2 g + x) is offset(row, x) ^ 32 g: the tile begins at 1024 bytes
          ldmatrix(pairs, (bias2 ^ (32 * (g % 4))) + g / 4 * BiasTile::kBoxBytes);
        }
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4; ++i) {
        int x = 8 * g + 2 * i;
        float2 value = *reinterpret_cast<const float2*>(columns + 16 * g + 8 * (i >> 1));
        if constexpr (kBias2) {
          float2 b2 = ptx::unpack<Element>(pairs[i]);
          value.x = fmaf(b2.x, unit, value.x), value.y = fmaf(b2.y, unit, value.y);
        }
        s[x] = value.x, s[x + 1] = value.y;
      }
    }
    fence_registers(s);
  }

  // dp = dO V^T - delta
  CUTLASS_DEVICE static void start_products(Scores& dp, const Operands& operands, int stage) {
    if constexpr (kKeys) {
      Rank1Terms::start_columns<kColumns>(dp, operands.ones, operands.products + stage * Operands::kNextProducts);
    } else {
      Rank1Terms::start_rows<kColumns>(dp, operands.products, operands.ones);
    }
    start_scores(dp, operands.owned + Operands::kOwnedSecond,
                 operands.walked + stage * Operands::kNextStage + Operands::kWalkedSecond);
  }
  // x += owned walked^T
  CUTLASS_DEVICE static void start_scores(Scores& x, uint32_t owned, uint32_t walked) {
    CUTLASS_PRAGMA_UNROLL
    for (int step = 0; step < kHeadSteps; ++step) {
      wgmma<Element, kColumns, Major::K>(x, OwnedTile::descriptor(owned + OwnedTile::columns_step(step)),
                                         WalkedTile::descriptor(walked + WalkedTile::columns_step(step)));
    }
    wgmma_commit();
  }
  // result += x walked
  CUTLASS_DEVICE static void start_result(Result& result, const Packed& x, uint32_t walked) {
    CUTLASS_PRAGMA_UNROLL
    for (int step = 0; step < kColumnSteps; ++step) {
      wgmma<Element, kHeadDim, Major::MN>(result, x + 4 * step,
                                          WalkedTile::descriptor(walked + WalkedTile::rows_step(step)));
    }
  }

  CUTLASS_DEVICE static void pack(Packed& packed, const Scores& x) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kColumns / 4; ++i) packed[i] = ptx::pack<Element>(x[2 * i], x[2 * i + 1]);
  }

  // What becomes of one owned tile, in registers.
  struct Results {
    float row[2];                          // the rows' part of the exponent
    Result of_ds;                          // dk or dq
    float of_p[kKeys ? kHeadDim / 2 : 2];  // dv
    float sums[2];                         // of dS over columns, this lane's share
    float* dbias2;                         // where dS goes too: this lane's next four keys, or null
    int keys_left;                         // from there on
  };
  CUTLASS_DEVICE static void find_dbias2(Results& results, const BackwardArgs& args, const Coordinates& block,
                                         const ConsumerCoord& at) {
    int query = block.owned + at.tile * kOwned + 16 * at.warp + at.lane / 4 + (at.lane % 2 != 0 ? 8 : 0);
    int key = at.lane % 4 / 2 * 4;
    int64_t row = (int64_t(block.batch) * args.H + block.head) * args.Lq + query;
    results.dbias2 = args.stores_dbias2 ? args.dbias2 + row * args.Lk + key : nullptr;
    results.keys_left = query < args.Lq ? args.Lk - key : 0;
  }
  CUTLASS_DEVICE static void store_dbias2(const Scores& ds, Results& results, const BackwardArgs& args,
                                          const ConsumerCoord& at) {
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < kColumns / 2; x += 4) {
      float four[4];
      four_of_a_row(four, ds + x, at.lane % 2 != 0);
      store_four(results.dbias2 + 2 * x, four, results.keys_left - 2 * x, args.Lk % 4 == 0);
    }
    results.dbias2 += kColumns, results.keys_left -= kColumns;
  }

  // P and dS of a step whose s and dp are under way, packed. What was under way before dp is finished on the way: s,
  // and the results of the step before, which had `last_stage`.
  CUTLASS_DEVICE static void finish_scores(Packed& p, Packed& ds, Scores& s, Scores& dp, Results& results,
                                           Shared& shared, const BackwardArgs& args, int stage, int last_stage,
                                           PendingStore& pending, const ConsumerCoord& at) {
    wgmma_wait<2>();
    fence_registers(s);
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < kColumns / 2; ++x) s[x] = ptx::exp2(fmaf(s[x], args.c, results.row[row_of(x)]));
    fence_registers(s);  // all of it before waiting for more
    wgmma_wait<1>();
    if (kKeys) keep(p);
    keep(ds);
    if (last_stage >= 0) {
      shared.empty[last_stage].arrive();
    } else {
      pending.finish(shared.owned_empty, at);
    }
    if constexpr (kKeys) pack(p, s);
    wgmma_wait<0>();
    fence_registers(dp);
    fence_registers(results.of_ds);
    fence_registers(results.of_p);
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < kColumns / 2; ++x) s[x] *= dp[x];
    if constexpr (!kKeys) {
      if (results.dbias2 != nullptr) store_dbias2(s, results, args, at);
    }
    if (kKeys && args.dbias1 != nullptr) {
      CUTLASS_PRAGMA_UNROLL
      for (int x = 0; x < kColumns / 2; ++x) results.sums[row_of(x)] += s[x];
    }
    pack(ds, s);
    if constexpr (kDqInShared) hand_over(ds, shared, stage, at);
  }
  CUTLASS_DEVICE static void start_results(Results& results, const Packed& p, const Packed& ds,
                                           const Operands& operands, int stage) {
    uint32_t walked = operands.walked + stage * Operands::kNextStage;
    if constexpr (kKeys) start_result(results.of_p, p, walked + Operands::kWalkedSecond);
    start_result(results.of_ds, ds, walked);
    wgmma_commit();
  }

  // All visible columns, one step after another.
  CUTLASS_DEVICE static void walk(Shared& shared, const BackwardArgs& args, typename Config::Pipe& pipe, int num_steps,
                                  const Operands& operands, PendingStore& pending, Results& results, const DqWalk& dq,
                                  const ConsumerCoord& at) {
    Scores s, dp;
    Packed p, ds;
    int last_stage = -1;
    typename Config::Pipe last_pipe;
    shared.full[pipe.index].wait(pipe.phase);
    begin(s, shared, pipe.index, args.unit, at);
    fence_registers(results.of_ds);
    fence_registers(results.of_p);
    wgmma_begin();
    start_scores(s, operands.owned, operands.walked + pipe.index * Operands::kNextStage);
    wgmma_commit();  // of no results yet
    start_products(dp, operands, pipe.index);
    for (int step = 1;; ++step) {
      finish_scores(p, ds, s, dp, results, shared, args, pipe.index, last_stage, pending, at);
      if constexpr (kDqInShared) {
        if (step > 1) DqShared<Config>::add(dq, step - 2, last_pipe, shared, args, at);
        last_pipe = pipe;
      }
      last_stage = pipe.index;
      pipe.advance();
      if (step == num_steps) break;
      // The results of this step beside the exponentials of the next.
      shared.full[pipe.index].wait(pipe.phase);
      begin(s, shared, pipe.index, args.unit, at);
      wgmma_begin();
      start_scores(s, operands.owned, operands.walked + pipe.index * Operands::kNextStage);
      start_results(results, p, ds, operands, last_stage);
      start_products(dp, operands, pipe.index);
    }
    if constexpr (Config::kHandsBack) shared.owned_empty[dq.owned_pipe.index].arrive();
    wgmma_begin();
    start_results(results, p, ds, operands, last_stage);
    wgmma_wait<0>();
    if (kKeys) keep(p);
    keep(ds);
    fence_registers(results.of_ds);
    fence_registers(results.of_p);
    shared.empty[last_stage].arrive();
    if constexpr (kDqInShared) {
      DqShared<Config>::add(dq, num_steps - 1, last_pipe, shared, args, at);
      shared.dq.keys_read[dq.owned_pipe.index].arrive();
    }
  }

  // Operands in registers stay where they are until here, as far as nvcc's front end goes. What ptxas makes of it is
  // read from the machine code (tests/system/test_cuda_compile.py); docs/kernels-sm90-dq-global.md, Registers of a
  // product.
  CUTLASS_DEVICE static void keep(Packed& x) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kColumns / 4; ++i) asm volatile("" : "+r"(x[i])::"memory");
  }

  CUTLASS_DEVICE static void finish(Shared& shared, const BackwardArgs& args, const DqDkdvMaps& maps,
                                    const Coordinates& block, const typename Config::OwnedPipe& pipe, bool computed,
                                    Results& results, uint32_t& exchanged, const ConsumerCoord& at) {
    auto& owned = shared.owned[pipe.index][at.warpgroup];
    int l = block.owned + at.tile * kOwned, n = block.row + at.row;
    if (kKeys && args.dbias1 != nullptr) {
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2; ++r) {
        float sum = results.sums[r];
        sum += ptx::shfl_xor(sum, 1);
        sum += ptx::shfl_xor(sum, 2);
        int k = l + 16 * at.warp + at.lane / 4 + 8 * r;
        if (at.lane % 4 != 0 || k >= args.Lk) continue;
        int64_t bn = int64_t(block.batch) * args.N + n;
        if (args.stores_dbias1) {
          args.dbias1[(bn * args.H + block.head) * args.Lk + k] = sum;
        } else if (computed) {
          atomicAdd(args.dbias1 + bn * args.Lk + k, sum);
        }
      }
    }
    bool stores_first = args.stores_first, stores_second = kKeys && args.stores_second;
    if constexpr (Config::kHandsBack) {
      if (stores_second) store_rows<Element>(maps.second_rows, results.of_p, 1.f, at, l, block.head, n, block.batch);
      if (stores_first) {
        store_rows<Element>(maps.first_rows, results.of_ds, args.scale, at, l, block.head, n, block.batch);
      }
      return;
    }
    if constexpr (kDqInShared) shared.dq.keys_read[pipe.index].wait(pipe.phase);
    at.sync();  // no warp's products read the owned tiles any more
    if constexpr (Config::kClusterBlocks > 1) {
      if (computed) ClusterReduce<Config>::exchange(shared, owned, results.of_ds, results.of_p, exchanged, at);
      (Config::rank() == 0 ? stores_second : stores_first) = false;
    }
    const float scale[2] = {args.scale, args.scale}, one[2] = {1.f, 1.f};
    if (stores_second) {
      store_tile<Element, OwnedTile>(maps.result_second, owned.second, results.of_p, one, at, l, block.head, n,
                                     block.batch);
    }
    if (stores_first) {
      store_tile<Element, OwnedTile>(maps.result_first, owned.first, results.of_ds, scale, at, l, block.head, n,
                                     block.batch);
    }
  }

  // kDqInGlobal: where the walk through all accumulators is.
  struct DqGlobalState {
    typename DqGlobal<Config>::Walk walk;
  };
  struct NoDqGlobal {};

  CUTLASS_DEVICE static void run(Shared& shared, const BackwardArgs& args, const DqDkdvMaps& maps) {
    ConsumerCoord at = ConsumerCoord::of_thread<Config::kTiles>();
    typename Config::Pipe pipe;
    typename Config::OwnedPipe owned_pipe;
    PendingStore pending;
    uint32_t exchanged = 0;  // parity of how often results have been
    cute::conditional_t<kDqInGlobal, DqGlobalState, NoDqGlobal> dq_global;
    for (typename Config::template Scheduler<TileReader::kConsumer> tiles(shared, args); tiles.tile < args.num_tiles;
         tiles.advance(shared, args), owned_pipe.advance()) {
      Coordinates block = Config::locate(args, tiles.tile);
      int buffer = owned_pipe.index;
      shared.owned_full[buffer].wait(owned_pipe.phase);
      const typename Config::Visible visible = shared.visible[buffer];
      const bool computed = uniform(visible.num_steps > 0) != 0;  // the compiler keeps uniform what follows from it
      DqWalk dq{maps, block, owned_pipe, false, false};
      if constexpr (kDqInShared) {
        dq.first = visible.first, dq.last = visible.tile + 1 == visible.end;
      }
      const bool exists = block.row + at.row < args.N && block.owned + at.tile * kOwned < Config::num_owned(args);
      // kDqInGlobal: every warpgroup has a part in dq of all keys; hidden ones have P = 0.
      const bool computes = kDqInGlobal ? computed : (visible.warpgroups >> at.warpgroup & 1) != 0;
      if constexpr (kDqInGlobal) dq_global.walk.begins = true;
      Results results{};
      if (computes) {
        const float* exponents = shared.exponents[buffer][at.warpgroup] + 16 * at.warp + at.lane / 4;
        results.row[0] = exponents[0], results.row[1] = exponents[8];
        if constexpr (!kKeys) find_dbias2(results, args, block, at);
        if constexpr (kDqInGlobal) {
          DqGlobalMainloop<DqDkdvMainloop>::run(shared, args, pipe, Operands(shared, buffer, at), results,
                                                dq_global.walk, shared.owned_empty[buffer], block, at);
        } else {
          const int num_steps = kKeys ? Config::columns(args).num_steps() : uniform(visible.num_steps);
          walk(shared, args, pipe, num_steps, Operands(shared, buffer, at), pending, results, dq, at);
        }
      } else {  // nothing to compute, but stages go round
        if constexpr (Config::kHandsBack) shared.owned_empty[buffer].arrive();
        if constexpr (kDqInGlobal) DqGlobal<Config>::add_nothing(dq_global.walk, shared);
        pending.finish(shared.owned_empty, at);
        const int num_steps = !computed ? 0 : kKeys ? Config::columns(args).num_steps() : uniform(visible.num_steps);
        for (int step = 0; step < num_steps; ++step, pipe.advance()) {
          shared.full[pipe.index].wait(pipe.phase);
          if constexpr (kDqInShared) hand_nothing_over(shared, pipe.index, exists, at);
          shared.empty[pipe.index].arrive();
          if constexpr (kDqInShared) DqShared<Config>::add(dq, step, pipe, shared, args, at);
        }
        if constexpr (kDqInShared) {
          if (!computed && dq.first && dq.last) DqShared<Config>::store_zeros(dq, shared, args, at);
          shared.dq.keys_read[buffer].arrive();
        }
      }
      if (exists) finish(shared, args, maps, block, owned_pipe, computes, results, exchanged, at);
      if constexpr (Config::kHandsBack) continue;
      pending.buffer = buffer;
      if (Config::kBuffers == 1) pending.finish(shared.owned_empty, at);  // the next tiles wait for this place
    }
    if (at.issues()) cute::tma_store_wait<0>();  // shared memory must outlive the reads of it
    ptx::wait_for_kernel_before();
  }
};

}  // namespace ds4s::sm90
