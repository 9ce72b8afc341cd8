// Host side: whether dq comes by additions (dq_global.h), to how many accumulators, and where these are.
#pragma once

#include <algorithm>

#include "params.h"

namespace ds4s::sm90 {

struct DqGlobalPlan {
  int64_t num_accumulators = 0;  // 0: two passes
  int64_t accumulator_size = 0;  // elements
  int64_t num_counters = 0;      // for each (b, n, h) two, and two more (BackwardArgs)
  // dbias2 is added to in the same pass, and accumulators have a place of their own. Else it is written afterwards, and
  // lends them.
  bool adds_dbias2 = false;

  explicit operator bool() const { return num_accumulators > 0; }

  // For a grid of so many blocks.
  template <typename Pass>
  static DqGlobalPlan of(const BwdParams& p, int64_t blocks) {
    auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
    int64_t key_blocks = ceil_div(p.Lk, Pass::kTiles * Pass::kOwned);
    if (key_blocks > Pass::Queue::kPlaces * blocks) return {};
    DqGlobalPlan plan;
    plan.accumulator_size = ceil_div(p.Lq, Pass::kColumns) * Pass::kColumns * int64_t(Pass::kAccumulatorColumns);
    int64_t pairs = p.B * p.N * p.H, elements = p.B * p.H * p.Lq * p.Lk, most = ceil_div(3 * blocks, key_blocks) + 4;
    plan.num_counters = 2 * pairs + 2;
    if (Pass::kAddsDbias2 && p.Lk % 4 == 0) {  // rows of dbias2 on 16 bytes
      // Slots, lse and delta are gone when dbias2 gets its 16-bit copy: of that size they do not raise peak memory.
      int64_t room = elements * int64_t(sizeof(typename Pass::Element)) - 8 * pairs * p.Lq - 4 * plan.num_counters;
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
