// dbias2 on Hopper: a warpgroup owns 64 x 64 elements of one (b, h) and walks over rows n, dbias2 += P (dP - delta) in
// its registers. Where that gives too few blocks, N is cut into slices.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "epilogue/atomic_add.h"
#include "sm90/backward_config.h"
#include "sm90/extra_terms.h"

namespace ds4s::sm90 {

struct BiasPassMaps {
  CUtensorMap q, k, v, do_;
};

template <typename Config>
struct BiasPassProducer {
  using Element = typename Config::Element;
  using Shared = typename Config::Shared;
  using Coordinates = typename Config::Coordinates;
  using Tile = typename Config::Tile;
  static constexpr int kQueryTiles = Config::kQueryTiles, kKeyTiles = Config::kKeyTiles;

  // One thread: everything that is tiles.
  CUTLASS_DEVICE static void run(Shared& shared, const BackwardArgs& args, const BiasPassMaps& maps) {
    typename Config::Turn turn;
    for (int tile = blockIdx.x; tile < args.num_tiles; tile += gridDim.x) {
      Coordinates at = Config::locate(args, tile);
      for (int n = at.row; n < at.row_end; ++n, turn.advance()) {
        typename Config::Stage& stage = shared.stages[turn.stage];
        FullBarrier& full = shared.full[turn.stage];
        shared.empty[turn.stage].wait(turn.parity ^ 1);
        full.arrive_and_expect_tx(2 * (kQueryTiles + kKeyTiles) * Tile::kBytes);
        for (int t = 0; t < kQueryTiles; ++t) {
          int query = at.query + t * Config::kQueries;
          load_tile<Tile>(maps.q, full, stage.queries[t].q, 0, query, at.head, n, at.batch);
          load_tile<Tile>(maps.do_, full, stage.queries[t].do_, 0, query, at.head, n, at.batch);
        }
        for (int t = 0; t < kKeyTiles; ++t) {
          int key = at.key + t * Config::kKeys;
          load_tile<Tile>(maps.k, full, stage.keys[t].k, 0, key, at.head, n, at.batch);
          load_tile<Tile>(maps.v, full, stage.keys[t].v, 0, key, at.head, n, at.batch);
        }
      }
    }
  }

  // Statistics of rows and columns of one n, from global memory.
  struct Statistics {
    static constexpr int kRows = 2 * kQueryTiles, kColumns = 2 * kKeyTiles;  // of a lane
    uint32_t shift_bits, column[kColumns];
    float2 row[kRows];

    // Does not wait for what it loads; `store` does.
    CUTLASS_DEVICE void load(const BackwardArgs& args, const Coordinates& at, int n, int lane) {
      Bias1OfRow<Element> bias1(args, at.batch, n);
      QueryStatistics queries(args, at.batch, n, at.head);
      shift_bits = bias1.shift_bits;
      CUTLASS_PRAGMA_UNROLL
      for (int x = 0; x < kColumns; ++x) column[x] = bias1.load(at.key + 32 * x + lane);
      CUTLASS_PRAGMA_UNROLL
      for (int x = 0; x < kRows; ++x) row[x] = queries.load(at.query + 32 * x + lane);
    }
    CUTLASS_DEVICE void store(typename Config::Stage& stage, const BackwardArgs& args, const Coordinates& at, int n,
                              int lane) {
      float shift = ptx::bits_to_float<Element>(shift_bits);
      if (shift != 0.f) {  // rare
        QueryStatistics queries(args, at.batch, n, at.head);
        queries.shift(args, at.batch, n, at.head);
        CUTLASS_PRAGMA_UNROLL
        for (int x = 0; x < kRows; ++x) row[x] = queries.load(at.query + 32 * x + lane);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int x = 0; x < kRows; ++x) {
        float2 value = QueryStatistics::value(row[x], at.query + 32 * x + lane, args.Lq);
        ExtraTerms::store_first(stage.queries[x / 2].scores, x % 2 * 32 + lane, value.x * args.unit);
        ExtraTerms::store_alone(stage.queries[x / 2].products, x % 2 * 32 + lane, value.y);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int x = 0; x < kColumns; ++x) {
        float value = Bias1OfRow<Element>::value(column[x], shift, at.key + 32 * x + lane, args.Lk);
        ExtraTerms::store_second(stage.keys[x / 2].scores, x % 2 * 32 + lane, value * args.unit);
      }
      cutlass::arch::fence_view_async_shared();
    }
  };

  // Warps in turn, each its own n, the loads for its next one under way: a step is shorter than they take.
  CUTLASS_DEVICE static void run_statistics(Shared& shared, const BackwardArgs& args, int warp) {
    constexpr int kWarps = Config::kStatisticsWarps;
    int lane = threadIdx.x % 32, step = 0;
    typename Config::Turn turn;
    for (int tile = blockIdx.x; tile < args.num_tiles; tile += gridDim.x) {
      Coordinates at = Config::locate(args, tile);
      Statistics statistics;
      int first = at.row + (warp - step + kWarps) % kWarps;
      if (first < at.row_end) statistics.load(args, at, first, lane);
      for (int n = at.row; n < at.row_end; ++n, turn.advance(), step = step == kWarps - 1 ? 0 : step + 1) {
        if (step != warp) continue;
        shared.empty[turn.stage].wait(turn.parity ^ 1);
        statistics.store(shared.stages[turn.stage], args, at, n, lane);
        shared.full[turn.stage].arrive();  // every lane for what it wrote itself
        if (n + kWarps < at.row_end) statistics.load(args, at, n + kWarps, lane);
      }
    }
  }
};

template <typename Config>
struct BiasPassConsumer {
  using Element = typename Config::Element;
  using Shared = typename Config::Shared;
  using Stage = typename Config::Stage;
  using Coordinates = typename Config::Coordinates;
  using Tile = typename Config::Tile;
  static constexpr int kColumns = Config::kColumns;
  using Scores = float[kColumns / 2];
  using Biases = float[Config::kKeys / 2];

  // The place of a lane's first element.
  CUTLASS_DEVICE static int first_query(const Coordinates& block, const Place& at) {
    return block.query + at.row * Config::kQueries + 16 * at.warp + at.lane / 4;
  }
  CUTLASS_DEVICE static int first_key(const Coordinates& block, const Place& at) {
    return block.key + at.tile * Config::kKeys + 2 * (at.lane % 4);
  }

  // log2(e) bias2, as accumulators have it; nothing is read past its ends.
  CUTLASS_DEVICE static void load_bias2(Biases& bias2, const BackwardArgs& args, const Coordinates& block,
                                        const Place& at) {
    int query = first_query(block, at), key = first_key(block, at);
    const Element* ptr = static_cast<const Element*>(args.bias2) + block.batch * args.bias2_stride[0] +
                         block.head * args.bias2_stride[1];
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < Config::kKeys / 2; x += 2) {
      int i = query + 8 * row_of(x), j = key + x / 4 * 8;
      uint32_t pair = 0;
      const Element* element = ptr + i * args.bias2_stride[2] + j;
      if (i < args.Lq && j + 1 < args.Lk) pair = *reinterpret_cast<const uint32_t*>(element);
      if (i < args.Lq && j + 1 == args.Lk) pair = ptx::load_bits(element);
      float2 value = ptx::unpack<Element>(pair);
      bias2[x] = value.x * kLog2e, bias2[x + 1] = value.y * kLog2e;
    }
  }

  // x += a b
  CUTLASS_DEVICE static void start(Scores& x, uint32_t a, uint32_t b) {
    CUTLASS_PRAGMA_UNROLL
    for (int step = 0; step < Config::kHeadSteps; ++step) {
      wgmma<Element, kColumns, Major::K>(x, Tile::descriptor(a + Tile::columns_step(step)),
                                         Tile::descriptor(b + Tile::columns_step(step)));
    }
    wgmma_commit();
  }

  CUTLASS_DEVICE static void walk(Shared& shared, const BackwardArgs& args, typename Config::Turn& turn,
                                  const Coordinates& block, const Biases& bias2, Biases& dbias2, const Place& at) {
    // Places of the operands: queries begin with Q, keys with K.
    constexpr uint32_t kNextStage = sizeof(Stage) >> 4, kSecond = Tile::kBytes >> 4, kScores = 2 * kSecond;
    constexpr uint32_t kProducts = kScores + (ExtraTile::kBytes >> 4);
    uint32_t first_queries = place_of(&shared.stages[0].queries[at.row]);
    uint32_t first_keys = place_of(&shared.stages[0].keys[at.tile]), ones = place_of(shared.ones);
    Scores s, dp;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int n = block.row; n < block.row_end; ++n, turn.advance()) {
      shared.full[turn.stage].wait(turn.parity);
      uint32_t queries = first_queries + turn.stage * kNextStage, keys = first_keys + turn.stage * kNextStage;
      CUTLASS_PRAGMA_UNROLL
      for (int part = 0; part < Config::kKeys; part += kColumns) {
        wgmma_begin();
        uint32_t part_keys = keys + Tile::rows_step(part / 16);
        ExtraTerms::start_sum<kColumns>(s, queries + kScores, keys + kScores + ExtraTile::rows_step(part / 16));
        start(s, queries, part_keys);
        ExtraTerms::start_rows<kColumns>(dp, queries + kProducts, ones);
        start(dp, queries + kSecond, part_keys + kSecond);
        wgmma_wait<1>();
        fence_registers(s);
        CUTLASS_PRAGMA_UNROLL
        for (int x = 0; x < kColumns / 2; ++x) s[x] = ptx::exp2(fmaf(s[x], args.c, bias2[part / 2 + x]));
        fence_registers(s);  // all of it before waiting for more
        wgmma_wait<0>();
        fence_registers(dp);
        if (part + kColumns == Config::kKeys) shared.empty[turn.stage].arrive();
        CUTLASS_PRAGMA_UNROLL
        for (int x = 0; x < kColumns / 2; ++x) dbias2[part / 2 + x] = fmaf(s[x], dp[x], dbias2[part / 2 + x]);
      }
    }
  }

  // Four neighbours of a row: two lanes exchange what they have of two rows.
  CUTLASS_DEVICE static void store(const Biases& dbias2, const BackwardArgs& args, const Coordinates& block,
                                   const Place& at) {
    int query = first_query(block, at), key = first_key(block, at);
    int64_t offset = (int64_t(block.batch) * args.H + block.head) * args.Lq;
    if (!args.adds_dbias2) offset += int64_t(block.slice) * args.B * args.H * args.Lq;
    bool odd = at.lane % 2 != 0;
    query += odd ? 8 : 0, key -= odd ? 2 : 0;
    float* out = args.dbias2 + (offset + query) * args.Lk + key;
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < Config::kKeys / 2; x += 4) {
      float give[2] = {odd ? dbias2[x] : dbias2[x + 2], odd ? dbias2[x + 1] : dbias2[x + 3]};
      float got[2] = {ptx::shfl_xor(give[0], 1), ptx::shfl_xor(give[1], 1)};
      float value[4] = {odd ? got[0] : dbias2[x], odd ? got[1] : dbias2[x + 1], odd ? dbias2[x + 2] : got[0],
                        odd ? dbias2[x + 3] : got[1]};
      int valid = query < args.Lq ? args.Lk - (key + 2 * x) : 0;
      float* dst = out + 2 * x;
      if (args.adds_dbias2) {
        atomic_add_access<4>(dst, value, valid);
      } else if (valid >= 4 && args.Lk % 4 == 0) {
        *reinterpret_cast<float4*>(dst) = make_float4(value[0], value[1], value[2], value[3]);
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int e = 0; e < 4; ++e) {
          if (e < valid) dst[e] = value[e];
        }
      }
    }
  }

  CUTLASS_DEVICE static void run(Shared& shared, const BackwardArgs& args) {
    Place at = Place::of_thread<Config::kKeyTiles>();  // its row: the tile of queries
    typename Config::Turn turn;
    for (int tile = blockIdx.x; tile < args.num_tiles; tile += gridDim.x) {
      Coordinates block = Config::locate(args, tile);
      if (block.query + at.row * Config::kQueries < args.Lq && block.key + at.tile * Config::kKeys < args.Lk) {
        Biases bias2, dbias2 = {};
        load_bias2(bias2, args, block, at);
        fence_registers(bias2);  // kept as they are, not unpacked again in every turn
        walk(shared, args, turn, block, bias2, dbias2, at);
        store(dbias2, args, block, at);
      } else {  // nothing to compute, but the ring goes on
        for (int n = block.row; n < block.row_end; ++n, turn.advance()) {
          shared.full[turn.stage].wait(turn.parity);
          shared.empty[turn.stage].arrive();
        }
      }
    }
    ptx::wait_for_kernel_before();
  }
};

template <typename Config>
__global__ void __launch_bounds__(Config::kNumThreads, 1)
    bias_pass(const BackwardArgs args, const __grid_constant__ BiasPassMaps maps) {
  constexpr int kWarpgroups = Config::kWarpgroups;
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  typename Config::Shared& shared = *reinterpret_cast<typename Config::Shared*>(dynamic_shared);

  if (threadIdx.x == 0) {
    for (int s = 0; s < Config::kStages; ++s) shared.full[s].init(1 + 32), shared.empty[s].init(128 * kWarpgroups);
    cutlass::arch::fence_barrier_init();
  }
  if (threadIdx.x < 64) {
    for (auto& stage : shared.stages) {
      for (auto& tile : stage.queries) ExtraTerms::clear(tile.scores, threadIdx.x);
      for (auto& tile : stage.queries) ExtraTerms::clear(tile.products, threadIdx.x);
      for (auto& tile : stage.keys) ExtraTerms::clear(tile.scores, threadIdx.x);
    }
    if (threadIdx.x < 8) ExtraTerms::clear(shared.ones, threadIdx.x), ExtraTerms::store_ones(shared.ones, threadIdx.x);
    cutlass::arch::fence_view_async_shared();
  }
  if (args.waits) ptx::wait_for_kernel_before();
  ptx::let_next_kernel_start();
  __syncthreads();

  if (threadIdx.x < 128 * kWarpgroups) {
    cutlass::arch::warpgroup_reg_alloc<Config::Registers::kConsumer>();
    BiasPassConsumer<Config>::run(shared, args);
  } else {
    cutlass::arch::warpgroup_reg_dealloc<Config::Registers::kProducer>();
    int warp = threadIdx.x / 32 - 4 * kWarpgroups;
    if (warp == 0 && threadIdx.x % 32 == 0) BiasPassProducer<Config>::run(shared, args, maps);
    if (warp >= 1 && warp <= Config::kStatisticsWarps) {
      BiasPassProducer<Config>::run_statistics(shared, args, warp - 1);
    }
  }
}

}  // namespace ds4s::sm90
