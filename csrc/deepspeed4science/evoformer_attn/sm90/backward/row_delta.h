// -delta, math.md (9), in kernel_dq_dkdv: two warps of the producers compute it from O and dO, a part of a step's
// queries each, and keep its terms (sm90/mma/rank1_mma.h) in shared memory for all tiles of keys of a (b, n, h). They
// compute those of the next (b, n, h) while consumers are busy with the last tile of this one.
//
// kernel_dbias2 reads delta from memory, where it is stored for it. It may begin while the last blocks of this kernel
// run. So each warp adds the number of its (b, n, h) to delta_progress when all their deltas are stored. Those that see
// nothing count, but have no delta.
#pragma once

#include "sm90/backward/producer.h"

namespace ds4s::sm90 {

template <typename Config>
class RowDelta {
  using scalar_t = typename Config::scalar_t;
  using Shared = typename Config::Shared;
  using Coordinates = typename Config::Coordinates;
  using Barriers = typename Config::DeltaBarriers;
  using Scheduler = GroupedTileScheduler<Config>;
  using Tile = typename Config::DeltaTiles::Tile;
  static constexpr int kSlots = Config::DeltaTiles::kSlots;
  static_assert(Tile::kRows == 16 && kSlots == 2, "two lanes for each row; 64 queries a step");

 public:
  CUTLASS_DEVICE static void init(Barriers& barriers) {
    for (auto& of_warp : barriers.loaded) {
      for (auto& barrier : of_warp) barrier.init(1);
    }
    for (auto& barrier : barriers.full) barrier.init(32 * kDeltaWarps);
    for (auto& barrier : barriers.empty) barrier.init(128 * Config::kWarpgroups);
  }
  // Called by all lanes of one of the warps.
  CUTLASS_DEVICE static void run(Shared& shared, const BackwardArgs& args, const DqDkdvMaps& maps, int warp) {
    RowDelta(shared, args, maps, warp).run_pairs();
  }

 private:
  CUTLASS_DEVICE RowDelta(Shared& shared, const BackwardArgs& args, const DqDkdvMaps& maps, int warp)
      : shared_(shared), args_(args), maps_(maps), warp_(warp), lane_(int(threadIdx.x) % 32) {}

  // Each (b, n, h), here a pair of (b n) and h, in the order of GroupedTileScheduler.
  CUTLASS_DEVICE void run_pairs() {
    const int num_parts = Config::columns(args_).num_steps() * kSlots;  // of this warp's queries
    const int first = Scheduler::first_pair();
    int pair = next_seen(first);
    if (exists(pair)) load(locate(pair), 0), load(locate(pair), 1);
    for (uint32_t phase = 0, slot_phase = 0; exists(pair); phase ^= 1) {
      const Coordinates at = locate(pair);
      const int64_t first_row = (args_.row_index(at.batch, at.row) * args_.H + at.head) * args_.Lq;
      // kPairsRows: perhaps only the other row n of the cluster sees something.
      const bool sees =
          !Config::kPairsRows || (at.row < args_.N && !args_.mask.sees_nothing(args_.row_index(at.batch, at.row)));
      const int next = next_seen(pair + Scheduler::step());
      CUTLASS_PRAGMA_NO_UNROLL
      for (int part = 0; part < num_parts; part += kSlots, slot_phase ^= 1) {
        float deltas[kSlots];
        CUTLASS_PRAGMA_UNROLL
        for (int slot = 0; slot < kSlots; ++slot) {
          shared_.delta_barriers.loaded[warp_][slot].wait(slot_phase);
          deltas[slot] = product(shared_.delta.o[warp_][slot], shared_.delta.do_[warp_][slot]);
          __syncwarp();
          const int ahead = part + kSlots + slot;
          if (ahead < num_parts) {
            load(at, ahead);
          } else if (exists(next)) {
            load(locate(next), slot);
          }
        }
        const int step = part / kSlots;
        shared_.delta_barriers.empty[step].wait(phase ^ 1);
        CUTLASS_PRAGMA_UNROLL
        for (int slot = 0; slot < kSlots; ++slot) {
          if (lane_ % 2 == 0) shared_.delta.terms[query(part + slot)] = Rank1Terms::terms_alone(-deltas[slot]);
        }
        cutlass::arch::fence_view_async_shared();
        shared_.delta_barriers.full[step].arrive();
        CUTLASS_PRAGMA_UNROLL  // after the fence, which would wait for these stores
            for (int slot = 0; slot < kSlots; ++slot) {
          if (sees) store(deltas[slot], first_row, query(part + slot));
        }
      }
      pair = next;
    }
    __syncwarp();
    if (lane_ == 0) {
      __threadfence();
      atomicAdd(args_.delta_progress, (pair - first) / Scheduler::step());
    }
  }

  CUTLASS_DEVICE bool exists(int pair) const { return pair * args_.by_blocks.divisor < args_.num_tiles; }
  CUTLASS_DEVICE Coordinates locate(int pair) const { return Config::locate(args_, pair * args_.by_blocks.divisor); }
  // The first pair from `pair` on that sees a key.
  CUTLASS_DEVICE int next_seen(int pair) const {
    while (exists(pair) && sees_nothing(pair)) pair += Scheduler::step();
    return pair;
  }
  CUTLASS_DEVICE bool sees_nothing(int pair) const {
    if constexpr (!Config::kPairsRows) return args_.mask.sees_nothing(args_.by_heads.div(pair));
    const Coordinates at = locate(pair);
    for (int n = at.row & ~1; n <= (at.row | 1) && n < args_.N; ++n) {
      if (!args_.mask.sees_nothing(args_.row_index(at.batch, n))) return false;
    }
    return true;
  }

  // A part has 16 queries; of a step's four, a warp has two.
  CUTLASS_DEVICE int first_query(int part) const {
    return part / kSlots * Config::kColumns + (warp_ * kSlots + part % kSlots) * Tile::kRows;
  }
  CUTLASS_DEVICE int query(int part) const { return first_query(part) + lane_ / 2; }
  CUTLASS_DEVICE void load(const Coordinates& at, int part) {
    if (!cute::elect_one_sync()) return;
    const int slot = part % kSlots, query = first_query(part);
    FullBarrier& loaded = shared_.delta_barriers.loaded[warp_][slot];
    loaded.arrive_and_expect_tx(2 * Tile::kBytes);
    load_tile<Tile>(maps_.delta_o, loaded, shared_.delta.o[warp_][slot], 0, query, at.head, at.row, at.batch);
    load_tile<Tile>(maps_.delta_do, loaded, shared_.delta.do_[warp_][slot], 0, query, at.head, at.row, at.batch);
  }
  CUTLASS_DEVICE void store(float delta, int64_t first_row, int query) const {
    if (query >= args_.Lq || lane_ % 2 != 0) return;
    args_.negative_delta[first_row + query] = -delta;
    // O of a query that sees nothing is 0.
    if (!(fabsf(delta) > 0.f) && args_.lse[first_row + query] == -infinity()) args_.flag.raise();
  }
  // The scalar product of a row of two tiles, by two lanes.
  CUTLASS_DEVICE float product(const uint8_t* x, const uint8_t* y) const {
    constexpr int kChunks = Config::kHeadDim / 16;  // of a lane
    float sum = 0.f;
    auto add = [&](uint32_t a, uint32_t b) {
      const float2 c = ptx::unpack<scalar_t>(a), d = ptx::unpack<scalar_t>(b);
      sum = fmaf(c.x, d.x, sum), sum = fmaf(c.y, d.y, sum);
    };
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kChunks; ++i) {
      const int offset = Tile::offset(lane_ / 2, lane_ % 2 * kChunks + i);
      const uint4 a = *reinterpret_cast<const uint4*>(x + offset), b = *reinterpret_cast<const uint4*>(y + offset);
      add(a.x, b.x), add(a.y, b.y), add(a.z, b.z), add(a.w, b.w);
    }
    return sum + ptx::shfl_xor(sum, 1);
  }

  Shared& shared_;
  const BackwardArgs& args_;
  const DqDkdvMaps& maps_;
  const int warp_, lane_;
};

}  // namespace ds4s::sm90
