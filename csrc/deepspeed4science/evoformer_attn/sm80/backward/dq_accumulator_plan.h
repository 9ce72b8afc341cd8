// The number of float32 accumulators of dq in the fused kernel, and their memory (dq_accumulator.h).
#pragma once

#include <algorithm>

#include "common/workspace.h"
#include "params.h"
#include "sm80/backward/dq_accumulator_group.h"
#include "sm80/backward/tile_sizes.h"

namespace ds4s {

struct DqAccumulatorPlan {
  int64_t accumulator_bytes = 0;  // of one (b, n, h)
  int64_t num_own = 0;            // in the workspace
  // groups[0]: the rows n whose dk and dv hold no accumulators; the groups after it hold some (hosts).
  int num_groups = 1;
  DqAccumulatorGroup groups[kMaxAccumulatorGroups]{};

  int64_t count() const { return groups[0].count; }
  int64_t first_host_row(int64_t rows) const { return num_groups > 1 ? groups[1].first_row : rows; }

  // key_blocks: blocks of a (b, n, h); resident_blocks: blocks under way at a time; side_by_side: rows n whose blocks
  // are neighbours; spare: accumulators besides one for each (b, n, h) under way.
  static DqAccumulatorPlan of(const BwdParams& p, int element_bytes, int64_t accumulator_bytes, int64_t key_blocks,
                              int64_t resident_blocks, int64_t side_by_side, int64_t spare) {
    DqAccumulatorPlan plan;
    plan.accumulator_bytes = accumulator_bytes;
    const int64_t pairs = p.B * p.N * p.H;
    const int64_t least = std::min(ceil_div(resident_blocks, key_blocks) + spare, pairs);
    // Where half of the keys are hidden, twice as many (b, n, h) are under way.
    const bool has_mask = p.bias1 != nullptr || p.row_mask != nullptr;
    const int64_t visible_blocks = has_mask ? ceil_div(key_blocks, 2) : key_blocks;
    const int64_t wanted = std::min(ceil_div(resident_blocks, visible_blocks) + spare, pairs);
    // As many as fit into the workspace of the separate kernels: delta, less a counter for each (b, n, h).
    const int64_t fitting = (pairs * p.Lq - pairs - 1) * 4 / accumulator_bytes;
    plan.set_own(std::min(wanted, std::max(least, fitting)));
    if (fitting < least) {
      const bool are_enough = fitting >= side_by_side * p.H;  // for the (b, n, h) of a group of rows n
      plan.host_in_dkdv(p, element_bytes, side_by_side, /*own=*/are_enough ? fitting : least, least, wanted);
    }
    plan.order(pairs);
    return plan;
  }

 private:
  void set_own(int64_t count) { num_own = count, groups[0].count = uint32_t(count); }

  // Leaves `own` accumulators in the workspace and puts others into dk and dv of the last rows n, up to `wanted`, if
  // these rows are few. If that gives fewer than `least`, all stay in the workspace.
  void host_in_dkdv(const BwdParams& p, int element_bytes, int64_t side_by_side, int64_t own, int64_t least,
                    int64_t wanted) {
    if (!is_dense(p, p.dk_stride, p.D) || !is_dense(p, p.dv_stride, p.Dv)) return;
    const int64_t rows = p.B * p.N;
    DqAccumulatorPlan plan = *this;
    plan.set_own(own);
    for (int64_t end = rows; plan.num_groups < kMaxAccumulatorGroups && plan.count() < wanted;) {
      const int64_t first = (end - 1) / side_by_side * side_by_side, missing = wanted - plan.count();
      if (8 * (rows - first) > rows || first * p.H < plan.count()) break;
      auto holds = [&](int64_t row_stride) { return (end - first) * row_stride * element_bytes / accumulator_bytes; };
      const int64_t in_dk = std::min(missing, holds(p.dk_stride[1]));
      plan.add_host(first, first * p.H, in_dk, std::min(missing - in_dk, holds(p.dv_stride[1])));
      end = first;
    }
    if (plan.count() >= least) *this = plan;
  }
  // Inserts a group before the other groups with accumulators.
  void add_host(int64_t first_row, int64_t first_pair, int64_t in_dk, int64_t in_dv) {
    for (int group = num_groups++; group > 1; --group) groups[group] = groups[group - 1];
    groups[1] = {uint32_t(first_row), uint32_t(first_pair), groups[0].count, /*first=*/0, uint32_t(in_dk)};
    groups[0].count += uint32_t(in_dk + in_dv);
  }
  // The order in which a group's pairs use the accumulators. Each group begins with those in the next group, which no
  // later group may use, and groups[0] ends with the workspace's. So the previous pair with the same accumulator always
  // began long before.
  void order(int64_t pairs) {
    for (int group = 1; group < num_groups; ++group) groups[group].first = groups[group].count - 1;
    const int64_t end = num_groups > 1 ? groups[1].first_pair : pairs;
    if (end > 0) groups[0].first = uint32_t((end - 1) % groups[0].count);
  }
  // Whether rows n follow one another in memory without gaps.
  static bool is_dense(const BwdParams& p, const int64_t (&s)[4], int64_t channels) {
    const bool within = s[1] == p.Lk * p.H * channels && (p.Lk - 1) * s[2] + (p.H - 1) * s[3] + channels == s[1];
    return within && (p.B == 1 || s[0] == p.N * s[1]);
  }
};

}  // namespace ds4s
