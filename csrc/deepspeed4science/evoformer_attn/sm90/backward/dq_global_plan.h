// The plan of dq by additions (dq_global.h): whether it is used, the number of accumulators, and their memory.
#pragma once

#include <algorithm>

#include "common/workspace.h"
#include "sm90/backward/dq_range_args.h"
#include "sm90/backward/tile_sizes.h"

namespace ds4s::sm90 {

struct DqGlobalPlan {
  int64_t num_accumulators = 0;                        // 0: dq has a kernel of its own
  int64_t accumulator_size = 0;                        // words of 4 bytes
  int64_t num_counted_sections = 0, num_counters = 0;  // words: for each section two, and seven more (BackwardArgs)
  int64_t key_blocks = 0, range_bytes = 0;             // of dq_range.h
  // An accumulator holds a section of a (b, n, h): so many steps of queries, all or, of pairs of rows n, a few.
  int64_t section_steps = 0, num_sections = 1;
  // True: the same kernel adds to dbias2, and accumulators have memory of their own. False: dbias2 is written
  // afterwards, and accumulators lie in its memory.
  bool adds_dbias2 = false;

  explicit operator bool() const { return num_accumulators > 0; }

  // blocks: the number of blocks of the grid. Where rows n are paired, the last one may be alone.
  template <typename Tiles, int kHeadDim>
  static DqGlobalPlan of(const BwdParams& p, int64_t blocks, bool half_sums) {
    const int64_t key_blocks = ceil_div(p.Lk, Tiles::kTiles * kOwned);
    if (blocks == 0) return {};
    if (key_blocks > kTileQueueSize * blocks) return {};
    constexpr bool kPairs = Tiles::kPairsRows;
    constexpr int kRows = kPairs ? 2 : 1;
    const int64_t pairs = p.B * ceil_div(p.N, kRows) * kRows * p.H, elements = p.B * p.H * p.Lq * p.Lk;
    const int64_t steps = ceil_div(p.Lq, Tiles::kColumns);
    auto in_sections = [&](int64_t section_steps) {
      DqGlobalPlan plan;
      plan.section_steps = section_steps, plan.num_sections = ceil_div(steps, section_steps);
      plan.accumulator_size = section_steps * Tiles::kColumns * (ceil_div(kHeadDim, 64) * 64) / (half_sums ? 2 : 1);
      plan.num_counted_sections = pairs * plan.num_sections;
      plan.num_counters = 2 * plan.num_counted_sections + 7;
      plan.key_blocks = key_blocks;
      plan.range_bytes = half_sums ? DqRangeArgs::of(p, kHeadDim, key_blocks).bytes() : 0;
      // Accumulators, lse and delta are freed before the 16-bit copy of dbias2 is made. Up to the size of that copy,
      // they do not raise peak memory. With sections, delta is in dq.
      const int64_t available =
          elements * 2 - (plan.num_sections > 1 ? 4 : 8) * pairs * p.Lq - 4 * plan.num_counters - plan.range_bytes;
      // 1.25 times as many accumulators as there are (b, n, h) under way at a time, because some blocks are still at an
      // earlier (b, n, h), or write its dq. Of sections 2.5 times: one is added to, the one before it written.
      const int64_t under_way =
          plan.num_sections == 1 ? ceil_div(5 * blocks, 4 * key_blocks) + 1 : ceil_div(5 * blocks, 2 * key_blocks) + 1;
      const int64_t most = plan.num_sections * (ceil_div(3 * blocks, key_blocks) + 4);
      plan.adds_dbias2 = plan.take(under_way, most, available / 4, pairs * plan.num_sections);
      return plan;
    };
    DqGlobalPlan plan = in_sections(steps);
    if constexpr (kPairs) {
      if (p.dq_stride[2] >= int64_t(1) << 31) return {};  // DeltaInDq's stride is an int
      if (plan.adds_dbias2) return plan;
      plan = in_sections(kSectionSteps);
      // dbias2 is in use: accumulators cannot lie in its memory. A (b, n, h) begins in one wave of clusters and ends in
      // the same or the next one (docs/kernels/dq-accumulators.md, H5).
      return plan.adds_dbias2 && 2 * key_blocks <= blocks ? plan : DqGlobalPlan{};
    }
    if (Tiles::kAddsDbias2 && p.Lk % 4 == 0 && plan.adds_dbias2) return plan;  // rows of dbias2 on 16 bytes
    plan.adds_dbias2 = false;
    const int64_t most = ceil_div(3 * blocks, key_blocks) + 4;
    return plan.take(ceil_div(3 * blocks, 2 * key_blocks) + 4, most, elements, pairs) ? plan : DqGlobalPlan{};
  }

 private:
  // Sets num_accumulators to as many as fit into `elements`, at most `most`. Returns false if that is less than
  // `least`.
  bool take(int64_t least, int64_t most, int64_t elements, int64_t sections) {
    num_accumulators = std::min({most, elements / accumulator_size, sections});
    return num_accumulators >= std::min(least, sections);
  }
};

}  // namespace ds4s::sm90
