// What brings tiles into shared memory: one thread for everything that TMA takes, one warp for bias1. Each waits until
// a stage is empty, fills it, and lets its barrier complete when the bytes have arrived.
#pragma once

#include "sm90/forward_config.h"

namespace ds4s::sm90 {

template <typename Config>
struct ForwardProducer {
  using Element = typename Config::Element;
  using Shared = typename Config::Shared;
  using Coordinates = typename Config::Coordinates;
  using Turn = typename Config::Turn;
  using QTurn = typename Config::QTurn;
  using QTile = typename Config::QTile;
  using KTile = typename Config::KTile;
  using BiasTile = typename Config::BiasTile;
  using Steps = typename Config::Steps;
  static constexpr int kRows = Config::kRows, kQueryTiles = Config::kQueryTiles, kWarpgroups = Config::kWarpgroups;
  static constexpr int kQueries = Config::kQueries, kKeys = Config::kKeys;
  static constexpr bool kBias2 = Config::kBias2;

  // One thread: everything that is tiles.
  CUTLASS_DEVICE static void run(Shared& shared, const ForwardArgs& args, const CUtensorMap& map_q,
                                 const CUtensorMap& map_k, const CUtensorMap& map_v, const CUtensorMap& map_bias2) {
    constexpr uint32_t kQBytes = kWarpgroups * QTile::kBytes;
    constexpr uint32_t kValueBytes = kRows * KTile::kBytes;
    constexpr uint32_t kKeyBytes = kValueBytes + (kBias2 ? kQueryTiles * BiasTile::kBytes : 0);
    Turn turn;
    QTurn q_turn;
    Tile tile(args, blockIdx.x);
    for (; tile.index < args.num_tiles; q_turn.advance()) {
      Coordinates at = Config::locate(args, tile.index);
      Steps steps = tile.steps;
      const typename Config::Visible visible = tile.visible;
      tile = Tile(args, tile.index + gridDim.x);  // long before it is needed
      FullBarrier& q_full = shared.q_full[q_turn.stage];
      shared.q_empty[q_turn.stage].wait(q_turn.parity ^ 1);
      shared.visible[q_turn.stage] = visible;
      if (visible.num_steps == 0) {
        q_full.arrive();
        continue;
      }
      q_full.arrive_and_expect_tx(kQBytes);
      for (int w = 0; w < kWarpgroups; ++w) {
        load_tile<QTile>(map_q, q_full, shared.q[q_turn.stage][w], 0, at.query + w % kQueryTiles * kQueries, at.head,
                         at.row + w / kQueryTiles, at.batch);
      }
      CUTLASS_PRAGMA_NO_UNROLL
      for (int step = 0; step < visible.num_steps; ++step, turn.advance()) {
        const int key = steps.next();
        typename Config::KeyStage& keys = shared.keys[turn.stage];
        FullBarrier& k_full = shared.k_full[turn.stage];
        shared.k_empty[turn.stage].wait(turn.parity ^ 1);
        k_full.arrive_and_expect_tx(kKeyBytes);
        for (int r = 0; r < kRows; ++r) {
          load_tile<KTile>(map_k, k_full, keys.k[r], 0, key, at.head, at.row + r, at.batch);
        }
        if constexpr (kBias2) {
          for (int t = 0; t < kQueryTiles; ++t) {
            load_tile<BiasTile>(map_bias2, k_full, keys.bias2[t], key, at.query + t * kQueries, at.head * args.bias2_H,
                                0, at.batch * args.bias2_B);
          }
        }
        FullBarrier& v_full = shared.v_full[turn.stage];
        shared.v_empty[turn.stage].wait(turn.parity ^ 1);
        v_full.arrive_and_expect_tx(kValueBytes);
        for (int r = 0; r < kRows; ++r) {
          load_tile<KTile>(map_v, v_full, shared.values[turn.stage].v[r], 0, key, at.head, at.row + r, at.batch);
        }
      }
    }
  }

  // One warp: bias1, whose rows begin anywhere, so that TMA would not take them. The next step's values are on their
  // way while this one's wait for their place.
  CUTLASS_DEVICE static void run_bias1(Shared& shared, const ForwardArgs& args) {
    constexpr int kPerLane = kKeys / 32;
    int lane = threadIdx.x % 32;
    Turn turn;
    Tile tile(args, blockIdx.x);
    while (tile.index < args.num_tiles) {
      Coordinates at = Config::locate(args, tile.index);
      Steps steps = tile.steps;
      const int num_steps = tile.visible.num_steps;
      tile = Tile(args, tile.index + gridDim.x);
      const Element* row[kRows];
      float value[kRows][kPerLane], shift[kRows];
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < kRows; ++r) {
        int n = at.row + r < args.N ? at.row + r : args.N - 1;
        row[r] = static_cast<const Element*>(args.bias1) + at.batch * args.bias1_stride[0] + n * args.bias1_stride[1];
        shift[r] = args.mask.shift_of(args.row_index(at.batch, n));
      }
      auto load = [&](int key) {
        CUTLASS_PRAGMA_UNROLL
        for (int x = 0; x < kRows * kPerLane; ++x) {
          int k = key + x % kPerLane * 32 + lane;
          value[x / kPerLane][x % kPerLane] =
              k < args.Lk ? float(row[x / kPerLane][k * args.bias1_stride[2]]) : -infinity();
        }
      };
      if (num_steps > 0) load(steps.next());
      CUTLASS_PRAGMA_NO_UNROLL
      for (int step = 1; step <= num_steps; ++step, turn.advance()) {
        shared.k_empty[turn.stage].wait(turn.parity ^ 1);
        CUTLASS_PRAGMA_UNROLL
        for (int x = 0; x < kRows * kPerLane; ++x) {
          shared.bias1[turn.stage][x / kPerLane][x % kPerLane * 32 + lane] =
              (value[x / kPerLane][x % kPerLane] - shift[x / kPerLane]) * args.f;
        }
        shared.k_full[turn.stage].arrive();  // every lane for what it wrote itself
        if (step < num_steps) load(steps.next());
      }
    }
  }

 private:
  // What is visible of a tile, which takes a few loads, one after the other, to find out.
  struct Tile {
    int index;
    Steps steps;
    typename Config::Visible visible{};

    CUTLASS_DEVICE Tile(const ForwardArgs& args, int index_) : index(index_) {
      if (index >= args.num_tiles) return;
      const Coordinates at = Config::locate(args, index);
      const int64_t row = args.row_index(at.batch, at.row);
      steps = {args.mask, row, min(kRows, args.N - at.row), args.Lk};
      visible.num_steps = steps.count();
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < kRows; ++r) {
        visible.rows |= uint32_t(at.row + r < args.N && !args.mask.sees_nothing(row + r)) << r;
      }
    }
  };
};

}  // namespace ds4s::sm90
