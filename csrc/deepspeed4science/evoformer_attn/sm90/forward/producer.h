// What brings tiles into shared memory: one thread for everything that TMA takes, one warp for bias1, up to two for
// what is visible of a tile. Each waits until a stage is empty, fills it, and lets its barrier complete when the bytes
// have arrived.
#pragma once

#include "sm90/forward/bias1.h"

namespace ds4s::sm90 {

template <typename Config>
struct ForwardProducer {
  using Element = typename Config::Element;
  using Shared = typename Config::Shared;
  using Coordinates = typename Config::Coordinates;
  using Pipe = typename Config::Pipe;
  using QPipe = typename Config::QPipe;
  using QTile = typename Config::QTile;
  using KTile = typename Config::KTile;
  using BiasTile = typename Config::BiasTile;
  using Mask = typename Config::Mask;
  using Steps = TileSteps<Config::kRows>;
  static constexpr int kRows = Config::kRows, kQueryTiles = Config::kQueryTiles, kWarpgroups = Config::kWarpgroups;
  static constexpr int kQueries = Config::kQueries, kKeys = Config::kKeys;
  static constexpr bool kBias2 = Config::kBias2;

  // One thread: everything that is tiles.
  CUTLASS_DEVICE static void run(Shared& shared, const ForwardArgs& args, const CUtensorMap& map_q,
                                 const CUtensorMap& map_k, const CUtensorMap& map_v, const CUtensorMap& map_bias2) {
    constexpr uint32_t kQBytes = kWarpgroups * QTile::kBytes;
    constexpr uint32_t kValueBytes = kRows * KTile::kBytes;
    constexpr uint32_t kKeyBytes = kValueBytes + (kBias2 ? kQueryTiles * BiasTile::kBytes : 0);
    Pipe pipe;
    QPipe q_pipe;
    for (int tile = blockIdx.x; tile < args.num_tiles; tile += gridDim.x, q_pipe.advance()) {
      Coordinates at = Config::locate(args, tile);
      const Mask* mask = begin_mask(shared, args, q_pipe);
      Steps steps(mask, args.Lk);
      const int num_steps = steps.count();
      FullBarrier& q_full = shared.q_full[q_pipe.index];
      shared.q_empty[q_pipe.index].wait(q_pipe.phase ^ 1);
      shared.visible[q_pipe.index] = {num_steps, rows_that_see(mask, args, at)};
      if (num_steps == 0) {
        q_full.arrive();
        end_mask(shared, mask, q_pipe);
        continue;
      }
      q_full.arrive_and_expect_tx(kQBytes);
      for (int w = 0; w < kWarpgroups; ++w) {
        load_tile<QTile>(map_q, q_full, shared.q[q_pipe.index][w], 0, at.query + w % kQueryTiles * kQueries, at.head,
                         at.row + w / kQueryTiles, at.batch);
      }
      CUTLASS_PRAGMA_NO_UNROLL
      for (int step = 0; step < num_steps; ++step, pipe.advance()) {
        const int key = steps.next();
        typename Config::KeyStage& keys = shared.keys[pipe.index];
        FullBarrier& k_full = shared.k_full[pipe.index];
        shared.k_empty[pipe.index].wait(pipe.phase ^ 1);
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
        FullBarrier& v_full = shared.v_full[pipe.index];
        shared.v_empty[pipe.index].wait(pipe.phase ^ 1);
        v_full.arrive_and_expect_tx(kValueBytes);
        for (int r = 0; r < kRows; ++r) {
          load_tile<KTile>(map_v, v_full, shared.values[pipe.index].v[r], 0, key, at.head, at.row + r, at.batch);
        }
      }
      end_mask(shared, mask, q_pipe);
    }
  }

  // One warp: bias1.
  template <typename Bias1>  // Bias1Vectors, Bias1Elements
  CUTLASS_DEVICE static void run_bias1(Shared& shared, const ForwardArgs& args) {
    const int lane = int(threadIdx.x) % 32;
    Pipe pipe;
    QPipe q_pipe;
    for (int tile = blockIdx.x; tile < args.num_tiles; tile += gridDim.x, q_pipe.advance()) {
      const Mask* mask = begin_mask(shared, args, q_pipe);
      Steps steps(mask, args.Lk);
      const int num_steps = steps.count();
      Bias1 bias1(args, Config::locate(args, tile), *mask, lane);
      if (num_steps > 0) bias1.load(steps.next());
      CUTLASS_PRAGMA_NO_UNROLL
      for (int step = 1; step <= num_steps; ++step, pipe.advance()) {
        shared.k_empty[pipe.index].wait(pipe.phase ^ 1);
        bias1.store(shared.bias1[pipe.index], args.f);
        shared.k_full[pipe.index].arrive();  // every lane for what it wrote itself
        if (step < num_steps) bias1.load(steps.next());
      }
      end_mask(shared, mask, q_pipe);  // every lane for what it read itself
    }
  }

  // One of kScanningWarps warps: what its rows n see of each tile.
  CUTLASS_DEVICE static void run_mask(Shared& shared, const ForwardArgs& args, int warp) {
    QPipe pipe;
    for (int tile = blockIdx.x; tile < args.num_tiles; tile += gridDim.x, pipe.advance()) {
      const Coordinates at = Config::locate(args, tile);
      shared.mask_empty[pipe.index].wait(pipe.phase ^ 1);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int r = warp; r < kRows; r += Config::kScanningWarps) {
        RowScan<Element, Config::kBias1>(args, at.batch, at.row + r).run(shared.mask[pipe.index], r);
      }
      shared.mask_full[pipe.index].arrive();
    }
  }

 private:
  // The mask of a tile; null without one. Between the two it stays where it is.
  CUTLASS_DEVICE static const Mask* begin_mask(Shared& shared, const ForwardArgs& args, const QPipe& pipe) {
    if (!args.has_mask()) return nullptr;
    shared.mask_full[pipe.index].wait(pipe.phase);
    return &shared.mask[pipe.index];
  }
  CUTLASS_DEVICE static void end_mask(Shared& shared, const Mask* mask, const QPipe& pipe) {
    if (mask != nullptr) shared.mask_empty[pipe.index].arrive();
  }
  // A bit for each row n of the tile.
  CUTLASS_DEVICE static uint32_t rows_that_see(const Mask* mask, const ForwardArgs& args, const Coordinates& at) {
    uint32_t rows = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      rows |= uint32_t(at.row + r < args.N && (mask == nullptr || mask->sees_any[r])) << r;
    }
    return rows;
  }
};

}  // namespace ds4s::sm90
