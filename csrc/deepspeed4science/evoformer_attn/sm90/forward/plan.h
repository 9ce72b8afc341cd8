// The plan of a Hopper forward: its kernel, the order of its blocks, and the offsets in the workspace. A plan is a
// value, computed from the call, the device and the tier of D. This header includes no CUDA, so that a host test can
// make plans for any device.
#pragma once

#include "common/device_facts.h"
#include "common/plan_print.h"
#include "common/workspace.h"
#include "sm90/bias2_view.h"
#include "sm90/forward/tile_sizes.h"

namespace ds4s::sm90 {

// The instantiations of the forward kernel; ForwardChoice (tile_sizes.h) has their tiles.
enum class ForwardKernel : int { kManyRows, kOneRow, kFewTiles, kFewestTiles };
constexpr const char* kForwardKernelNames[] = {"many_rows", "one_row", "few_tiles", "fewest_tiles"};

struct ForwardFacts : DeviceFacts {
  int64_t one_row_blocks = 0;  // resident blocks of ForwardChoice::OneRow; queried only where N is 1
};

struct Sm90ForwardPlan {
  ForwardKernel kernel = ForwardKernel::kManyRows;
  bool copies_bias2 = false;
  int64_t groups_of_band = 1;          // of rows n; see ForwardArgs
  int64_t parts_begun = kNotReserved;  // offset in the workspace, where blocks keep step (sm90/pace.h)
  int64_t workspace_bytes = 0;

  void print(PlanText& text) const {
    text.add("kernel", kForwardKernelNames[int(kernel)]);
    if (copies_bias2) text.add("bias2", "copied");
    if (groups_of_band > 1) text.add("groups_of_band", groups_of_band);
    text.add_offset("parts_begun", parts_begun);
    text.add("workspace_bytes", workspace_bytes);
  }
};

template <typename Tiles>
int64_t num_forward_tiles(const FwdParams& p) {
  return ceil_div(p.Lq, 64 * Tiles::kQueryTiles) * ceil_div(p.N, Tiles::kRows) * p.H * p.B;
}

// The part of a plan that depends on no device. Where bias2 of a batch exceeds the L2 cache, tiles are numbered in
// bands, so that blocks that run at the same time read the same few rows of bias2; where it far exceeds the cache,
// blocks also keep step. (1,2048,2048,4,32): 17.0 ms; bands 16.0, in step 16.5. (1,4096,4096,4,32): 149; bands 149, in
// step 136.
inline void plan_workspace(Sm90ForwardPlan& plan, const FwdParams& p) {
  constexpr int64_t kMiB = 1 << 20, kGroups = 12;
  const Bias2View bias2(p);
  plan.copies_bias2 = bias2.copied;
  const int64_t bytes = p.bias2 ? 2 * bias2.view.size[0] * bias2.view.size[1] * bias2.view.size[2] : 0;
  const bool shares = p.N >= 4 * kGroups;
  if (shares && bytes > 24 * kMiB) plan.groups_of_band = kGroups;
  WorkspaceLayout layout;
  layout.reserve(bias2.copied, bias2.workspace_bytes());
  plan.parts_begun = layout.reserve(shares && bytes > 48 * kMiB, 4);
  plan.workspace_bytes = layout.bytes();
}

// With N = 1 no second row n shares bias2. Where large tiles would leave multiprocessors idle, smaller ones run, whose
// keys several warpgroups divide.
template <int kHeadDim>
Sm90ForwardPlan make_plan(const FwdParams& p, const ForwardFacts& device) {
  Sm90ForwardPlan plan;
  if (p.N == 1) {
    using Choice = ForwardChoice<kHeadDim>;
    const bool few = num_forward_tiles<typename Choice::FewTiles>(p) < Choice::kMostFewTiles * device.one_row_blocks;
    const bool fewest =
        num_forward_tiles<typename Choice::FewestTiles>(p) < Choice::kMostFewestTiles * device.one_row_blocks;
    plan.kernel = fewest ? ForwardKernel::kFewestTiles : few ? ForwardKernel::kFewTiles : ForwardKernel::kOneRow;
  }
  plan_workspace(plan, p);
  return plan;
}

}  // namespace ds4s::sm90
