// dq in the pass over keys where it does not fit into shared memory: every block adds its keys' share to fp32 rows that
// stay in L2, and once all blocks of a (b, n, h) have, each of them writes a part of dq. Only those that are under way
// have a slot, one after the other.
//
//   consumers      dS through shared memory, dq^T = K^T dS^T: each warpgroup 64 columns of dq by 32 queries, added to
//                  the slot, which has them in the order of the accumulators
//   slot warp      waits until the slot of a tile is free, and counts a tile that has been added
//   dq warp        waits for the other blocks, then writes this block's part of dq and leaves zeros
//
// All blocks run at the same time (a cooperative launch), so whoever is waited for gets on: a slot's next owner waits
// for nothing but the writing of an earlier dq, which waits for additions to that one alone.
#pragma once

#include <cute/arch/copy_sm80.hpp>

#include "epilogue/atomic_add.h"
#include "sm90/row_pass_producer.h"

namespace ds4s::sm90 {

template <typename Config>
struct RingDq {
  using Element = typename Config::Element;
  using Shared = typename Config::Shared;
  using OwnedTile = typename Config::OwnedTile;
  using WalkedTile = typename Config::WalkedTile;
  using DsTile = typename Config::BiasTile;
  static constexpr int kTiles = Config::kTiles, kOwned = Config::kOwned, kColumns = Config::kColumns;
  // A warpgroup's part of a step's product.
  static constexpr int kBoxes = OwnedTile::kNumBoxes, kParts = kTiles / kBoxes, kQueries = kColumns / kParts;
  static_assert(OwnedTile::kBoxColumns == 64 && kTiles % kBoxes == 0, "a warpgroup multiplies with 64 columns of K");
  using Sum = float[kQueries / 2];

  CUTLASS_DEVICE static void init(typename Config::RingBarriers& ring) {
    for (auto& place : ring.full)
      for (auto& barrier : place) barrier.init(128);
    for (auto& barrier : ring.empty) barrier.init(128 * kTiles);
    ring.slot_free.init(1), ring.added.init(128 * kTiles);
  }

  // The (b, n, h) of a tile, and where it is summed up.
  CUTLASS_DEVICE static int pair_of(const BackwardArgs& args, int tile) { return tile / args.num_blocks; }
  CUTLASS_DEVICE static float* slot_of(const BackwardArgs& args, int tile) {
    return args.dq_slots + int64_t(pair_of(args, tile) % args.num_dq_slots) * num_parts(args) * kPart;
  }
  // Of a slot: what one warpgroup adds in one step.
  static constexpr int kPart = 64 * kQueries;
  CUTLASS_DEVICE static int num_parts(const BackwardArgs& args) { return (args.Lq + kColumns - 1) / kColumns * kTiles; }

  // A consumer's way through the steps of all its tiles.
  struct Walk {
    using Turn = RingTurn<Config::RingTiles::kPlaces>;
    Turn given, taken;
    uint32_t slot_parity = 0;
    float* slot;  // this lane's first element
    int step;     // the next one to add, of this tile

    CUTLASS_DEVICE void begin(const BackwardArgs& args, int tile, const Place& at) {
      slot = slot_of(args, tile) + at.tile * kPart + 4 * (32 * at.warp + at.lane);
      step = 0;
    }
  };

  // dS of this warpgroup's keys, each 8x8 matrix transposed to where `offset` says.
  template <typename Packed>
  CUTLASS_DEVICE static void hand_over(const Packed& ds, Walk& walk, Shared& shared, uint32_t offset, const Place& at) {
    const typename Walk::Turn& turn = walk.given;
    shared.ring_barriers.empty[turn.stage].wait(turn.parity ^ 1);
    uint32_t address = shared_address(shared.ring.ds[turn.stage][at.tile]) + offset;
    CUTLASS_PRAGMA_UNROLL
    for (int g = 0; g < kColumns / 16; ++g) stmatrix_trans(address + g * 16 * DsTile::kRowBytes, ds + 4 * g);
    cutlass::arch::fence_view_async_shared();
    shared.ring_barriers.full[turn.stage][at.tile].arrive();
    walk.given.advance();
  }

  // dS that has been handed over last, of this warpgroup's keys; dS of the next step for dq, of all keys.
  CUTLASS_DEVICE static void wait_for_own(const Walk& walk, Shared& shared, const Place& at) {
    typename Walk::Turn last = walk.given.before();
    shared.ring_barriers.full[last.stage][at.tile].wait(last.parity);
  }
  CUTLASS_DEVICE static void wait_for_all(const Walk& walk, Shared& shared) {
    for (auto& barrier : shared.ring_barriers.full[walk.taken.stage]) barrier.wait(walk.taken.parity);
  }

  // dk += dS^T Q of the step whose dS has been handed over last.
  template <int kCount>
  CUTLASS_DEVICE static void start_own(float (&dk)[kCount], const Walk& walk, const Shared& shared, uint32_t queries,
                                       const Place& at) {
    uint32_t ds = place_of(shared.ring.ds[0]) + (walk.given.before().stage * kTiles + at.tile) * (DsTile::kBytes >> 4);
    CUTLASS_PRAGMA_UNROLL
    for (int step = 0; step < kColumns / 16; ++step) {
      wgmma<Element, 2 * kCount, Major::MN, Major::MN>(dk, DsTile::descriptor(ds + DsTile::rows_step(step)),
                                                       WalkedTile::descriptor(queries + WalkedTile::rows_step(step)));
    }
  }
  // sum = K^T dS^T of the next step for dq; then sum is added.
  CUTLASS_DEVICE static void start(Sum& sum, const Walk& walk, const Shared& shared, uint32_t owned, const Place& at) {
    constexpr uint32_t kNextKeys = 2 * OwnedTile::kBytes >> 4, kNextDs = DsTile::kBytes >> 4;
    uint32_t keys = owned + at.tile % kBoxes * (OwnedTile::kBoxBytes >> 4);
    uint32_t ds = place_of(shared.ring.ds[0]) + walk.taken.stage * (kTiles * kNextDs) +
                  DsTile::rows_step(at.tile / kBoxes * (kQueries / 16));
    CUTLASS_PRAGMA_UNROLL
    for (int t = 0; t < kTiles; ++t) {
      CUTLASS_PRAGMA_UNROLL
      for (int step = 0; step < kOwned / 16; ++step) {
        wgmma<Element, kQueries, Major::K, Major::MN>(
            sum, OwnedTile::descriptor(keys + t * kNextKeys + OwnedTile::rows_step(step)),
            DsTile::descriptor(ds + t * kNextDs + DsTile::columns_step(step)),
            t == 0 && step == 0 ? ScaleOut::Zero : ScaleOut::One);
      }
    }
  }
  CUTLASS_DEVICE static void add(Sum& sum, Walk& walk, const BackwardArgs& args, Shared& shared, const Place& at) {
    shared.ring_barriers.empty[walk.taken.stage].arrive();
    walk.taken.advance();
    if (walk.step == 0) {
      shared.ring_barriers.slot_free.wait(walk.slot_parity);
      walk.slot_parity ^= 1;
    }
    float* dst = walk.slot + walk.step++ * (kTiles * kPart);
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < kQueries / 2; x += 4) atomic_add_vector(dst + 128 * x, sum + x);
  }

  CUTLASS_DEVICE static void run_slots(Shared& shared, const BackwardArgs& args) {
    if (threadIdx.x % 32 != 0) return;
    uint32_t parity = 0;
    int tile = Config::first_tile(args);
    if (tile < args.num_tiles) free_slot(shared, args, tile);
    for (; tile < args.num_tiles; tile = Config::next_tile(args, tile), parity ^= 1) {
      shared.ring_barriers.added.wait(parity);
      __threadfence();
      atomicAdd(args.dq_progress + pair_of(args, tile), 1);
      int next = Config::next_tile(args, tile);
      if (next < args.num_tiles) free_slot(shared, args, next);
    }
  }
  CUTLASS_DEVICE static void run_dq(Shared& shared, const BackwardArgs& args, const TensorView<5>& dq) {
    const int lane = threadIdx.x % 32;
    for (int tile = Config::first_tile(args); tile < args.num_tiles; tile = Config::next_tile(args, tile)) {
      typename Config::Coordinates at = Config::locate(args, tile);
      int* progress = args.dq_progress + pair_of(args, tile);
      if (lane == 0) wait_for(progress, args.num_blocks);
      __syncwarp();
      write(args, shared, slot_of(args, tile), dq, at, tile % args.num_blocks, lane);
      __syncwarp();
      if (lane == 0) {
        __threadfence();
        atomicAdd(progress, 1);
      }
    }
  }

 private:
  // The one before has been written by all its blocks.
  CUTLASS_DEVICE static void free_slot(Shared& shared, const BackwardArgs& args, int tile) {
    int pair = pair_of(args, tile);
    if (pair >= args.num_dq_slots) wait_for(args.dq_progress + pair - args.num_dq_slots, 2 * args.num_blocks);
    shared.ring_barriers.slot_free.arrive();
  }
  CUTLASS_DEVICE static void wait_for(const int* progress, int count) {
    while (ptx::load_acquire(progress) < count) __nanosleep(200);
  }
  // Every num_blocks-th part, from the block-th on: 16 queries at a time, the next ones on their way to shared memory.
  CUTLASS_DEVICE static void write(const BackwardArgs& args, Shared& shared, float* slot, const TensorView<5>& dq,
                                   const typename Config::Coordinates& at, int block, int lane) {
    constexpr int kVectors = 64 * 16 / 4, kOfPart = kPart / (64 * 16);  // float4 of 16 queries
    Element* out = static_cast<Element*>(const_cast<void*>(dq.ptr)) + at.head * dq.stride[2] + at.row * dq.stride[3] +
                   at.batch * dq.stride[4];
    const int count = (num_parts(args) - block + args.num_blocks - 1) / args.num_blocks * kOfPart;
    auto part_of = [&](int i) { return block + i / kOfPart * args.num_blocks; };
    auto from = [&](int i) {
      return reinterpret_cast<float4*>(slot) + (part_of(i) * kOfPart + i % kOfPart) * kVectors;
    };
    auto load = [&](int i) {
      CUTLASS_PRAGMA_UNROLL
      for (int x = lane; x < kVectors; x += 32) {
        if (i < count) cute::SM80_CP_ASYNC_CACHEGLOBAL<float4>::copy(from(i)[x], shared.ring.sums[i % 2][x]);
      }
      cute::cp_async_fence();
    };
    load(0);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = 0; i < count; ++i) {
      load(i + 1);
      cute::cp_async_wait<1>();  // each lane reads what it has loaded itself
      CUTLASS_PRAGMA_UNROLL
      for (int x = lane; x < kVectors; x += 32) from(i)[x] = make_float4(0.f, 0.f, 0.f, 0.f);
      const int tile = part_of(i) % kTiles;
      const int query = part_of(i) / kTiles * kColumns + tile / kBoxes * kQueries + i % kOfPart * 16 + lane / 4;
      CUTLASS_PRAGMA_UNROLL
      for (int y = 0; y < 4; ++y) {  // 32 columns of 8 queries
        uint32_t pairs[4];
        CUTLASS_PRAGMA_UNROLL
        for (int w = 0; w < 2; ++w) {
          float4 four = shared.ring.sums[i % 2][128 * (y / 2) + 32 * (y % 2 * 2 + w) + lane];
          pairs[2 * w] = movmatrix_trans(ptx::pack<Element>(four.x * args.scale, four.y * args.scale));
          pairs[2 * w + 1] = movmatrix_trans(ptx::pack<Element>(four.z * args.scale, four.w * args.scale));
        }
        const int l = query + 8 * (y / 2), column = 64 * (tile % kBoxes) + 32 * (y % 2) + 8 * (lane % 4);
        store_eight(out + l * dq.stride[1] + column, eight_of_a_row(pairs, lane),
                    l < dq.size[1] ? int(dq.size[0]) - column : 0);
      }
    }
    cute::cp_async_wait<0>();
  }
};

}  // namespace ds4s::sm90
