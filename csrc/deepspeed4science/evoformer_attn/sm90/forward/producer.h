// The producers of the forward, which load tiles into shared memory: one thread issues all TMA loads, one warp loads
// bias1, up to two warps find the visible keys of a tile. Each waits until a stage is empty and fills it; the stage's
// barrier completes when the bytes have arrived.
#pragma once

#include "sm90/forward/bias1.h"
#include "sm90/forward/first_mask.h"
#include "sm90/forward/maps.h"
#include "sm90/pace.h"

namespace ds4s::sm90 {

template <typename Config>
struct ForwardProducer {
  using scalar_t = typename Config::scalar_t;
  using Shared = typename Config::Shared;
  using Coordinates = typename Config::Coordinates;
  using Pipe = typename Config::Pipe;
  using QPipe = typename Config::QPipe;
  using QTile = typename Config::QTile;
  using KTile = typename Config::KTile;
  using BiasTile = typename Config::BiasTile;
  using Mask = typename Config::Mask;
  using Steps = TileSteps<Config::kRows>;
  static constexpr int kRows = Config::kRows, kQueryTiles = Config::kQueryTiles, kTiles = Config::kTiles;
  static constexpr int kQueries = Config::kQueries, kKeys = Config::kKeys;
  static constexpr bool kHasBias2 = Config::kHasBias2;
  static constexpr int kPartSteps = 8;                       // of a part (sm90/pace.h)
  static constexpr int kValueBytes = kRows * KTile::kBytes;  // of V in a stage
  static constexpr int kKeyBytes = kValueBytes + (kHasBias2 ? kQueryTiles * BiasTile::kBytes : 0);

  // Run by one thread: all TMA loads.
  CUTLASS_DEVICE static void run(Shared& shared, const ForwardArgs& args, const ForwardMaps& maps) {
    Pipe pipe;
    QPipe q_pipe;
    // Nothing else runs before a block's first tile, so its first step is loaded, visible or not, while its mask is
    // computed.
    int num_ahead = Config::num_ahead(args, int(blockIdx.x));
    Pace pace(args.parts_begun, int(gridDim.x));
    if (num_ahead > 0) {
      const Coordinates at = Config::locate(args, int(blockIdx.x));
      load_q(shared, 0, maps, at);
      shared.stages[0].k_full.arrive_and_expect_tx(kKeyBytes);
      load_keys(shared.stages[0], args, maps, at, 0);
      if (!Config::kLoadsValuesLater) load_values_alone(shared, pipe, maps, at, 0);
      pipe.advance();
    }
    for (int tile = blockIdx.x; tile < args.num_tiles; tile += gridDim.x, q_pipe.advance(), num_ahead = 0) {
      Coordinates at = Config::locate(args, tile);
      const Mask* mask = begin_mask(shared, args, q_pipe);
      Steps steps(mask, args.Lk);
      const int num_steps = steps.count();
      FullBarrier& q_full = shared.q_full[q_pipe.index];
      shared.q_empty[q_pipe.index].wait(q_pipe.phase ^ 1);
      const typename Config::Visible seen = visible(mask, args, at, num_ahead, num_steps);
      shared.visible[q_pipe.index] = seen;
      if (num_ahead == 0 && num_steps > 0) load_q(shared, q_pipe.index, maps, at);
      q_full.arrive();
      steps.skip(num_ahead);
      int key = 0;  // of the last step whose keys are loaded
      CUTLASS_PRAGMA_NO_UNROLL
      for (int step = num_ahead; step < num_steps; ++step, pipe.advance()) {
        if (step % kPartSteps == 0) pace.begin_part();
        typename Config::Stage& stage = shared.stages[pipe.index];
        const int key_before = key;
        key = steps.next();
        stage.k_empty.wait(pipe.phase ^ 1);
        const bool follows = Config::kLoadsValuesLater && step > 0;
        // V of a hidden step is left out: nobody waits for it, so another V could be loaded to the same place
        // meanwhile.
        const bool with_values = follows && step > seen.num_hidden;
        stage.k_full.arrive_and_expect_tx(kKeyBytes + (with_values ? kValueBytes : 0));
        load_keys(stage, args, maps, at, key);
        if (follows) {
          const Pipe before = pipe.before();
          typename Config::Stage& stage_before = shared.stages[before.index];
          stage_before.v_empty.wait(before.phase ^ 1);
          if (with_values) load_values(stage_before, stage.k_full, maps, at, key_before);
          stage_before.v_full.arrive();
        }
        if (!Config::kLoadsValuesLater) load_values_alone(shared, pipe, maps, at, key);
      }
      if (Config::kLoadsValuesLater && num_steps > 0) load_values_alone(shared, pipe.before(), maps, at, key);
      end_mask(shared, mask, q_pipe);
    }
    pace.end();
  }

  // Run by one warp: bias1.
  template <typename Bias1>  // Bias1Vectors, Bias1Elements
  CUTLASS_DEVICE static void run_bias1(Shared& shared, const ForwardArgs& args) {
    const int lane = int(threadIdx.x) % 32;
    Pipe pipe;
    QPipe q_pipe;
    for (int tile = blockIdx.x; tile < args.num_tiles; tile += gridDim.x, q_pipe.advance()) {
      Bias1 bias1(args, Config::locate(args, tile), lane);
      bias1.load(0);  // often the first visible step; its load runs before the mask is known
      const Mask* mask = begin_mask(shared, args, q_pipe);
      bias1.take_shift(*mask);
      Steps steps(mask, args.Lk);
      const int num_steps = steps.count();
      if (num_steps > 0) {
        const int key = steps.next();
        if (key > 0) bias1.load(key);
      }
      CUTLASS_PRAGMA_NO_UNROLL
      for (int step = 1; step <= num_steps; ++step, pipe.advance()) {
        typename Config::Stage& stage = shared.stages[pipe.index];
        stage.k_empty.wait(pipe.phase ^ 1);
        bias1.store(stage.bias1, args.f);
        stage.k_full.arrive();  // each lane arrives for its own writes
        if (step < num_steps) bias1.load(steps.next());
      }
      end_mask(shared, mask, q_pipe);  // each lane arrives for its own reads
    }
  }

  // Run by each of kScanningWarps warps: finds the visible keys of its rows n for each tile.
  CUTLASS_DEVICE static void run_mask(Shared& shared, const ForwardArgs& args, int warp) {
    QPipe pipe;
    int tile = int(blockIdx.x);
    if (FirstMask<Config>::is_found(args)) tile += int(gridDim.x), pipe.advance();
    for (; tile < args.num_tiles; tile += int(gridDim.x), pipe.advance()) {
      const Coordinates at = Config::locate(args, tile);
      shared.mask_empty[pipe.index].wait(pipe.phase ^ 1);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int r = warp; r < kRows; r += Config::kScanningWarps) {
        // A row n of another block's half is like one that does not exist.
        RowScan<scalar_t, Config::kHasBias1>(args, at.batch, at.has_row(r, args) ? at.row + r : args.N)
            .run(shared.mask[pipe.index], r, Config::num_ahead(args, tile));
      }
      shared.mask_full[pipe.index].arrive();
    }
  }

 private:
  // Q counts as full when all its bytes have arrived and shared.visible is written.
  CUTLASS_DEVICE static void load_q(Shared& shared, int buffer, const ForwardMaps& maps, const Coordinates& at) {
    FullBarrier& full = shared.q_full[buffer];
    full.expect_transaction(kTiles * QTile::kBytes);
    CUTLASS_PRAGMA_UNROLL
    for (int t = 0; t < kTiles; t += Config::kOneLoad ? kTiles : 1) {
      load_tile<QTile>(maps.q, full, shared.q[buffer][t], 0, at.query + t % kQueryTiles * kQueries, at.head,
                       at.row + t / kQueryTiles, at.batch);
    }
  }
  // K and bias2, whose bytes the caller has announced.
  CUTLASS_DEVICE static void load_keys(typename Config::Stage& stage, const ForwardArgs& args, const ForwardMaps& maps,
                                       const Coordinates& at, int key) {
    for (int r = 0; r < kRows; r += Config::kBoxRows) {
      load_tile<KTile>(maps.k, stage.k_full, stage.k[r], 0, key, at.head, at.row + r, at.batch);
    }
    if constexpr (kHasBias2) {
      load_tile<BiasTile>(maps.bias2, stage.k_full, stage.bias2[0], key, at.query, at.head * args.bias2_H, 0,
                          at.batch * args.bias2_B);
    }
  }
  // V, whose bytes the caller has announced to `full`.
  CUTLASS_DEVICE static void load_values(typename Config::Stage& stage, FullBarrier& full, const ForwardMaps& maps,
                                         const Coordinates& at, int key) {
    for (int r = 0; r < kRows; r += Config::kBoxRows) {
      load_tile<KTile>(maps.v, full, stage.v[r], 0, key, at.head, at.row + r, at.batch);
    }
  }
  // V that comes without a next step's keys.
  CUTLASS_DEVICE static void load_values_alone(Shared& shared, const Pipe& pipe, const ForwardMaps& maps,
                                               const Coordinates& at, int key) {
    typename Config::Stage& stage = shared.stages[pipe.index];
    stage.v_empty.wait(pipe.phase ^ 1);
    stage.v_full.arrive_and_expect_tx(kValueBytes);
    load_values(stage, stage.v_full, maps, at, key);
  }
  // The mask of a tile, null without one. It stays valid from here to end_mask().
  CUTLASS_DEVICE static const Mask* begin_mask(Shared& shared, const ForwardArgs& args, const QPipe& pipe) {
    if (!args.has_mask()) return nullptr;
    shared.mask_full[pipe.index].wait(pipe.phase);
    return &shared.mask[pipe.index];
  }
  CUTLASS_DEVICE static void end_mask(Shared& shared, const Mask* mask, const QPipe& pipe) {
    if (mask != nullptr) shared.mask_empty[pipe.index].arrive();
  }
  CUTLASS_DEVICE static typename Config::Visible visible(const Mask* mask, const ForwardArgs& args,
                                                         const Coordinates& at, int num_ahead, int num_steps) {
    typename Config::Visible x{num_steps, 0, 0, 0, 0};
    int end = mask == nullptr ? args.Lk : 0;
    bool sees_first = mask == nullptr;
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      x.rows |= uint32_t(at.has_row(r, args)) << r;
      x.visible_rows |= uint32_t(mask == nullptr || mask->sees_any[r]) << r;
      if (mask != nullptr) end = max(end, mask->end[r]), sees_first |= mask->sees_first[r];
    }
    if (num_ahead > 0 && !sees_first) x.num_hidden = 1;
    const int width = end - (end - 1) / kKeys * kKeys;
    if (num_steps - x.num_hidden > 1 && width <= 32) x.tail_units = (width + 15) / 16;
    return x;
  }
};

}  // namespace ds4s::sm90
