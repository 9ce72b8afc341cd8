// The producers of kernel_dq_dkdv: one thread issues all TMA loads; for each row n a warp loads the statistics of its
// queries and keys, whose rows may begin at any byte.
#pragma once

#include "sm90/backward/config.h"
#include "sm90/backward/dq_global.h"
#include "sm90/backward/dq_range.h"
#include "sm90/backward/maps.h"
#include "sm90/backward/row_delta.h"

namespace ds4s::sm90 {

template <typename Config>
struct DqDkdvProducer {
  using scalar_t = typename Config::scalar_t;
  using Shared = typename Config::Shared;
  using Coordinates = typename Config::Coordinates;
  using OwnedTile = typename Config::OwnedTile;
  using StreamedTile = typename Config::StreamedTile;
  using BiasTile = typename Config::BiasTile;
  static constexpr int kRows = Config::kRows, kTiles = Config::kTiles, kWarpgroups = Config::kWarpgroups;
  static constexpr int kOwned = Config::kOwned, kColumns = Config::kColumns;
  static constexpr bool kKeys = Config::kKeys, kHasBias2 = Config::kHasBias2;

  // Run by one thread: all TMA loads.
  CUTLASS_DEVICE static void run(Shared& shared, const BackwardArgs& args, const DqDkdvMaps& maps) {
    constexpr uint32_t kStageBytes = 2 * kRows * StreamedTile::kBytes + (kHasBias2 ? kTiles * BiasTile::kBytes : 0);
    typename Config::Pipe pipe;
    typename Config::OwnedPipe owned_pipe;
    for (typename Config::template Scheduler<TileReader::kTakes> tiles(shared, args); tiles.tile < args.num_tiles;
         tiles.advance(shared, args), owned_pipe.advance()) {
      Coordinates at = Config::locate(args, tiles.tile, tiles.part);
      typename Config::Visible visible = Config::visible(args, at);
      if constexpr (Config::kDqInShared) {
        visible.tile = tiles.tile, visible.first = tiles.first, visible.end = tiles.end;
        visible.at = at;
      }
      FullBarrier& owned_full = shared.owned_full[owned_pipe.index];
      shared.owned_empty[owned_pipe.index].wait(owned_pipe.phase ^ 1);
      shared.visible[owned_pipe.index] = visible;
      if (visible.num_steps == 0) {
        owned_full.arrive();
        continue;
      }
      owned_full.arrive_and_expect_tx(2 * kWarpgroups * OwnedTile::kBytes);
      for (int t = 0; t < kWarpgroups; ++t) {
        auto& owned = shared.owned[owned_pipe.index][t];
        int l = at.owned + t % kTiles * kOwned, n = at.row + t / kTiles;
        load_tile<OwnedTile>(maps.owned_first, owned_full, owned.first, 0, l, at.head, n, at.batch);
        load_tile<OwnedTile>(maps.owned_second, owned_full, owned.second, 0, l, at.head, n, at.batch);
      }
      auto steps = Config::steps(args, at);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int step = 0; step < visible.num_steps; ++step, pipe.advance()) {
        const int column = steps.next();
        typename Config::Stage& stage = shared.stages[pipe.index];
        FullBarrier& full = shared.full[pipe.index];
        shared.empty[pipe.index].wait(pipe.phase ^ 1);
        full.arrive_and_expect_tx(kStageBytes);
        for (int r = 0; r < kRows; ++r) {
          load_tile<StreamedTile>(maps.streamed_first, full, stage.streamed[r].first, 0, column, at.head, at.row + r,
                                  at.batch);
          load_tile<StreamedTile>(maps.streamed_second, full, stage.streamed[r].second, 0, column, at.head, at.row + r,
                                  at.batch);
        }
        if constexpr (Config::kPairsRows) {  // each block of the cluster loads one tile of bias2 for both
          const int t = int(cute::block_rank_in_cluster());
          EmptyBarrier& ready = shared.pairs.ready[pipe.index];
          ready.arrive(uint32_t(t) ^ 1);
          ready.wait(pipe.phase);
          load_tile_for_both<BiasTile>(maps.bias2, full, stage.bias2[t], at.owned + t * kOwned, column,
                                       at.head * args.bias2_H, 0, at.batch * args.bias2_B);
        } else if constexpr (kHasBias2) {
          for (int t = 0; t < kTiles; ++t) {
            int owned = at.owned + t * kOwned;
            load_tile<BiasTile>(maps.bias2, full, stage.bias2[t], kKeys ? owned : column, kKeys ? column : owned,
                                at.head * args.bias2_H, 0, at.batch * args.bias2_B);
          }
        }
      }
    }
    if constexpr (Config::kDqInShared) {
      shared.owned_empty[owned_pipe.index].wait(owned_pipe.phase ^ 1);
      shared.visible[owned_pipe.index].tile = args.num_tiles;
      shared.owned_full[owned_pipe.index].arrive();
    }
  }

  // Statistics of the owned keys or queries of a row n, in registers between global and shared memory.
  struct OwnedStatistics {
    static constexpr int kPerLane = kTiles * kOwned / 32;
    uint32_t keys[kKeys ? kPerLane : 1];
    float2 queries[kKeys ? 1 : kPerLane];
  };
  CUTLASS_DEVICE static void load_owned(OwnedStatistics& owned, const Bias1OfRow<scalar_t>& bias1,
                                        const QueryStatistics& queries, const Coordinates& at, int lane) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < OwnedStatistics::kPerLane; ++i) {
      int l = at.owned + 32 * i + lane;
      if constexpr (kKeys) {
        owned.keys[i] = bias1.load(l);
      } else {
        owned.queries[i] = queries.load(l);
      }
    }
  }
  CUTLASS_DEVICE static void store_owned(Shared& shared, int buffer, const OwnedStatistics& owned,
                                         const Bias1OfRow<scalar_t>& bias1, const BackwardArgs& args,
                                         const Coordinates& at, int r, int lane) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < OwnedStatistics::kPerLane; ++i) {
      int x = 32 * i + lane, t = r * kTiles + x / kOwned, l = at.owned + x;
      float2 statistics;
      if constexpr (kKeys) {
        statistics = make_float2(bias1.value(owned.keys[i], l), 0.f);
      } else {
        statistics = QueryStatistics::value(owned.queries[i], l, args.Lq);
      }
      shared.exponents[buffer][t][x % kOwned] = statistics.x * kLog2e;
      if constexpr (!kKeys) {
        Rank1Terms::store_alone(shared.products.tiles[buffer * kWarpgroups + t], x % kOwned, statistics.y);
      }
    }
  }

  CUTLASS_DEVICE static DeltaInDq<scalar_t> delta_in_dq(const TensorView<5>& dq, const Coordinates& at, int n) {
    const int64_t first = at.batch * dq.stride[4] + n * dq.stride[3] + at.head * dq.stride[2];
    return {static_cast<scalar_t*>(const_cast<void*>(dq.ptr)) + first, dq.stride[1], dq.size[0]};
  }

  // Statistics of the streamed queries or keys of a step, in registers between global and shared memory.
  struct StreamedStatistics {
    static constexpr int kPerLane = kColumns / 32;
    float2 of_query[kKeys ? kPerLane : 1];
    uint32_t of_key[kKeys ? 1 : kPerLane];
  };
  CUTLASS_DEVICE static void store_streamed(Shared& shared, int stage, const StreamedStatistics& loaded,
                                            const BackwardArgs& args, const Bias1OfRow<scalar_t>& bias1, int column,
                                            int r, int lane) {
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < StreamedStatistics::kPerLane; ++x) {
      int in_step = 32 * x + lane;
      float& score = shared.scores[stage][r][in_step];
      if constexpr (kKeys) {
        float2 value = QueryStatistics::value(loaded.of_query[x], column + in_step, args.Lq);
        score = value.x * args.unit;
        if constexpr (!Config::kHasDeltaTerms) {
          auto& terms = shared.products.tiles[stage * kRows + r];
          if constexpr (Config::kDenseProducts) {
            reinterpret_cast<uint4*>(terms)[in_step] = Rank1Terms::terms_alone(value.y);
          } else {
            Rank1Terms::store_alone(terms, in_step, value.y);
          }
        }
      } else {
        score = bias1.value(loaded.of_key[x], column + in_step) * args.unit;
        if (r == 0 && in_step == 0) shared.first_key[stage] = column;
      }
    }
  }

  // Run by one warp for each row n: statistics. The next step's values are loaded while this step's wait for a stage.
  CUTLASS_DEVICE static void run_statistics(Shared& shared, const BackwardArgs& args, const TensorView<5>& dq, int r) {
    constexpr int kPerLane = StreamedStatistics::kPerLane;
    int lane = threadIdx.x % 32;
    uint32_t delta_phase = 0;           // kHasDeltaTerms
    typename Config::DeltaRing deltas;  // kDeltaInMemory
    uint32_t delta_begin = 0;           // likewise: where delta of this (b, n, h) begins
    if constexpr (Config::kDeltaInMemory) delta_begin = RowDelta<Config>::begin(args, /*parity=*/1);
    typename Config::Pipe pipe;
    typename Config::OwnedPipe owned_pipe;
    for (typename Config::template Scheduler<TileReader::kWarp> tiles(shared, args); tiles.tile < args.num_tiles;
         tiles.advance(shared, args), owned_pipe.advance()) {
      Coordinates at = Config::locate(args, tiles.tile, tiles.part);
      int n = min(at.row + r, args.N - 1);
      Bias1OfRow<scalar_t> bias1(args, at.batch, n);
      QueryStatistics queries(args, at.batch, n, at.head);
      const int num_steps = Config::visible(args, at).num_steps;
      auto steps = Config::steps(args, at);
      if (num_steps == 0) {
        shared.owned_empty[owned_pipe.index].wait(owned_pipe.phase ^ 1);
        shared.owned_full[owned_pipe.index].arrive();
        continue;
      }
      if constexpr (Config::kDeltaInMemory) {
        if (tiles.first) delta_begin = RowDelta<Config>::next_begin(args, delta_begin);
      }
      StreamedStatistics next;
      // As a function of its own, ptxas orders the instructions of pairs of rows n otherwise, which was not measured.
      auto load = [&](int column) {
        if constexpr (Config::kDeltaInMemory) {
          if (tiles.first) RowDelta<Config>::wait(shared.delta_barriers, deltas, lane);
        }
        CUTLASS_PRAGMA_UNROLL
        for (int x = 0; x < kPerLane; ++x) {
          if constexpr (Config::kHasDeltaTerms) {
            next.of_query[x] = make_float2(queries.load_lse(column + 32 * x + lane), 0.f);
          } else if constexpr (Config::kDeltaInDq) {
            // In memory of its own or, where dq has sections, in dq until that is written.
            const int query = column + 32 * x + lane;
            next.of_query[x] =
                args.negative_delta != nullptr
                    ? queries.load(query)
                    : make_float2(queries.load_lse(query), *delta_in_dq(dq, at, n).at(queries.existing(query)));
          } else if constexpr (Config::kDeltaInMemory) {
            next.of_query[x] = queries.load(column + 32 * x + lane, delta_begin);
          } else if constexpr (kKeys) {
            next.of_query[x] = queries.load(column + 32 * x + lane);
          } else {
            next.of_key[x] = bias1.load(column + 32 * x + lane);
          }
        }
      };
      int column = steps.next();
      if constexpr (Config::kDqInGlobal) DqGlobal<Config>::wait_for_delta(args, tiles.tile);
      load(column);
      OwnedStatistics owned;
      load_owned(owned, bias1, queries, at, lane);
      float factor;
      if constexpr (Config::kDqInGlobal && Config::kHalfDqSums) {
        factor = args.scale * DqRange::factor(args.dq_exponents[args.row_index(at.batch, n) * args.H + at.head]);
      }
      shared.owned_empty[owned_pipe.index].wait(owned_pipe.phase ^ 1);
      store_owned(shared, owned_pipe.index, owned, bias1, args, at, r, lane);
      if constexpr (Config::kDqInGlobal && Config::kHalfDqSums) shared.dq_global_barriers.factor = factor;
      if constexpr (!kKeys) cutlass::arch::fence_view_async_shared();
      shared.owned_full[owned_pipe.index].arrive();  // every lane for what it wrote itself
      for (int step = 1; step <= num_steps; ++step, pipe.advance()) {
        shared.empty[pipe.index].wait(pipe.phase ^ 1);
        store_streamed(shared, pipe.index, next, args, bias1, column, r, lane);
        if constexpr (Config::kHasDeltaTerms) {
          if (tiles.first) shared.delta_barriers.full[step - 1].wait(delta_phase);
        } else if constexpr (kKeys) {
          cutlass::arch::fence_view_async_shared();
        }
        shared.full[pipe.index].arrive();
        if (step == num_steps) continue;
        column = steps.next();
        load(column);
      }
      if constexpr (Config::kHasDeltaTerms) delta_phase ^= tiles.first;
    }
    if constexpr (Config::kDqInShared) {
      shared.owned_empty[owned_pipe.index].wait(owned_pipe.phase ^ 1);
      shared.owned_full[owned_pipe.index].arrive();
    }
  }

  // Run by one thread where the keys of a (b, n, h) are split and dS is dbias2: stores dS from its stage by TMA.
  CUTLASS_DEVICE static void run_dbias2(Shared& shared, const BackwardArgs& args, const DqDkdvMaps& maps) {
    typename Config::Pipe pipe;
    typename Config::template Scheduler<TileReader::kWarp> tiles(shared, args);
    const Coordinates at = Config::locate(args, tiles.tile);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int query = 0; query < args.Lq; query += kColumns, pipe.advance()) {
      shared.dq.full[pipe.index].wait(pipe.phase);
      CUTLASS_PRAGMA_UNROLL
      for (int t = 0; t < kTiles; ++t) {
        const int key = at.owned + t * kOwned;
        if (key < args.Lk) {
          cute::SM90_TMA_STORE_5D::copy(&maps.dbias2, shared.stages[pipe.index].bias2[t], key, query, at.head, 0,
                                        at.batch);
        }
      }
      cute::tma_store_arrive();
      cute::tma_store_wait<0>();
      shared.empty[pipe.index].arrive();
    }
  }
};

}  // namespace ds4s::sm90
