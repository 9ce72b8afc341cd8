// Whether dq comes by additions (dq_global.h), to how many accumulators, and where these are.
#pragma once

#include <algorithm>

#include "common/workspace.h"
#include "sm90/backward/tile_sizes.h"

namespace ds4s::sm90 {

struct DqGlobalPlan {
  int64_t num_accumulators = 0;  // 0: dq has a kernel of its own
  int64_t accumulator_size = 0;  // elements
  int64_t num_counters = 0;      // for each (b, n, h) two, and two more (BackwardArgs)
  // dbias2 is added to by the same kernel, and accumulators have memory of their own. Else it is written afterwards,
  // and they lie in it.
  bool adds_dbias2 = false;

  explicit operator bool() const { return num_accumulators > 0; }

  // For a grid of so many blocks.
  template <typename Tiles, int kHeadDim>
  static DqGlobalPlan of(const BwdParams& p, int64_t blocks) {
    const int64_t key_blocks = ceil_div(p.Lk, Tiles::kTiles * kOwned);
    if (key_blocks > kTileQueueSize * blocks) return {};
    DqGlobalPlan plan;
    plan.accumulator_size = ceil_div(p.Lq, Tiles::kColumns) * Tiles::kColumns * (ceil_div(kHeadDim, 64) * 64);
    const int64_t pairs = p.B * p.N * p.H, elements = p.B * p.H * p.Lq * p.Lk;
    const int64_t most = ceil_div(3 * blocks, key_blocks) + 4;
    plan.num_counters = 2 * pairs + 2;
    if (Tiles::kAddsDbias2 && p.Lk % 4 == 0) {  // rows of dbias2 on 16 bytes
      // Accumulators, lse and delta are gone when dbias2 gets its 16-bit copy: of that size they do not raise peak
      // memory.
      const int64_t room = elements * 2 - 8 * pairs * p.Lq - 4 * plan.num_counters;
      // Some blocks are at an earlier (b, n, h), or still write its dq: 1.25 times as many as are under way.
      plan.adds_dbias2 = plan.take(ceil_div(5 * blocks, 4 * key_blocks) + 1, most, room / 4, pairs);
      if (plan.adds_dbias2) return plan;
    }
    return plan.take(ceil_div(3 * blocks, 2 * key_blocks) + 4, most, elements, pairs) ? plan : DqGlobalPlan{};
  }

 private:
  // As many as fit into so many elements, `most` at most; false if that is less than `least`.
  bool take(int64_t least, int64_t most, int64_t elements, int64_t pairs) {
    num_accumulators = std::min({most, elements / accumulator_size, pairs});
    return num_accumulators >= std::min(least, pairs);
  }
};

}  // namespace ds4s::sm90
