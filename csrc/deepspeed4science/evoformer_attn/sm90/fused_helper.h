// The last warpgroup of a fused pass: it brings what the others work on, as producers do, and makes dq of the dS that
// they hand over, dq += dS K. dq of one (b, n, h) stays in shared memory while its block goes from key to key.
//
// One after the other, for each step: its product, then what is kStages steps ahead. The others need neither soon.
#pragma once

#include "sm90/row_pass_producer.h"

namespace ds4s::sm90 {

template <typename Config>
struct FusedHelper {
  using Element = typename Config::Element;
  using Shared = typename Config::Shared;
  using Producer = RowPassProducer<Config>;
  using OwnedTile = typename Config::OwnedTile;
  using DsTile = typename Config::BiasTile;
  using Sum = float[Config::kHeadDim / 2];
  static constexpr int kForWalked = 0, kForStatistics = 1, kForBias2 = 2, kForOwned = 3;  // warps
  static constexpr int kTiles = Config::kTiles, kOwned = Config::kOwned, kColumns = Config::kColumns;

  CUTLASS_DEVICE static void init(typename Config::Dq& dq) {
    for (auto& stage : dq.full) {
      for (auto& barrier : stage) barrier.init(128);
    }
    for (auto& barrier : dq.keys_read) barrier.init(128);
  }

  // A step of the block's walk over all its tiles.
  struct Step {
    int tile, query = 0;
    typename Config::Coordinates block;
    typename Config::Turn turn;
    typename Config::OwnedTurn owned_turn;

    CUTLASS_DEVICE explicit Step(const BackwardArgs& args) : tile(Config::first_tile(args)) { locate(args); }
    CUTLASS_DEVICE bool exists(const BackwardArgs& args) const { return tile < args.num_tiles; }
    CUTLASS_DEVICE bool is_first_of_tile() const { return query == 0; }
    CUTLASS_DEVICE void advance(const BackwardArgs& args) {
      turn.advance();
      query += kColumns;
      if (query < args.Lq) return;
      query = 0, tile = Config::next_tile(args, tile);
      owned_turn.advance();
      locate(args);
    }

   private:
    CUTLASS_DEVICE void locate(const BackwardArgs& args) {
      if (exists(args)) block = Config::locate(args, tile);
    }
  };

  // Statistics of the queries of a step, and at the first of a tile of its keys: loaded by one warp a step before they
  // are stored.
  struct Statistics {
    static constexpr int kQueries = kColumns / 32, kKeys = kTiles * kOwned / 32;  // of a lane
    float2 query[kQueries];
    uint32_t key[kKeys], shift_bits;

    CUTLASS_DEVICE void load(const BackwardArgs& args, const Step& at, int lane) {
      if (!at.exists(args)) return;
      QueryStatistics queries(args, at.block.batch, at.block.row, at.block.head);
      CUTLASS_PRAGMA_UNROLL
      for (int x = 0; x < kQueries; ++x) query[x] = queries.load(at.query + 32 * x + lane);
      Bias1OfRow<Element> bias1(args, at.block.batch, at.block.row);
      shift_bits = bias1.shift_bits;
      if (!at.is_first_of_tile()) return;
      CUTLASS_PRAGMA_UNROLL
      for (int x = 0; x < kKeys; ++x) key[x] = bias1.load(at.block.owned + 32 * x + lane);
    }
    CUTLASS_DEVICE void store(Shared& shared, const BackwardArgs& args, const Step& at, int lane) {
      float shift = ptx::bits_to_float<Element>(shift_bits);
      if (at.is_first_of_tile()) {
        shared.owned_empty[at.owned_turn.stage].wait(at.owned_turn.parity ^ 1);
        CUTLASS_PRAGMA_UNROLL
        for (int x = 0; x < kKeys; ++x) {
          float value = Bias1OfRow<Element>::value(key[x], shift, at.block.owned + 32 * x + lane, args.Lk);
          shared.exponents[at.owned_turn.stage][x / 2][x % 2 * 32 + lane] = value * kLog2e;
        }
        shared.owned_full[at.owned_turn.stage].arrive();  // every lane for what it wrote itself
      }
      if (shift != 0.f) {  // rare
        QueryStatistics queries(args, at.block.batch, at.block.row, at.block.head);
        queries.shift(args, at.block.batch, at.block.row, at.block.head);
        CUTLASS_PRAGMA_UNROLL
        for (int x = 0; x < kQueries; ++x) query[x] = queries.load(at.query + 32 * x + lane);
      }
      shared.empty[at.turn.stage].wait(at.turn.parity ^ 1);
      CUTLASS_PRAGMA_UNROLL
      for (int x = 0; x < kQueries; ++x) {
        float2 value = QueryStatistics::value(query[x], at.query + 32 * x + lane, args.Lq);
        shared.scores[at.turn.stage][0][32 * x + lane] = value.x * args.unit;
        ExtraTerms::store_alone(shared.products[at.turn.stage], 32 * x + lane, value.y);
      }
      cutlass::arch::fence_view_async_shared();
      shared.full[at.turn.stage].arrive();
    }
  };

  // Everything that a step needs, each warp its part, so that none keeps the next product waiting. Then on to the next.
  CUTLASS_DEVICE static void bring(Step& step, Statistics& statistics, Shared& shared, const BackwardArgs& args,
                                   const RowPassMaps& maps, const Place& at) {
    if (!step.exists(args)) return;
    int stage = step.turn.stage;
    if (at.warp == kForStatistics) {
      statistics.store(shared, args, step, at.lane);
    } else if (at.lane == 0) {
      if (at.warp == kForOwned && step.is_first_of_tile()) {
        Producer::bring_owned(shared, maps, step.block, step.owned_turn);
      }
      if (at.warp == kForWalked || at.warp == kForBias2) shared.empty[stage].wait(step.turn.parity ^ 1);
      if (at.warp == kForWalked) Producer::bring_walked(shared, maps, step.block, step.query, stage);
      if (at.warp == kForBias2) Producer::bring_bias2(shared, args, maps, step.block, step.query, stage);
    }
    step.advance(args);
    if (at.warp == kForStatistics) statistics.load(args, step, at.lane);
    __syncwarp();
  }

  // sum += dS K
  CUTLASS_DEVICE static void multiply(Sum& sum, uint32_t ds, uint32_t keys) {
    constexpr uint32_t kNextKeys = 2 * OwnedTile::kBytes >> 4, kNextDs = DsTile::kBytes >> 4;
    fence_registers(sum);
    wgmma_begin();
    CUTLASS_PRAGMA_UNROLL
    for (int t = 0; t < kTiles; ++t) {
      CUTLASS_PRAGMA_UNROLL
      for (int step = 0; step < kOwned / 16; ++step) {
        wgmma<Element, Config::kHeadDim, Major::MN>(
            sum, DsTile::descriptor(ds + t * kNextDs + DsTile::columns_step(step)),
            OwnedTile::descriptor(keys + t * kNextKeys + OwnedTile::rows_step(step)));
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
    fence_registers(sum);
  }

  // What dq of a step's queries has come to, this thread's part; 0 with the first keys.
  CUTLASS_DEVICE static float4* sum_of(const Step& step, Shared& shared) {
    return reinterpret_cast<float4*>(shared.dq.tiles[step.query / kColumns].x[0][threadIdx.x % 128]);
  }
  CUTLASS_DEVICE static void load_sum(Sum& sum, const Step& step, Shared& shared) {
    const float4* mine = sum_of(step, shared);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Config::kHeadDim / 8; ++i) {
      float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
      if (step.block.owned != 0) x = mine[128 * i];
      sum[4 * i] = x.x, sum[4 * i + 1] = x.y, sum[4 * i + 2] = x.z, sum[4 * i + 3] = x.w;
    }
  }
  CUTLASS_DEVICE static void store_sum(const Sum& sum, const Step& step, Shared& shared) {
    float4* mine = sum_of(step, shared);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Config::kHeadDim / 8; ++i) {
      mine[128 * i] = make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]);
    }
  }

  // A step's product. dq leaves with the last keys.
  CUTLASS_DEVICE static void add(Sum& sum, const Step& step, Shared& shared, const BackwardArgs& args,
                                 const RowPassMaps& maps, const Place& at) {
    bool last = step.block.owned + kTiles * kOwned >= args.Lk;
    int stage = step.turn.stage;
    if (step.is_first_of_tile()) {
      shared.owned_full[step.owned_turn.stage].wait(step.owned_turn.parity);
      if (step.block.owned == 0) {  // what was stored last has left shared memory
        if (at.issues()) cute::tma_store_wait<0>();
        at.sync();
      }
      // dq's place may hold the shifted lse (backward/host.h) that the last blocks of the kernel before still read.
      if (last && Bias1OfRow<Element>(args, step.block.batch, step.block.row).shift() != 0.f) {
        ptx::wait_for_kernel_before();
      }
    }
    for (int t = 0; t < kTiles; ++t) shared.dq.full[stage][t].wait(step.turn.parity);
    multiply(sum, place_of(shared.stages[stage].bias2), place_of(shared.owned[step.owned_turn.stage]));
    shared.empty[stage].arrive();
    if (step.query + kColumns >= args.Lq) shared.dq.keys_read[step.owned_turn.stage].arrive();
    if (last) {
      at.sync();  // everybody has read what is written over now
      const float scale[2] = {args.scale, args.scale};
      store_tile<Element, OwnedTile>(maps.dq, reinterpret_cast<uint8_t*>(&shared.dq.tiles[step.query / kColumns]), sum,
                                     scale, at, step.query, step.block.head, step.block.row, step.block.batch);
    } else {
      store_sum(sum, step, shared);
    }
  }

  CUTLASS_DEVICE static void run(Shared& shared, const BackwardArgs& args, const RowPassMaps& maps) {
    Place at = Place::of_thread<kTiles>();
    Step next(args);
    Statistics statistics;
    Sum sum;
    if (at.warp == kForStatistics) statistics.load(args, next, at.lane);
    for (int s = 0; s < Config::kStages; ++s) bring(next, statistics, shared, args, maps, at);
    Step step(args);
    load_sum(sum, step, shared);
    while (step.exists(args)) {
      add(sum, step, shared, args, maps, at);
      step.advance(args);
      load_sum(sum, step, shared);  // arrives meanwhile
      bring(next, statistics, shared, args, maps, at);
    }
    if (at.issues()) cute::tma_store_wait<0>();  // shared memory must outlive the reads of it
    ptx::wait_for_kernel_before();
  }
};

}  // namespace ds4s::sm90
