// dq, math.md (13), in kernel_dq_dkdv where it does not fit into shared memory: every block adds its keys' share to an
// accumulator, rows that stay in L2 (dq_sums.h). When all blocks of a (b, n, h) have added, they write dq. Only the
// (b, n, h) under way have an accumulator, or with kPairsRows the *sections* of their queries under way, of
// args.section_steps steps each. Without sections, one section is all queries.
//
//   consumers         exchange dS through shared memory and compute dq^T = K^T dS^T, 64 columns of dq by 32 queries for
//                     each warpgroup; they add it to the accumulator in the order of the instruction's registers
//   accumulator warp  finds the accumulator of a tile's section, and counts a section that has been added
//   dq warp           waits for the other blocks, writes this block's part of a section and leaves zeros; the last
//                     block to do so releases the accumulator
//
// Why no block waits forever (docs/kernels/dq-accumulators.md has the proof and a diagram; a pair is a (b, n, h), or a
// section of one):
//   H1  Tiles are taken in increasing order (tile_scheduler.h), and a block finishes its tiles in that order.
//   H2  The first pairs have an accumulator each; pair x gets the (x - num_dq_accumulators + 1)-th one released.
//   H3  A pair releases its accumulator when all its tiles have been added and all parts of its dq written.
//   H4  The tiles of a pair fit into the queues of all blocks (DqGlobalPlan).
//   H5  Sections are ordered so that none waits for a later one (section_order.h).
//   H6  kPairsRows: all clusters of the grid run at the same time (a cooperative launch).
// With two rows n in a cluster (kPairsRows), tiles 2 m and 2 m + 1 are the same keys of both; there are no queues.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm80.hpp>

#include "sm90/backward/config.h"
#include "sm90/backward/dq_range.h"
#include "sm90/backward/dq_sums.h"
#include "sm90/backward/section_order.h"
#include "sm90/backward/zero_gradients.h"

namespace ds4s::sm90 {

template <typename Config>
struct DqGlobal {
  using scalar_t = typename Config::scalar_t;
  using Shared = typename Config::Shared;
  using OwnedTile = typename Config::OwnedTile;
  using StreamedTile = typename Config::StreamedTile;
  using DsTile = typename Config::BiasTile;
  static constexpr int kTiles = Config::kTiles, kOwned = Config::kOwned, kColumns = Config::kColumns;
  // A warpgroup's part of a step's product.
  static constexpr int kBoxes = OwnedTile::kNumBoxes, kParts = kTiles / kBoxes, kQueries = kColumns / kParts;
  static_assert(OwnedTile::kBoxColumns == 64 && kTiles % kBoxes == 0, "a warpgroup multiplies with 64 columns of K");
  using Sum = float[kQueries / 2];
  using Sums = DqSums<Config>;

  CUTLASS_DEVICE static void init(typename Config::DqGlobalBarriers& barriers) {
    for (auto& barrier : barriers.full) barrier.init(128 * kTiles);
    for (auto& barrier : barriers.empty) barrier.init(128 * (kTiles + Config::kPairsRows));
    for (auto& barrier : barriers.accumulator_free) barrier.init(1);
    for (auto& barrier : barriers.added) barrier.init(128 * kTiles);
  }

  // The index of a tile's (b, n, h), and the address of an accumulator.
  CUTLASS_DEVICE static int pair_of(const BackwardArgs& args, int tile) {
    if constexpr (Config::kPairsRows) return 2 * args.by_blocks.div(tile / 2) + tile % 2;
    return args.by_blocks.div(tile);
  }
  // The number of a tile among those of its (b, n, h) that are computed, and how many these are.
  CUTLASS_DEVICE static int number_of(const Shared& shared, const BackwardArgs& args, int tile) {
    const int number = args.by_blocks.rem(Config::kPairsRows ? tile / 2 : tile);
    if constexpr (Config::kTakesTiles) return number - shared.seen_tiles.first;
    return number;
  }
  CUTLASS_DEVICE static int num_tiles_of_pair(const Shared& shared, const BackwardArgs& args) {
    if constexpr (Config::kTakesTiles) return shared.seen_tiles.by_blocks.divisor;
    return args.by_blocks.divisor;
  }
  CUTLASS_DEVICE static uint4* address_of(const BackwardArgs& args, int accumulator) {
    return args.dq_accumulators + int64_t(accumulator) * args.section_steps * kTiles * kPartVectors;
  }
  // Elements that one warpgroup adds in one step.
  static constexpr int kPart = 64 * kQueries, kPartVectors = kPart / Sums::kPerVector;

  // A consumer's state through the steps of all its tiles.
  struct ConsumerState {
    using Pipe = PipelineState<Config::DqGlobalTiles::kDsStages>;
    Pipe given, taken;
    uint32_t section = 0;  // number of sections added
    int steps_left = 0;    // of this section
    uint4* next;           // this lane's first element of the next step
    float factor;          // of the tile, of float16 sums
    CUTLASS_DEVICE int slot() const { return section % 2; }
  };

  // Stores dS of this warpgroup's keys, each 8x8 matrix transposed, at `offset`.
  template <typename Packed>
  CUTLASS_DEVICE static void store_ds(const Packed& ds, ConsumerState& state, Shared& shared, uint32_t offset,
                                      const ConsumerCoord& at) {
    const typename ConsumerState::Pipe& pipe = state.given;
    shared.dq_global_barriers.empty[pipe.index].wait(pipe.phase ^ 1);
    uint32_t address = shared_address(shared.dq_global.ds[pipe.index][at.tile]) + offset;
    CUTLASS_PRAGMA_UNROLL
    for (int g = 0; g < kColumns / 16; ++g) stmatrix_trans(address + g * 16 * DsTile::kRowBytes, ds + 4 * g);
    cutlass::arch::fence_view_async_shared();
    shared.dq_global_barriers.full[pipe.index].arrive();
    state.given.advance();
  }

  // Waits for the dS stored last, of this warpgroup's keys. At D = 128 the barrier's number is computed again, since no
  // register is left to keep it.
  CUTLASS_DEVICE static void wait_for_own(const ConsumerCoord& at) {
    const int warpgroup = Config::kHeadDim <= 64 ? at.warpgroup : int(threadIdx.x) / 128;
    cutlass::arch::NamedBarrier::sync(128, 1 + warpgroup);
  }
  // Waits for dS of the next step for dq, of all keys.
  CUTLASS_DEVICE static void wait_for_all(const ConsumerState& state, Shared& shared) {
    shared.dq_global_barriers.full[state.taken.index].wait(state.taken.phase);
  }

  // dk += dS^T Q, math.md (14), of the step whose dS was stored last.
  template <int kCount>
  CUTLASS_DEVICE static void start_own(float (&dk)[kCount], const ConsumerState& state, const Shared& shared,
                                       uint32_t queries, const ConsumerCoord& at) {
    uint32_t ds =
        start_address(shared.dq_global.ds[0]) + (state.given.before().index * kTiles + at.tile) * (DsTile::kBytes >> 4);
    CUTLASS_PRAGMA_UNROLL
    for (int step = 0; step < kColumns / 16; ++step) {
      wgmma<scalar_t, 2 * kCount, Major::MN, Major::MN>(
          dk, DsTile::descriptor(ds + DsTile::rows_step(step)),
          StreamedTile::descriptor(queries + StreamedTile::rows_step(step)));
    }
  }
  // sum = K^T dS^T, math.md (13), of the next step for dq; add() then adds it.
  CUTLASS_DEVICE static void start(Sum& sum, const ConsumerState& state, const Shared& shared, uint32_t owned,
                                   const ConsumerCoord& at) {
    constexpr uint32_t kNextKeys = 2 * OwnedTile::kBytes >> 4, kNextDs = DsTile::kBytes >> 4;
    uint32_t keys = owned + at.tile % kBoxes * (OwnedTile::kBoxBytes >> 4);
    uint32_t ds = start_address(shared.dq_global.ds[0]) + state.taken.index * (kTiles * kNextDs) +
                  DsTile::rows_step(at.tile / kBoxes * (kQueries / 16));
    CUTLASS_PRAGMA_UNROLL
    for (int t = 0; t < kTiles; ++t) {
      CUTLASS_PRAGMA_UNROLL
      for (int step = 0; step < kOwned / 16; ++step) {
        wgmma<scalar_t, kQueries, Major::K, Major::MN>(
            sum, OwnedTile::descriptor(keys + t * kNextKeys + OwnedTile::rows_step(step)),
            DsTile::descriptor(ds + t * kNextDs + DsTile::columns_step(step)),
            t == 0 && step == 0 ? ScaleOut::Zero : ScaleOut::One);
      }
    }
  }
  CUTLASS_DEVICE static void add(Sum& sum, ConsumerState& state, const BackwardArgs& args, Shared& shared,
                                 const ConsumerCoord& at) {
    shared.dq_global_barriers.empty[state.taken.index].arrive();
    state.taken.advance();
    if (state.steps_left == 0) {
      const int accumulator = begin_section(state, args, shared);
      state.next = address_of(args, accumulator) + at.tile * kPartVectors + 32 * at.warp + at.lane;
    }
    if (DqColumns<Config>::has_warp(at.warp)) Sums::add(state.next, sum, state.factor);
    state.next += kTiles * kPartVectors;
    if (--state.steps_left == 0) end_section(state, shared);
  }
  CUTLASS_DEVICE static int begin_section(ConsumerState& state, const BackwardArgs& args, Shared& shared) {
    shared.dq_global_barriers.accumulator_free[state.slot()].wait(state.section / 2 % 2);
    state.steps_left = args.section_steps;
    return shared.dq_global_barriers.accumulators[state.slot()];
  }
  CUTLASS_DEVICE static void end_section(ConsumerState& state, Shared& shared) {
    shared.dq_global_barriers.added[state.slot()].arrive();
    ++state.section, state.steps_left = 0;
  }
  // The last section may have fewer steps than the others.
  CUTLASS_DEVICE static void end_tile(ConsumerState& state, Shared& shared) {
    if (state.steps_left > 0) end_section(state, shared);
  }

  // kPairsRows: a step of keys that only the other row n sees, dS = 0, of which nothing is added to dq.
  CUTLASS_DEVICE static void store_zero_ds(ConsumerState& state, const BackwardArgs& args, Shared& shared,
                                           const ConsumerCoord& at) {
    const int stage = state.given.index;
    shared.dq_global_barriers.empty[stage].wait(state.given.phase ^ 1);
    auto* rows = reinterpret_cast<uint4*>(shared.dq_global.ds[stage][at.tile]);
    for (int x = threadIdx.x % 128; x < DsTile::kBytes / 16; x += 128) rows[x] = make_uint4(0, 0, 0, 0);
    shared.dq_global_barriers.full[stage].arrive();
    shared.dq_global_barriers.empty[stage].arrive();
    state.given.advance(), state.taken.advance();
    if (state.steps_left == 0) begin_section(state, args, shared);
    if (--state.steps_left == 0) end_section(state, shared);
  }
  // A tile without a visible key: its accumulators are left as they are.
  CUTLASS_DEVICE static void add_nothing(ConsumerState& state, const BackwardArgs& args, Shared& shared) {
    for (int section = 0; section < args.num_sections; ++section) {
      begin_section(state, args, shared);
      end_section(state, shared);
    }
  }

  // The sections of a block's tiles, one after another.
  template <TileReader kReader>
  struct Sections {
    typename Config::template Scheduler<kReader> tiles;
    int section = 0;      // of this tile
    uint32_t number = 0;  // of all sections of this block

    CUTLASS_DEVICE Sections(Shared& shared, const BackwardArgs& args) : tiles(shared, args) {}
    CUTLASS_DEVICE bool exists(const BackwardArgs& args) const { return tiles.tile < args.num_tiles; }
    CUTLASS_DEVICE void advance(Shared& shared, const BackwardArgs& args) {
      ++number;
      if (Config::kPairsRows && ++section < args.num_sections) return;
      section = 0;
      tiles.advance(shared, args);
    }
    CUTLASS_DEVICE int unit(const BackwardArgs& args) const {
      return unit_of(args, pair_of(args, tiles.tile), section);
    }
  };

  // Finds accumulators, and counts sections that have been added. kPairsRows: the next section's accumulator is
  // announced while a section is added. Otherwise this warp also stores dk and dv of the tiles that are left out.
  CUTLASS_DEVICE static void run_accumulators(Shared& shared, const BackwardArgs& args, const DqDkdvMaps& maps) {
    const int lane = threadIdx.x % 32;
    auto& barriers = shared.dq_global_barriers;
    auto announce = [&](uint32_t number, int accumulator) {
      barriers.accumulators[number % 2] = accumulator;
      barriers.accumulator_free[number % 2].arrive();
    };
    auto count = [&](int unit) {
      __threadfence();
      atomicAdd(args.dq_progress + unit, 1);
    };
    if constexpr (Config::kPairsRows) {
      if (lane != 0) return;
    }
    Sections<TileReader::kWarp> added(shared, args);
    if constexpr (!Config::kPairsRows) {
      for (; added.exists(args); added.advance(shared, args)) {
        const int tile = added.tiles.tile;
        if (lane == 0) announce(added.number, accumulator_of(args, added.unit(args)));
        if (args.seen_tiles != nullptr) {
          ZeroGradients<Config>::store_left_out(shared.seen_tiles, args, maps, Config::locate(args, tile),
                                                number_of(shared, args, tile), lane);
        }
        if (lane == 0) {
          barriers.added[added.number % 2].wait(added.number / 2 % 2);
          count(added.unit(args));
        }
        __syncwarp();
      }
    } else {
      Sections<TileReader::kWarp> announced = added;
      for (; added.exists(args); added.advance(shared, args)) {
        const EmptyBarrier& done = barriers.added[added.number % 2];
        const uint32_t parity = added.number / 2 % 2;
        while (announced.number <= added.number + 1 && announced.exists(args) && !done.test_wait(parity)) {
          int accumulator;
          if (find_accumulator(accumulator, args, announced.unit(args))) {
            announce(announced.number, accumulator);
            announced.advance(shared, args);
          } else {
            __nanosleep(100);
          }
        }
        done.wait(parity);
        count(added.unit(args));
      }
    }
  }
  // Until later_delta.h has computed delta and the exponent of a tile's (b, n, h), where it does.
  CUTLASS_DEVICE static void wait_for_delta(const BackwardArgs& args, int tile) {
    if constexpr (Config::kTakesTiles && Config::kHalfDqSums) {
      const int later = args.by_blocks.div(tile) - args.num_first_pairs;
      if (later >= 0) ptx::wait_for(args.later_delta + later, 1);
    }
  }
  CUTLASS_DEVICE static void run_dq(Shared& shared, const BackwardArgs& args, const TensorView<5>& dq) {
    typename Sums::Writer writer(args.scale);
    const int lane = threadIdx.x % 32;
    const int num_shares = Config::kPairsRows ? min(args.by_blocks.divisor, args.num_sections) : 1;
    for (Sections<TileReader::kWarp> sections(shared, args); sections.exists(args); sections.advance(shared, args)) {
      const int tile = sections.tiles.tile, block = number_of(shared, args, tile);
      // Each section is written by some of the blocks, so that a block has to wait for few sections.
      const int of_block = block % num_shares, share = sections.section % num_shares;
      if (of_block != share) continue;
      const int num_tiles = num_tiles_of_pair(shared, args);
      const int num_writers = (num_tiles - share + num_shares - 1) / num_shares;
      const int unit = sections.unit(args);
      typename Config::Coordinates at = Config::locate(args, tile);
      const bool exists = !Config::kPairsRows || at.row < args.N;
      uint32_t slot = 0;  // of the largest sum that this block has written; below 2^32, since each has 128 rows of K
      if constexpr (Config::kHalfDqSums) {
        const uint32_t bnh = uint32_t(at.batch * args.N + (exists ? at.row : 0)) * args.H + at.head;
        slot = bnh * args.by_blocks.divisor + block;
        wait_for_delta(args, tile);
        writer.set_scale(DqRange::inverse_factor(args.dq_exponents[bnh]));
        if (sections.section == share) writer.begin_tile();  // this block's sections of it come one after another
      }
      const int accumulator = accumulator_of(args, unit);
      if (lane == 0) ptx::wait_for(args.dq_progress + unit, num_tiles);
      __syncwarp();
      if (exists) {
        write(writer, args, shared, address_of(args, accumulator), dq, at, sections.section, block / num_shares,
              num_writers, lane);
      }
      __syncwarp();
      if (cute::elect_one_sync()) {  // from `lane == 0` behind __syncwarp, ptxas 12.4 branches too early
        if constexpr (Config::kHalfDqSums) {
          if (exists) args.dq_largest[slot] = writer.largest();
        }
        __threadfence();
        if (atomicAdd(args.dq_progress + unit, 1) == num_tiles + num_writers - 1) {
          __threadfence();
          release(args, accumulator);
        }
      }
    }
  }

 private:
  // The number of a section of a (b, n, h) in the order in which accumulators are given (H2, H5).
  CUTLASS_DEVICE static int unit_of(const BackwardArgs& args, int pair, int section) {
    if constexpr (!Config::kPairsRows) return pair;
    const int tiles = args.by_blocks.divisor;
    const SectionOrder order(args.num_tiles / (2 * tiles), tiles, int(gridDim.x) / 2, args.num_sections);
    return order.position(pair / 2, section, pair % 2);
  }
  CUTLASS_DEVICE static int accumulator_of(const BackwardArgs& args, int unit) {
    return unit < args.num_dq_accumulators ? unit
                                           : ptx::wait_for(args.dq_released + unit - args.num_dq_accumulators, 1) - 1;
  }
  // The same without waiting: false if it is not released yet.
  CUTLASS_DEVICE static bool find_accumulator(int& accumulator, const BackwardArgs& args, int unit) {
    const int released = unit - args.num_dq_accumulators;
    accumulator = released < 0 ? unit : ptx::load_acquire(args.dq_released + released) - 1;
    return accumulator >= 0;
  }
  CUTLASS_DEVICE static void release(const BackwardArgs& args, int accumulator) {
    ptx::store_release(args.dq_released + atomicAdd(args.dq_num_released, 1), accumulator + 1);
  }
  // Writes every num_writers-th part of a section, from the first_part-th on: 16 queries at a time, while the next ones
  // are loaded to shared memory.
  CUTLASS_DEVICE static void write(typename Sums::Writer& writer, const BackwardArgs& args, Shared& shared,
                                   uint4* accumulator, const TensorView<5>& dq, const typename Config::Coordinates& at,
                                   int section, int first_part, int num_writers, int lane) {
    constexpr int kVectors = 64 * 16 / Sums::kPerVector, kOfPart = kPart / (64 * 16);  // of 16 queries
    constexpr int kStages = Config::DqGlobalTiles::kSums;
    const int lane_query = writer.query_of(lane), lane_column = writer.column_of(lane);
    scalar_t* out = static_cast<scalar_t*>(const_cast<void*>(dq.ptr)) + lane_query * dq.stride[1] + lane_column +
                    at.head * dq.stride[2] + at.row * dq.stride[3] + at.batch * dq.stride[4];
    uint4* in = accumulator + lane;
    const int first_query = section * args.section_steps * kColumns;
    const int steps = min(args.section_steps, (args.Lq - first_query + kColumns - 1) / kColumns);
    const int count = (steps * kTiles - first_part + num_writers - 1) / num_writers * kOfPart;
    auto part_of = [&](int i) { return first_part + i / kOfPart * num_writers; };
    auto from = [&](int i) { return in + (part_of(i) * kOfPart + i % kOfPart) * kVectors; };
    auto load = [&](int i) {
      uint4* stage = shared.dq_global.sums[i % kStages];
      CUTLASS_PRAGMA_UNROLL
      for (int x = 0; x < kVectors; x += 32) {
        uint4& to = stage[writer.position(x, lane)];
        if (i < count && writer.has(x)) cute::SM80_CP_ASYNC_CACHEGLOBAL<uint4>::copy(from(i)[x], to);
      }
      cute::cp_async_fence();
    };
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kStages - 1; ++i) load(i);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = 0; i < count; ++i) {
      cute::cp_async_wait<kStages - 2>();
      __syncwarp();  // all lanes' loads of this stage are there, and all have read the last one
      load(i + kStages - 1);
      CUTLASS_PRAGMA_UNROLL
      for (int x = 0; x < kVectors; x += 32) {
        if (writer.has(x)) from(i)[x] = make_uint4(0, 0, 0, 0);
      }
      const int tile = part_of(i) % kTiles, column = 64 * (tile % kBoxes);
      const int query = first_query + part_of(i) / kTiles * kColumns + tile / kBoxes * kQueries + i % kOfPart * 16;
      writer.write(out + query * dq.stride[1] + column, shared.dq_global.sums[i % kStages], dq, query,
                   int(dq.size[0]) - column - lane_column, lane);
    }
    cute::cp_async_wait<0>();
    __syncwarp();
    writer.end();
  }
};

}  // namespace ds4s::sm90
