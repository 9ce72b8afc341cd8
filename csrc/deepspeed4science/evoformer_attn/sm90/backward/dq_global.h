// dq, math.md (13), in kernel_dq_dkdv where it does not fit into shared memory: every block adds its keys' share to an
// accumulator, float32 rows that stay in L2. When all blocks of a (b, n, h) have added, each of them writes a part of
// dq. Only the (b, n, h) under way have an accumulator.
//
//   consumers         exchange dS through shared memory and compute dq^T = K^T dS^T, 64 columns of dq by 32 queries for
//                     each warpgroup; they add it to the accumulator in the order of the instruction's registers
//   accumulator warp  finds the accumulator of a tile, and counts a tile that has been added
//   dq warp           waits for the other blocks, writes this block's part of dq and leaves zeros; the last block of a
//                     (b, n, h) to do so releases the accumulator
//
// Why no block waits forever (docs/kernels/dq-accumulators.md has the proof and a diagram; a pair is a (b, n, h)):
//   H1  Tiles are taken in increasing order (tile_scheduler.h), and a block finishes its tiles in that order.
//   H2  The first pairs have an accumulator each; pair x gets the (x - num_dq_accumulators + 1)-th one released.
//   H3  A pair releases its accumulator when all its tiles have been added and all parts of its dq written.
//   H4  The tiles of a pair fit into the queues of all blocks (DqGlobalPlan).
// With two rows n in a cluster (kPairsRows), tiles 2 m and 2 m + 1 are the same keys of both; there are no queues.
#pragma once

#include <cute/arch/copy_sm80.hpp>

#include "common/atomic_add.h"
#include "sm90/backward/config.h"

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
  // D <= 48: a warp has 16 of 64 columns of dq, and the last warp's do not exist.
  static constexpr bool kHasAllColumns = Config::kHeadDim == 64 * kBoxes;

  CUTLASS_DEVICE static void init(typename Config::DqGlobalBarriers& barriers) {
    for (auto& barrier : barriers.full) barrier.init(128 * kTiles);
    for (auto& barrier : barriers.empty) barrier.init(128 * (kTiles + Config::kPairsRows));
    barriers.accumulator_free.init(1), barriers.added.init(128 * kTiles);
  }

  // The index of a tile's (b, n, h), and the address of an accumulator.
  CUTLASS_DEVICE static int pair_of(const BackwardArgs& args, int tile) {
    if constexpr (Config::kPairsRows) return 2 * args.by_blocks.div(tile / 2) + tile % 2;
    return args.by_blocks.div(tile);
  }
  // The number of a tile among those of its (b, n, h).
  CUTLASS_DEVICE static int number_of(const BackwardArgs& args, int tile) {
    return args.by_blocks.rem(Config::kPairsRows ? tile / 2 : tile);
  }
  CUTLASS_DEVICE static float* address_of(const BackwardArgs& args, int accumulator) {
    return args.dq_accumulators + int64_t(accumulator) * num_parts(args) * kPart;
  }
  // Elements that one warpgroup adds in one step.
  static constexpr int kPart = 64 * kQueries;
  CUTLASS_DEVICE static int num_parts(const BackwardArgs& args) { return (args.Lq + kColumns - 1) / kColumns * kTiles; }

  // A consumer's state through the steps of all its tiles.
  struct ConsumerState {
    using Pipe = PipelineState<Config::DqGlobalTiles::kDsStages>;
    Pipe given, taken;
    uint32_t accumulator_phase = 0;
    float* next;  // this lane's first element of the next step
    bool begins;  // no step of this tile has been added yet
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
    if (state.begins) {
      shared.dq_global_barriers.accumulator_free.wait(state.accumulator_phase);
      state.accumulator_phase ^= 1, state.begins = false;
      state.next =
          address_of(args, shared.dq_global_barriers.accumulator) + at.tile * kPart + 4 * (32 * at.warp + at.lane);
    }
    if (kHasAllColumns || 16 * at.warp < Config::kHeadDim) {
      CUTLASS_PRAGMA_UNROLL
      for (int x = 0; x < kQueries / 2; x += 4) atomic_add_vector(state.next + 128 * x, sum + x);
    }
    state.next += kTiles * kPart;
  }

  // kPairsRows: a step of keys that only the other row n sees, dS = 0, of which nothing is added to dq.
  CUTLASS_DEVICE static void store_zero_ds(ConsumerState& state, Shared& shared, const ConsumerCoord& at) {
    const int stage = state.given.index;
    shared.dq_global_barriers.empty[stage].wait(state.given.phase ^ 1);
    auto* rows = reinterpret_cast<uint4*>(shared.dq_global.ds[stage][at.tile]);
    for (int x = threadIdx.x % 128; x < DsTile::kBytes / 16; x += 128) rows[x] = make_uint4(0, 0, 0, 0);
    shared.dq_global_barriers.full[stage].arrive();
    shared.dq_global_barriers.empty[stage].arrive();
    state.given.advance(), state.taken.advance();
  }
  // A tile without a visible key: its accumulator is left as it is.
  CUTLASS_DEVICE static void add_nothing(ConsumerState& state, Shared& shared) {
    shared.dq_global_barriers.accumulator_free.wait(state.accumulator_phase);
    state.accumulator_phase ^= 1;
    shared.dq_global_barriers.added.arrive();
  }

  CUTLASS_DEVICE static void run_accumulators(Shared& shared, const BackwardArgs& args) {
    if (threadIdx.x % 32 != 0) return;
    uint32_t parity = 0;
    for (typename Config::template Scheduler<TileReader::kLane> tiles(shared, args); tiles.tile < args.num_tiles;
         tiles.advance(shared, args), parity ^= 1) {
      shared.dq_global_barriers.accumulator = accumulator_of(args, pair_of(args, tiles.tile));
      shared.dq_global_barriers.accumulator_free.arrive();
      shared.dq_global_barriers.added.wait(parity);
      __threadfence();
      atomicAdd(args.dq_progress + pair_of(args, tiles.tile), 1);
    }
  }
  CUTLASS_DEVICE static void run_dq(Shared& shared, const BackwardArgs& args, const TensorView<5>& dq) {
    const int lane = threadIdx.x % 32;
    for (typename Config::template Scheduler<TileReader::kWarp> tiles(shared, args); tiles.tile < args.num_tiles;
         tiles.advance(shared, args)) {
      typename Config::Coordinates at = Config::locate(args, tiles.tile);
      const int accumulator = accumulator_of(args, pair_of(args, tiles.tile));
      int* progress = args.dq_progress + pair_of(args, tiles.tile);
      if (lane == 0) wait_for(progress, args.by_blocks.divisor);
      __syncwarp();
      if (!Config::kPairsRows || at.row < args.N) {
        write(args, shared, address_of(args, accumulator), dq, at, number_of(args, tiles.tile), lane);
      }
      __syncwarp();
      if (lane == 0) {
        __threadfence();
        if (atomicAdd(progress, 1) == 2 * args.by_blocks.divisor - 1) {
          __threadfence();
          release(args, accumulator);
        }
      }
    }
  }

 private:
  CUTLASS_DEVICE static int accumulator_of(const BackwardArgs& args, int pair) {
    return pair < args.num_dq_accumulators ? pair : wait_for(args.dq_released + pair - args.num_dq_accumulators, 1) - 1;
  }
  CUTLASS_DEVICE static void release(const BackwardArgs& args, int accumulator) {
    ptx::store_release(args.dq_released + atomicAdd(args.dq_num_released, 1), accumulator + 1);
  }
  CUTLASS_DEVICE static int wait_for(const int* counter, int at_least) {
    int x;
    while ((x = ptx::load_acquire(counter)) < at_least) __nanosleep(200);
    return x;
  }
  // Writes every num_blocks-th part of dq, from the block-th on: 16 queries at a time, while the next ones are loaded
  // to shared memory.
  CUTLASS_DEVICE static void write(const BackwardArgs& args, Shared& shared, float* accumulator,
                                   const TensorView<5>& dq, const typename Config::Coordinates& at, int block,
                                   int lane) {
    constexpr int kVectors = 64 * 16 / 4, kOfPart = kPart / (64 * 16);  // float4 of 16 queries
    constexpr int kStages = Config::DqGlobalTiles::kSums;
    const int lane_query = lane % 16 / 4 * 2 + lane % 2, lane_column = lane / 16 * 16 + lane % 4 / 2 * 8;
    scalar_t* out = static_cast<scalar_t*>(const_cast<void*>(dq.ptr)) + lane_query * dq.stride[1] + lane_column +
                    at.head * dq.stride[2] + at.row * dq.stride[3] + at.batch * dq.stride[4];
    float4* in = reinterpret_cast<float4*>(accumulator) + lane;
    const int count = (num_parts(args) - block + args.by_blocks.divisor - 1) / args.by_blocks.divisor * kOfPart;
    auto has_columns = [](int x) { return kHasAllColumns || x / 32 % 4 * 16 < Config::kHeadDim; };
    auto part_of = [&](int i) { return block + i / kOfPart * args.by_blocks.divisor; };
    auto from = [&](int i) { return in + (part_of(i) * kOfPart + i % kOfPart) * kVectors; };
    auto load = [&](int i) {
      float4* stage = shared.dq_global.sums[i % kStages] + lane;
      CUTLASS_PRAGMA_UNROLL
      for (int x = 0; x < kVectors; x += 32) {
        if (i < count && has_columns(x)) cute::SM80_CP_ASYNC_CACHEGLOBAL<float4>::copy(from(i)[x], stage[x]);
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
        if (has_columns(x)) from(i)[x] = make_float4(0.f, 0.f, 0.f, 0.f);
      }
      const int tile = part_of(i) % kTiles, column = 64 * (tile % kBoxes);
      const int query = part_of(i) / kTiles * kColumns + tile / kBoxes * kQueries + i % kOfPart * 16;
      scalar_t* rows = out + query * dq.stride[1] + column;
      const int valid = int(dq.size[0]) - column - lane_column;
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < 2; ++j) {  // 8 queries each
        uint4 eights[2];             // both are made before any store, which may be predicated off
        CUTLASS_PRAGMA_UNROLL
        for (int y = 0; y < 2; ++y) {
          eights[y] = eight_columns(shared.dq_global.sums[i % kStages] + 128 * j + 64 * y, args.scale, lane);
        }
        const bool exists = query + 8 * j + lane_query < dq.size[1];
        CUTLASS_PRAGMA_UNROLL
        for (int y = 0; y < 2; ++y) {
          store_eight(rows + 8 * j * dq.stride[1] + 32 * y, eights[y], exists ? valid - 32 * y : 0);
        }
      }
    }
    cute::cp_async_wait<0>();
    __syncwarp();
  }
  // Returns eight neighbours of a row for each lane, out of 8 queries by 32 columns of two warps' accumulators of dq^T.
  // Half of the lanes read each two neighbours in reverse, which avoids bank conflicts.
  CUTLASS_DEVICE static uint4 eight_columns(const float4* sums, float scale, int lane) {
    const int second = lane / 16;
    const float* x = reinterpret_cast<const float*>(sums) + 128 * second + lane % 16;
    uint32_t pairs[4];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) {
      uint32_t pair = ptx::pack<scalar_t>(x[16 * (2 * i + second)] * scale, x[16 * (2 * i + 1 - second)] * scale);
      pairs[i] = __byte_perm(pair, 0, second ? 0x1032 : 0x3210);
    }
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
};

}  // namespace ds4s::sm90
