// How many fp32 accumulators of dq the one pass for all gradients has, and where they lie (dq_accumulator.h).
#pragma once

#include <algorithm>

#include "common/workspace.h"
#include "params.h"
#include "sm80/backward/tile_sizes.h"

namespace ds4s {

struct DqAccumulatorPlan {
  int64_t accumulator_bytes = 0;  // of one (b, n, h)
  int64_t num_own = 0;            // in the workspace
  int64_t num_in_dk = 0;          // in dk of the last rows n
  int64_t num_in_dv = 0;
  int64_t first_host_row = 0;  // the first of B N whose dk and dv hold accumulators; B N: none do

  int64_t count() const { return num_own + num_in_dk + num_in_dv; }

  // key_blocks: of a (b, n, h); resident_blocks: under way at a time; more: accumulators beyond those.
  static DqAccumulatorPlan of(const BwdParams& p, int element_bytes, int64_t accumulator_bytes, int64_t key_blocks,
                              int64_t resident_blocks, int64_t more) {
    DqAccumulatorPlan plan;
    plan.accumulator_bytes = accumulator_bytes;
    const int64_t pairs = p.B * p.N * p.H;
    plan.first_host_row = p.B * p.N;
    const int64_t least = std::min(ceil_div(resident_blocks, key_blocks) + more, pairs);
    // Where half of the keys are hidden twice as many (b, n, h) are under way.
    const bool has_mask = p.bias1 != nullptr || p.row_mask != nullptr;
    const int64_t visible_blocks = has_mask ? ceil_div(key_blocks, 2) : key_blocks;
    const int64_t wanted = std::min(ceil_div(resident_blocks, visible_blocks) + more, pairs);
    // What takes no more than delta of the three passes and a counter for each (b, n, h).
    const int64_t fitting = (pairs * p.Lq - pairs - 1) * 4 / accumulator_bytes;
    plan.num_own = std::min(wanted, std::max(least, fitting));
    if (fitting < least) plan.host_in_dkdv(p, element_bytes, least, wanted, fitting);
    return plan;
  }

 private:
  // Some of them in the last rows n of dk and dv, kSideBySide rows or as many times that as `least` takes: where those
  // rows, which wait and have the workspace's accumulators only, are few and have enough. Else all stay there.
  void host_in_dkdv(const BwdParams& p, int element_bytes, int64_t least, int64_t wanted, int64_t fitting) {
    if (fitting < kSideBySide || !is_dense(p, p.dk_stride, p.D) || !is_dense(p, p.dv_stride, p.Dv)) return;
    const int64_t rows = p.B * p.N;
    for (int64_t first = (rows - 1) / kSideBySide * kSideBySide; first > 0 && 8 * (rows - first) <= rows;
         first -= kSideBySide) {
      const int64_t in_dk = (rows - first) * p.dk_stride[1] * element_bytes / accumulator_bytes;
      const int64_t in_dv = (rows - first) * p.dv_stride[1] * element_bytes / accumulator_bytes;
      const int64_t all = std::min(wanted, fitting + in_dk + in_dv);
      if (all < least) continue;
      if (first * p.H < all || 5 * fitting < 2 * all) return;
      num_own = fitting, num_in_dk = std::min(in_dk, all - fitting), num_in_dv = all - fitting - num_in_dk;
      first_host_row = first;
      return;
    }
  }
  // One row n after the other, with nothing between.
  static bool is_dense(const BwdParams& p, const int64_t (&s)[4], int64_t channels) {
    const bool within = s[1] == p.Lk * p.H * channels && (p.Lk - 1) * s[2] + (p.H - 1) * s[3] + channels == s[1];
    return within && (p.B == 1 || s[0] == p.N * s[1]);
  }
};

}  // namespace ds4s
