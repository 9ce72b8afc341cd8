// A group of rows n in the one pass for all gradients: what a kernel is told of dq_accumulator_plan.h.
#pragma once

#include "params.h"

namespace ds4s {

constexpr int kMaxAccumulatorGroups = 5;

// A group of rows n; its (b, n, h) use the accumulators below `count` (dq_accumulator_pool.h).
struct DqAccumulatorGroup {
  uint32_t first_row;
  uint32_t first_pair;  // first_row H
  uint32_t count;
  uint32_t first;  // the first pair's accumulator; from there they go down, and round
  uint32_t in_dk;  // of the accumulators in this group's own rows; the others are in dv
};

}  // namespace ds4s
