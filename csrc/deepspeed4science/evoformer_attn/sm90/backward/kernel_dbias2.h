// dbias2 on Hopper: a warpgroup owns 64 x 64 elements of one (b, h) and walks over the rows n that see its keys,
// dbias2 += P (dP - delta) in its registers. Where that gives too few blocks, N is cut into slices.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "common/atomic_add.h"
#include "sm90/backward/config.h"
#include "sm90/mma/rank1_mma.h"

namespace ds4s::sm90 {

struct Dbias2Maps {
  CUtensorMap q, k, v, do_;
};

template <typename Config>
struct Dbias2Producer {
  using Element = typename Config::Element;
  using Shared = typename Config::Shared;
  using Coordinates = typename Config::Coordinates;
  using QueryTile = typename Config::QueryTile;
  using KeyTile = typename Config::KeyTile;

  // One thread: everything that is tiles. In a cluster one block brings K to both, the other V.
  CUTLASS_DEVICE static void run(Shared& shared, const BackwardArgs& args, const Dbias2Maps& maps) {
    const int rank = Config::rank();
    constexpr int kRowsAhead = 4;  // taking a tile takes as long
    const bool shares = Config::num_blocks() > 1;
    typename Config::Pipe pipe;
    for (ClusterTileScheduler<Config, /*kTakes=*/true> tiles(shared.tile_queue, args); tiles.tile < args.num_tiles;
         tiles.advance()) {
      Coordinates at = Config::locate(args, tiles.tile);
      const typename Config::Rows rows(args, at);
      shared.empty[pipe.index].wait(pipe.phase ^ 1);
      shared.num_rows[pipe.index] = rows.count;
      int n, next;
      rows.load(n, 0);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int i = 1; i <= rows.count; ++i) {
        if (i < rows.count) rows.load(next, i);
        if (i + kRowsAhead == rows.count) tiles.take_next();
        CUTLASS_PRAGMA_UNROLL
        for (int product = 0; product < 2; ++product, pipe.advance()) {
          typename Config::Stage& stage = shared.stages[pipe.index];
          FullBarrier& full = shared.full[pipe.index];
          EmptyBarrier& partner_empty = shared.partner_empty[pipe.index];
          shared.empty[pipe.index].wait(pipe.phase ^ 1);
          if (shares) partner_empty.arrive(rank ^ 1);
          full.arrive_and_expect_tx(QueryTile::kBytes + KeyTile::kBytes);
          load_tile<QueryTile>(product == 0 ? maps.q : maps.do_, full, stage.queries.tile, 0, at.query, at.head, n,
                               at.batch);
          const CUtensorMap& keys = product == 0 ? maps.k : maps.v;
          if (!shares) {
            load_tile<KeyTile>(keys, full, stage.keys.tile, 0, at.key, at.head, n, at.batch);
          } else if (rank == product) {
            partner_empty.wait(pipe.phase);
            load_tile_for_both<KeyTile>(keys, full, stage.keys.tile, 0, at.key, at.head, n, at.batch);
          }
        }
        n = next;
      }
    }
  }

  // Statistics of rows and columns of one n, from global memory.
  struct Statistics {
    static constexpr int kRows = Config::kBlockQueries / 32, kColumns = Config::kBlockKeys / 32;  // of a lane
    float shift;
    uint32_t column[kColumns];
    float2 row[kRows];

    // Does not wait for what it loads; `store` does.
    CUTLASS_DEVICE void load(const BackwardArgs& args, const Coordinates& at, int n, int lane) {
      n = min(n, args.N - 1);  // where no row n sees a key, anything
      Bias1OfRow<Element> bias1(args, at.batch, n);
      QueryStatistics queries(args, at.batch, n, at.head);
      shift = bias1.shift;
      CUTLASS_PRAGMA_UNROLL
      for (int x = 0; x < kColumns; ++x) column[x] = bias1.load(at.key + 32 * x + lane);
      CUTLASS_PRAGMA_UNROLL
      for (int x = 0; x < kRows; ++x) row[x] = queries.load(at.query + 32 * x + lane);
    }
    CUTLASS_DEVICE void store(typename Config::Stage& scores, typename Config::Stage& products,
                              const BackwardArgs& args, const Coordinates& at, bool exists, int lane) {
      CUTLASS_PRAGMA_UNROLL
      for (int x = 0; x < kRows; ++x) {
        float2 value = QueryStatistics::value(row[x], exists ? at.query + 32 * x + lane : args.Lq, args.Lq);
        Rank1Terms::store_first(scores.queries.terms, 32 * x + lane, value.x * args.unit);
        Rank1Terms::store_alone(products.queries.terms, 32 * x + lane, value.y);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int x = 0; x < kColumns; ++x) {
        float value = Bias1OfRow<Element>::value(column[x], shift, exists ? at.key + 32 * x + lane : args.Lk, args.Lk);
        Rank1Terms::store_second(scores.keys.terms, 32 * x + lane, value * args.unit);
      }
      cutlass::arch::fence_view_async_shared();
    }
  };

  // Warps in turn, each its own n, the loads for its next one under way: a step is shorter than they take.
  CUTLASS_DEVICE static void run_statistics(Shared& shared, const BackwardArgs& args, int warp) {
    constexpr int kWarps = Config::kStatisticsWarps;
    int lane = threadIdx.x % 32, step = 0;
    typename Config::Pipe pipe;
    for (ClusterTileScheduler<Config, /*kTakes=*/false> tiles(shared.tile_queue, args); tiles.tile < args.num_tiles;
         tiles.advance()) {
      Coordinates at = Config::locate(args, tiles.tile);
      const typename Config::Rows rows(args, at);
      Statistics statistics;
      const int own = (warp - step + kWarps) % kWarps;  // the first row n of this warp
      int next;
      rows.load(next, min(own, rows.count - 1));
      statistics.load(args, at, next, lane);
      rows.load(next, min(own + kWarps, rows.count - 1));
      CUTLASS_PRAGMA_NO_UNROLL
      for (int i = 0; i < rows.count; ++i, step = step == kWarps - 1 ? 0 : step + 1) {
        typename Config::Pipe scores = pipe;
        pipe.advance();
        typename Config::Pipe products = pipe;
        pipe.advance();
        if (step != warp) continue;
        shared.empty[scores.index].wait(scores.phase ^ 1);
        shared.empty[products.index].wait(products.phase ^ 1);
        statistics.store(shared.stages[scores.index], shared.stages[products.index], args, at, rows.exist(args), lane);
        shared.full[scores.index].arrive();  // every lane for what it wrote itself
        shared.full[products.index].arrive();
        if (i + kWarps < rows.count) statistics.load(args, at, next, lane);
        if (i + 2 * kWarps < rows.count) rows.load(next, i + 2 * kWarps);
      }
    }
  }
};

template <typename Config>
struct Dbias2Mainloop {
  using Element = typename Config::Element;
  using Shared = typename Config::Shared;
  using Stage = typename Config::Stage;
  using Coordinates = typename Config::Coordinates;
  using QueryTile = typename Config::QueryTile;
  using KeyTile = typename Config::KeyTile;
  static constexpr int kKeys = Config::kKeys, kScores = Config::kScores, kColumns = Config::kColumns;
  using Scores = float[kScores / 2];
  using Products = float[kColumns / 2];
  using Sums = float[kKeys / 2];
  // bias2, packed where it would take too many registers.
  static constexpr bool kPacked = kScores > 64;
  using Biases = cute::conditional_t<kPacked, uint32_t, float>[kKeys / (kPacked ? 4 : 2)];

  // The place of a lane's first element.
  CUTLASS_DEVICE static int first_query(const Coordinates& block, const ConsumerCoord& at) {
    return block.query + at.row * Config::kQueries + 16 * at.warp + at.lane / 4;
  }
  CUTLASS_DEVICE static int first_key(const Coordinates& block, const ConsumerCoord& at) {
    return block.key + at.tile * Config::kKeys + 2 * (at.lane % 4);
  }

  // log2(e) bias2, as accumulators have it; nothing is read past its ends.
  CUTLASS_DEVICE static void load_bias2(Biases& bias2, const BackwardArgs& args, const Coordinates& block,
                                        const ConsumerCoord& at) {
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
      if constexpr (kPacked) {
        bias2[x / 2] = pair;
      } else {
        float2 value = ptx::unpack<Element>(pair);
        bias2[x] = value.x * kLog2e, bias2[x + 1] = value.y * kLog2e;
      }
    }
    // Kept as they are, not unpacked again in every turn.
    if constexpr (!kPacked) fence_registers(bias2);
  }
  // s becomes P; bias2 from its element `part` on.
  CUTLASS_DEVICE static void exponentiate(Scores& s, const Biases& bias2, int part, float c) {
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < kScores / 2; x += 2) {
      float2 value;
      if constexpr (kPacked) {
        uint32_t pair = bias2[(part + x) / 2];
        asm volatile("" : "+r"(pair));  // not before
        value = ptx::unpack<Element>(pair);
        value.x *= kLog2e, value.y *= kLog2e;
      } else {
        value = make_float2(bias2[part + x], bias2[part + x + 1]);
      }
      s[x] = ptx::exp2(fmaf(s[x], c, value.x)), s[x + 1] = ptx::exp2(fmaf(s[x + 1], c, value.y));
    }
  }

  // x += queries keys^T
  template <int kN>
  CUTLASS_DEVICE static void start(float (&x)[kN / 2], uint32_t queries, uint32_t keys) {
    CUTLASS_PRAGMA_UNROLL
    for (int step = 0; step < Config::kHeadSteps; ++step) {
      wgmma<Element, kN, Major::K>(x, QueryTile::descriptor(queries + QueryTile::columns_step(step)),
                                   KeyTile::descriptor(keys + KeyTile::columns_step(step)));
    }
    wgmma_commit();
  }

  CUTLASS_DEVICE static void walk(Shared& shared, const BackwardArgs& args, typename Config::Pipe& pipe,
                                  const Coordinates& block, const Biases& bias2, Sums& dbias2,
                                  const ConsumerCoord& at) {
    constexpr uint32_t kNextStage = sizeof(Stage) >> 4;
    // Places of this warpgroup's rows of the first stage, and of what enters their products.
    const int row = at.row * (Config::kQueries / 16), key = at.tile * (kKeys / 16);
    const uint32_t first_queries = place_of(shared.stages[0].queries.tile) + QueryTile::rows_step(row);
    const uint32_t first_keys = place_of(shared.stages[0].keys.tile) + KeyTile::rows_step(key);
    const uint32_t first_query_terms = place_of(shared.stages[0].queries.terms) + Rank1Tile::rows_step(row);
    const uint32_t first_key_terms = place_of(shared.stages[0].keys.terms) + Rank1Tile::rows_step(key);
    const uint32_t ones = place_of(shared.ones);
    Scores s;
    Products dp;
    int left = 0;  // rows n, once the first is there
    CUTLASS_PRAGMA_NO_UNROLL
    do {
      const typename Config::Pipe of_scores = pipe;
      pipe.advance();
      const typename Config::Pipe of_products = pipe;
      pipe.advance();
      shared.full[of_scores.index].wait(of_scores.phase);
      if (left == 0) left = uniform(shared.num_rows[of_scores.index]);
      CUTLASS_PRAGMA_UNROLL
      for (int part = 0; part < kKeys; part += kColumns) {
        const uint32_t keys = first_keys + KeyTile::rows_step(part / 16);
        if (part % kScores == 0) {
          uint32_t stage = of_scores.index * kNextStage;
          wgmma_begin();
          Rank1Terms::start_sum<kScores>(s, stage + first_query_terms,
                                         stage + first_key_terms + Rank1Tile::rows_step(part / 16));
          start<kScores>(s, stage + first_queries, stage + keys);
        }
        if (part == 0) shared.full[of_products.index].wait(of_products.phase);
        uint32_t stage = of_products.index * kNextStage;
        wgmma_begin();
        Rank1Terms::start_rows<kColumns>(dp, stage + first_query_terms, ones);
        start<kColumns>(dp, stage + first_queries, stage + keys);
        if (part % kScores == 0) {
          wgmma_wait<1>();
          fence_registers(s);
          if (part + kScores == kKeys) shared.empty[of_scores.index].arrive();
          exponentiate(s, bias2, part / 2, args.c);
          fence_registers(s);  // all of it before waiting for more
        }
        wgmma_wait<0>();
        fence_registers(dp);
        if (part + kColumns == kKeys) shared.empty[of_products.index].arrive();
        CUTLASS_PRAGMA_UNROLL
        for (int x = 0; x < kColumns / 2; ++x) {
          float& sum = dbias2[part / 2 + x];
          sum = fmaf(s[part % kScores / 2 + x], dp[x], sum);
        }
      }
    } while (--left != 0);
  }

  CUTLASS_DEVICE static void store(const Sums& dbias2, const BackwardArgs& args, const Coordinates& block,
                                   const ConsumerCoord& at) {
    if (args.dbias2_is_lent) ptx::wait_for_kernel_before();
    int query = first_query(block, at), key = first_key(block, at);
    int64_t offset = (int64_t(block.batch) * args.H + block.head) * args.Lq;
    if (!args.adds_dbias2) offset += int64_t(block.slice) * args.B * args.H * args.Lq;
    bool odd = at.lane % 2 != 0;
    query += odd ? 8 : 0, key -= odd ? 2 : 0;
    float* out = args.dbias2 + (offset + query) * args.Lk + key;
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < Config::kKeys / 2; x += 4) {
      float value[4];
      four_of_a_row(value, dbias2 + x, odd);
      int valid = query < args.Lq ? args.Lk - (key + 2 * x) : 0;
      float* dst = out + 2 * x;
      if (args.adds_dbias2) {
        atomic_add_access<4>(dst, value, valid);
      } else {
        store_four(dst, value, valid, args.Lk % 4 == 0);
      }
    }
  }

  CUTLASS_DEVICE static void run(Shared& shared, const BackwardArgs& args) {
    ConsumerCoord at = ConsumerCoord::of_thread<Config::kKeyTiles>();  // its row: the tile of queries
    typename Config::Pipe pipe;
    for (ClusterTileScheduler<Config, /*kTakes=*/false> tiles(shared.tile_queue, args); tiles.tile < args.num_tiles;
         tiles.advance()) {
      Coordinates block = Config::locate(args, tiles.tile);
      if (block.query + at.row * Config::kQueries < args.Lq && block.key + at.tile * Config::kKeys < args.Lk) {
        Biases bias2;
        Sums dbias2 = {};
        load_bias2(bias2, args, block, at);
        walk(shared, args, pipe, block, bias2, dbias2, at);
        store(dbias2, args, block, at);
      } else {  // nothing to compute, but stages go round
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
    ptx::wait_for_kernel_before();
  }
};

template <typename Config>
__global__ void __launch_bounds__(Config::kNumThreads, 1)
    kernel_dbias2(const BackwardArgs args, const __grid_constant__ Dbias2Maps maps) {
  constexpr int kWarpgroups = Config::kWarpgroups;
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  typename Config::Shared& shared = *reinterpret_cast<typename Config::Shared*>(dynamic_shared);

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
  ptx::let_next_kernel_start();
  cute::cluster_sync();

  if (threadIdx.x < 128 * kWarpgroups) {
    cutlass::arch::warpgroup_reg_alloc<Config::Registers::kConsumer>();
    Dbias2Mainloop<Config>::run(shared, args);
  } else {
    cutlass::arch::warpgroup_reg_dealloc<Config::Registers::kProducer>();
    int warp = threadIdx.x / 32 - 4 * kWarpgroups;
    if (warp == 0 && cute::elect_one_sync()) Dbias2Producer<Config>::run(shared, args, maps);
    if (warp >= 1 && warp <= Config::kStatisticsWarps) {
      Dbias2Producer<Config>::run_statistics(shared, args, warp - 1);
    }
    __syncwarp();
  }
  cute::cluster_sync();  // the other block's barriers are used until here
}

}  // namespace ds4s::sm90
