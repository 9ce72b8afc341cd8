// -delta, math.md (9), in kernel_dq_dkdv: warps of the producers compute it from O and dO, each a part of a step's
// queries. There are two forms.
//
//   kHasDeltaTerms   Two warps keep its terms (sm90/mma/rank1_mma.h) in shared memory for all tiles of keys of a
//                    (b, n, h). They compute those of the next (b, n, h) while consumers are busy with the last tile.
//   kDeltaInMemory   One warp stores it in memory, from where the block's warp for statistics loads it, in each tile. A
//                    ring of kDeltaRing barriers keeps the first warp at most kDeltaRing + 1 steps ahead of the first
//                    tile's loads: one (b, n, h), which has at least as many. So when it begins a (b, n, h), the other
//                    warp has done with the one two before it, and each block has memory for two.
//
// kernel_dbias2, which runs only beside the first form, reads delta from memory, [B, N, H, Lq], where it is stored for
// it. It may begin while the last blocks of this kernel run. So each warp adds the number of its (b, n, h) to
// delta_progress when all their deltas are stored. Those that see nothing count, but have no delta.
#pragma once

#include "sm90/backward/config.h"
#include "sm90/backward/maps.h"

namespace ds4s::sm90 {

template <typename Config>
class RowDelta {
  using scalar_t = typename Config::scalar_t;
  using Shared = typename Config::Shared;
  using Coordinates = typename Config::Coordinates;
  using Barriers = typename Config::DeltaBarriers;
  using Scheduler = GroupedTileScheduler<Config>;
  using Tile = typename Config::DeltaTiles::Tile;
  static constexpr int kDeltaWarps = Config::kDeltaWarps, kSlots = Config::DeltaTiles::kSlots;
  static constexpr bool kHasTerms = Config::kHasDeltaTerms;
  static constexpr int kStepParts = Config::kColumns / Tile::kRows / kDeltaWarps;  // of a warp
  static_assert(Tile::kRows == 16, "two lanes for each row");
  static_assert(kSlots == 2 && kStepParts % kSlots == 0 && (!kHasTerms || kStepParts == 2), "slots of a step");

 public:
  using Ring = typename Config::DeltaRing;

  CUTLASS_DEVICE static void init(Barriers& barriers) {
    for (auto& of_warp : barriers.loaded) {
      for (auto& barrier : of_warp) barrier.init(1);
    }
    for (auto& barrier : barriers.full) barrier.init(32 * kDeltaWarps);
    for (auto& barrier : barriers.empty) barrier.init(kHasTerms ? 128 * Config::kWarpgroups : 1);
  }
  // kDeltaInMemory: where in negative_delta a (b, n, h) of this block begins, by the parity of its number; and the one
  // after it.
  CUTLASS_DEVICE static uint32_t begin(const BackwardArgs& args, uint32_t parity) {
    return (parity * gridDim.x + blockIdx.x) * uint32_t(args.Lq);
  }
  CUTLASS_DEVICE static uint32_t next_begin(const BackwardArgs& args, uint32_t begin) {
    return (2 * blockIdx.x + gridDim.x) * uint32_t(args.Lq) - begin;
  }
  // Called by all lanes of one of the warps.
  CUTLASS_DEVICE static void run(Shared& shared, const BackwardArgs& args, const DqDkdvMaps& maps, int warp) {
    RowDelta(shared, args, maps, warp).run_pairs();
  }
  // kDeltaInMemory: called by all lanes of the warp for statistics. Waits until the next step's delta is in memory.
  CUTLASS_DEVICE static void wait(Barriers& barriers, Ring& ring, int lane) {
    barriers.full[ring.index].wait(ring.phase);
    __syncwarp();
    if (lane == 0) barriers.empty[ring.index].arrive();
    ring.advance();
  }

 private:
  CUTLASS_DEVICE RowDelta(Shared& shared, const BackwardArgs& args, const DqDkdvMaps& maps, int warp)
      : shared_(shared),
        args_(args),
        maps_(maps),
        warp_(warp),
        lane_(int(threadIdx.x) % 32),
        num_parts_(Config::columns(args, /*part=*/0).num_steps() * kStepParts) {}

  // Each (b, n, h), here a pair of (b n) and h, in the order of GroupedTileScheduler.
  CUTLASS_DEVICE void run_pairs() {
    const int first = Scheduler::first_pair();
    loaded_pair_ = first - Scheduler::step(), next_part_ = num_parts_;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int slot = 0; slot < kSlots; ++slot) load_next(slot);
    int pair = loaded_pair_;
    for (uint32_t phase = 0, slot_phase = 0; exists(pair); phase ^= 1) {
      const Coordinates at = locate(pair);
      const int64_t first_row = (args_.row_index(at.batch, at.row) * args_.H + at.head) * args_.Lq;
      const uint32_t begin_in_memory = kHasTerms ? 0 : begin(args_, phase);
      // kPairsRows: perhaps only the other row n of the cluster sees something.
      const bool sees =
          !Config::kPairsRows || (at.row < args_.N && !args_.mask.sees_nothing(args_.row_index(at.batch, at.row)));
      float before = 0.f;  // of the part before
      CUTLASS_PRAGMA_NO_UNROLL
      for (int part = 0; part < num_parts_; ++part) {
        const int step = part / kStepParts, slot = part % kSlots;
        shared_.delta_barriers.loaded[warp_][slot].wait(slot_phase);
        const float delta = product(shared_.delta.o[warp_][slot], shared_.delta.do_[warp_][slot]);
        __syncwarp();
        load_next(slot);
        if constexpr (kHasTerms) {
          if (slot == 0) shared_.delta_barriers.empty[step].wait(phase ^ 1);
          if (lane_ % 2 == 0) shared_.delta.terms[query(part)] = Rank1Terms::terms_alone(-delta);
          if (slot == 1) {
            cutlass::arch::fence_view_async_shared();
            shared_.delta_barriers.full[step].arrive();
            if (sees) {  // after the fence, which would wait for these stores
              store(before, first_row, begin_in_memory, query(part - 1));
              store(delta, first_row, begin_in_memory, query(part));
            }
          }
          before = delta;
        } else {
          if (sees) store(delta, first_row, begin_in_memory, query(part));
          if (part % kStepParts == kStepParts - 1) announce();
        }
        slot_phase ^= slot;
      }
      pair = loaded_pair_;
    }
    if (!kHasTerms || args_.delta_progress == nullptr) return;
    __syncwarp();
    if (lane_ == 0) {
      __threadfence();
      atomicAdd(args_.delta_progress, (pair - first) / Scheduler::step());
    }
  }
  // Tells the warp for statistics that a step's delta is in memory.
  CUTLASS_DEVICE void announce() {
    shared_.delta_barriers.empty[ring_.index].wait(ring_.phase ^ 1);
    shared_.delta_barriers.full[ring_.index].arrive();
    ring_.advance();
  }
  // Loads the next part, of this pair or of the next one that sees a key.
  CUTLASS_DEVICE void load_next(int slot) {
    if (next_part_ == num_parts_) {
      loaded_pair_ = next_seen(loaded_pair_ + Scheduler::step()), next_part_ = 0;
      loaded_ = locate(loaded_pair_);
    }
    if (exists(loaded_pair_)) load(loaded_, next_part_++, slot);
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
    CUTLASS_PRAGMA_NO_UNROLL
    for (int n = at.row & ~1; n <= (at.row | 1) && n < args_.N; ++n) {
      if (!args_.mask.sees_nothing(args_.row_index(at.batch, n))) return false;
    }
    return true;
  }

  // A part has 16 queries. Of a step's four, a warp has neighbouring ones.
  CUTLASS_DEVICE int first_query(int part) const {
    return part / kStepParts * Config::kColumns + (warp_ * kStepParts + part % kStepParts) * Tile::kRows;
  }
  CUTLASS_DEVICE int query(int part) const { return first_query(part) + lane_ / 2; }
  CUTLASS_DEVICE void load(const Coordinates& at, int part, int slot) const {
    if (!cute::elect_one_sync()) return;
    const int query = first_query(part);
    FullBarrier& loaded = shared_.delta_barriers.loaded[warp_][slot];
    loaded.arrive_and_expect_tx(2 * Tile::kBytes);
    load_tile<Tile>(maps_.delta_o, loaded, shared_.delta.o[warp_][slot], 0, query, at.head, at.row, at.batch);
    load_tile<Tile>(maps_.delta_do, loaded, shared_.delta.do_[warp_][slot], 0, query, at.head, at.row, at.batch);
  }
  CUTLASS_DEVICE void store(float delta, int64_t first_row, uint32_t begin_in_memory, int query) const {
    if (query >= args_.Lq || lane_ % 2 != 0) return;
    if constexpr (!kHasTerms) {
      args_.negative_delta[begin_in_memory + uint32_t(query)] = -delta;
    } else if (args_.delta_progress != nullptr) {
      args_.negative_delta[first_row + query] = -delta;
    }
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
  const int warp_, lane_, num_parts_;
  // Of the last load: the pair, where it is, and its part after that one.
  int loaded_pair_, next_part_;
  Coordinates loaded_;
  Ring ring_;
};

}  // namespace ds4s::sm90
