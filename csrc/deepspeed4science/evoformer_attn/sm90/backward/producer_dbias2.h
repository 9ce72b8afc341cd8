// The producers of kernel_dbias2: one thread issues all TMA loads; several warps, each for every so many-th row n, load
// the statistics of queries and keys, whose rows may begin at any byte.
#pragma once

#include "sm90/backward/config_dbias2.h"
#include "sm90/backward/maps.h"
#include "sm90/mma/rank1_mma.h"

namespace ds4s::sm90 {

template <typename Config>
struct Dbias2Producer {
  using scalar_t = typename Config::scalar_t;
  using Shared = typename Config::Shared;
  using Coordinates = typename Config::Coordinates;
  using QueryTile = typename Config::QueryTile;
  using KeyTile = typename Config::KeyTile;

  // Run by one thread: all TMA loads. In a cluster one block loads K for both, the other V.
  CUTLASS_DEVICE static void run(Shared& shared, const BackwardArgs& args, const Dbias2Maps& maps) {
    const int rank = Config::rank();
    constexpr int kRowsAhead = 4;  // the next tile is taken so many rows n before the end: about the latency of taking
    const bool shares = Config::num_blocks() > 1;
    typename Config::Pipe pipe;
    for (ClusterTileScheduler<Config, /*kTakes=*/true> tiles(shared.tile_queue, args);
         tiles.tile < shared.tile_queue.num_tiles; tiles.advance()) {
      Coordinates at = Config::locate(args, shared.tile_queue.tile_keys, tiles.tile);
      const typename Config::Rows rows = tiles.rows(at);
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

  // The statistics of the queries and keys of one row n.
  struct Statistics {
    static constexpr int kRows = Config::kBlockQueries / 32, kColumns = Config::kBlockKeys / 32;  // of a lane
    float shift;
    uint32_t column[kColumns];
    float2 row[kRows];

    // Starts the loads; `store` waits for them.
    CUTLASS_DEVICE void load(const BackwardArgs& args, const Coordinates& at, int n, int lane) {
      n = min(n, args.N - 1);  // where no row n sees a key, n is N; any row will do, also one without delta
      Bias1OfRow<scalar_t> bias1(args, at.batch, n);
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
        float value = Bias1OfRow<scalar_t>::value(column[x], shift, exists ? at.key + 32 * x + lane : args.Lk, args.Lk);
        Rank1Terms::store_second(scores.keys.terms, 32 * x + lane, value * args.unit);
      }
      cutlass::arch::fence_view_async_shared();
    }
  };

  // Waits until kernel_dq_dkdv has computed all deltas. Its last blocks may still run, but all have begun, because this
  // kernel starts after they have let it; so they compute their deltas without waiting for this kernel.
  CUTLASS_DEVICE static void wait_for_delta(const BackwardArgs& args) {
    if (threadIdx.x % 32 == 0) {
      while (ptx::load_acquire(args.delta_progress) < kDeltaWarps * args.B * args.N * args.H) __nanosleep(100);
    }
    __syncwarp();
  }

  // Run by several warps, each for every kWarps-th row n. The loads take longer than a step, so a warp starts those of
  // its next row n when it has stored the last ones.
  CUTLASS_DEVICE static void run_statistics(Shared& shared, const BackwardArgs& args, int warp) {
    constexpr int kWarps = Config::kStatisticsWarps;
    int lane = threadIdx.x % 32, step = 0;
    if (args.waits_for_delta) wait_for_delta(args);
    typename Config::Pipe pipe;
    for (ClusterTileScheduler<Config, /*kTakes=*/false> tiles(shared.tile_queue, args);
         tiles.tile < shared.tile_queue.num_tiles; tiles.advance()) {
      Coordinates at = Config::locate(args, shared.tile_queue.tile_keys, tiles.tile);
      const typename Config::Rows rows = tiles.rows(at);
      Statistics statistics;
      const int own = (warp - step + kWarps) % kWarps;  // index of this warp's first row n
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

}  // namespace ds4s::sm90
