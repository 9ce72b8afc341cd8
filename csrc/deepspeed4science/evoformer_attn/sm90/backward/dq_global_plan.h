// The plan of dq by additions (dq_global.h): whether it is used, the number of accumulators, and their memory.
#pragma once

#include <algorithm>

#include "common/workspace.h"
#include "sm90/backward/tile_sizes.h"

namespace ds4s::sm90 {

struct DqGlobalPlan {
  int64_t num_accumulators = 0;  // 0: dq has a kernel of its own
  int64_t accumulator_size = 0;  // elements
  int64_t num_counters = 0;      // for each (b, n, h) two, and two more (BackwardArgs)
  // True: the same kernel adds to dbias2, and accumulators have memory of their own. False: dbias2 is written
  // afterwards, and accumulators lie in its memory.
  bool adds_dbias2 = false;

  explicit operator bool() const { return num_accumulators > 0; }

  // blocks: the number of blocks of the grid. Where rows n are paired, the last one may be alone.
  template <typename Tiles, int kHeadDim>
  static DqGlobalPlan of(const BwdParams& p, int64_t blocks) {
    const int64_t key_blocks = ceil_div(p.Lk, Tiles::kTiles * kOwned);
    if (blocks == 0) return {};
    if (key_blocks > kTileQueueSize * blocks) return {};
    DqGlobalPlan plan;
    plan.accumulator_size = ceil_div(p.Lq, Tiles::kColumns) * Tiles::kColumns * (ceil_div(kHeadDim, 64) * 64);
    constexpr int kRows = Tiles::kPairsRows ? 2 : 1;
    const int64_t pairs = p.B * ceil_div(p.N, kRows) * kRows * p.H, elements = p.B * p.H * p.Lq * p.Lk;
    const int64_t most = ceil_div(3 * blocks, key_blocks) + 4;
    plan.num_counters = 2 * pairs + 2;
    if ((Tiles::kAddsDbias2 && p.Lk % 4 == 0) || Tiles::kPairsRows) {  // rows of dbias2 on 16 bytes
      // Accumulators, lse and delta are freed before the 16-bit copy of dbias2 is made. Up to the size of that copy,
      // they do not raise peak memory.
      const int64_t available = elements * 2 - 8 * pairs * p.Lq - 4 * plan.num_counters;
      // 1.25 times as many accumulators as there are (b, n, h) under way at a time, because some blocks are still at an
      // earlier (b, n, h), or write its dq.
      plan.adds_dbias2 = plan.take(ceil_div(5 * blocks, 4 * key_blocks) + 1, most, available / 4, pairs);
      if (plan.adds_dbias2) return plan;
      if (Tiles::kPairsRows) return {};  // dbias2 is in use: accumulators cannot lie in its memory
    }
    return plan.take(ceil_div(3 * blocks, 2 * key_blocks) + 4, most, elements, pairs) ? plan : DqGlobalPlan{};
  }

 private:
  // Sets num_accumulators to as many as fit into `elements`, at most `most`. Returns false if that is less than
  // `least`.
  bool take(int64_t least, int64_t most, int64_t elements, int64_t pairs) {
    num_accumulators = std::min({most, elements / accumulator_size, pairs});
    return num_accumulators >= std::min(least, pairs);
  }
};

}  // namespace ds4s::sm90
