// The plan of a forward: its number of blocks, their order, and the offsets in the workspace. A plan is a value,
// computed from the call and the unit. This header includes no CUDA, so that a host test can compare plans.
#pragma once

#include "common/bias_rows.h"
#include "common/key_mask_layout.h"
#include "common/plan_print.h"

namespace ds4s {

// The properties of a unit's kernel that a plan reads.
struct ForwardUnit {
  int element_bytes;
  int queries, keys;  // of a tile
  bool has_bias1, has_bias2;
  bool reads_tiles;  // bias2 may lie in tiles of 32 x 32
};

struct Sm80ForwardPlan {
  int64_t blocks = 0;
  // The blocks of 2^group_log2 neighbouring rows n run side by side and read the same tile of bias2 from L2: 1.58
  // instead of 1.74 ms at (1,768,768,4,32) on an H200.
  int32_t group_log2 = 0;

  bool bias2_in_tiles = false;  // the copy of bias2; else its rows are aligned to 16 bytes

  // Offsets in the workspace: the result of find_visible_keys, bias1 with contiguous rows, the copy of bias2.
  int64_t key_mask = kNotReserved, bias1 = kNotReserved, bias2 = kNotReserved;
  int64_t workspace_bytes = 0;

  void print(PlanText& text, const ForwardUnit& unit) const {
    text.add("tile", unit.queries, unit.keys);
    text.add("rows_side_by_side", int64_t(1) << group_log2);
    text.add_offset("key_mask", key_mask), text.add_offset("bias1", bias1), text.add_offset("bias2", bias2);
    if (bias2_in_tiles) text.add("bias2_copy", "tiles");
    text.add("workspace_bytes", workspace_bytes);
  }
};

inline BiasRows bias2_rows(const FwdParams& p, const ForwardUnit& unit) {
  return {p.bias2,
          {p.B, p.H, p.Lq, p.Lk},
          {p.bias2_stride[0], p.bias2_stride[1], p.bias2_stride[2], p.bias2_stride[3]},
          unit.element_bytes};
}

// Whether a copy of bias2 in tiles pays: the forward takes 0.94 of the time, and a launch of 2 us more. It is at most a
// fiftieth of Q, K, V and O, so that a call takes hardly more memory.
inline bool tiles_pay(const FwdParams& p, const BiasRows& bias2) {
  constexpr int64_t kLeastScores = 1 << 25;  // 30 us on an H200
  const int64_t rows = p.B * p.N * p.H;
  return rows * p.Lq * p.Lk >= kLeastScores && 50 * bias2.elements_of_tiles() <= rows * (p.Lq + p.Lk) * (p.D + p.Dv);
}

inline Sm80ForwardPlan make_plan(const FwdParams& p, const ForwardUnit& unit) {
  Sm80ForwardPlan plan;
  plan.group_log2 = unit.has_bias2 && p.B * p.N >= 64 ? 4 : 0;
  const int64_t group = int64_t(1) << plan.group_log2;
  plan.blocks = ceil_div(p.Lq, unit.queries) * p.H * ceil_div(p.B * p.N, group) * group;

  const KeyMaskLayout key_mask(p);
  // The kernel reads bias1 element by element, so its rows need stride 1 but no alignment.
  const bool copies_bias1 = unit.has_bias1 && p.bias1_stride[2] != 1 && p.Lk != 1;
  const BiasRows bias2 = bias2_rows(p, unit);
  WorkspaceLayout layout;
  plan.key_mask = layout.reserve(key_mask.needed(), key_mask.bytes());
  plan.bias1 = layout.reserve(copies_bias1, p.B * p.N * p.Lk * unit.element_bytes);
  const bool copies_bias2 = unit.has_bias2 && !bias2.aligned();
  plan.bias2_in_tiles =
      unit.has_bias2 && unit.reads_tiles && bias2.fits_in_tiles() && (copies_bias2 || tiles_pay(p, bias2));
  const int64_t elements = plan.bias2_in_tiles ? bias2.elements_of_tiles() : bias2.num_elements();
  plan.bias2 = layout.reserve(copies_bias2 || plan.bias2_in_tiles, elements * unit.element_bytes);
  plan.workspace_bytes = layout.bytes();
  return plan;
}

}  // namespace ds4s
