// A group of rows n in the fused kernel (kernel_dq_dkdv.h with kFusesDq), as dq_accumulator_plan.h passes it on.
#pragma once

#include "params.h"

namespace ds4s {

constexpr int kMaxAccumulatorGroups = 5;

// A group of rows n. Its pairs (b n, h) use the accumulators with indices below `count` (dq_accumulator_pool.h).
struct DqAccumulatorGroup {
  uint32_t first_row;
  uint32_t first_pair;  // first_row H
  uint32_t count;
  uint32_t first;  // index of the first pair's accumulator; each next pair has the index below, modulo count
  uint32_t in_dk;  // so many accumulators lie in dk of this group's rows; the rest of those in its rows lie in dv
};

}  // namespace ds4s
