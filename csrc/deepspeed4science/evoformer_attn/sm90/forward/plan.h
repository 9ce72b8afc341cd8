// The plan of a forward on Hopper, its kernel and workspace: a value that follows from the call, the device and the
// tier of D. No CUDA here: a host test plans for any device.
#pragma once

#include "common/device_facts.h"
#include "common/plan_print.h"
#include "common/workspace.h"
#include "sm90/bias2_view.h"
#include "sm90/forward/tile_sizes.h"

namespace ds4s::sm90 {

// By the names of ForwardChoice.
enum class ForwardKernel : int { kManyRows, kOneRow, kFewTiles };
constexpr const char* kForwardKernelNames[] = {"many_rows", "one_row", "few_tiles"};

struct ForwardFacts : DeviceFacts {
  int64_t one_row_blocks = 0;  // of ForwardChoice::OneRow, that the device holds; asked for where N is 1
};

struct ForwardPlan {
  ForwardKernel kernel = ForwardKernel::kManyRows;
  bool copies_bias2 = false;
  int64_t workspace_bytes = 0;  // of the copy; it depends on no device

  void print(PlanText& text) const {
    text.add("kernel", kForwardKernelNames[int(kernel)]);
    if (copies_bias2) text.add("bias2", "copied");
    text.add("workspace_bytes", workspace_bytes);
  }
};

template <typename Tiles>
int64_t num_forward_tiles(const FwdParams& p) {
  return ceil_div(p.Lq, 64 * Tiles::kQueryTiles) * ceil_div(p.N, Tiles::kRows) * p.H * p.B;
}

// A single row n has no other to share bias2 with. Tiles of 64 queries are chosen where larger ones leave
// multiprocessors idle.
template <int kHeadDim>
ForwardPlan make_plan(const FwdParams& p, const ForwardFacts& device) {
  const Bias2View bias2(p);
  ForwardPlan plan;
  if (p.N == 1) {
    const bool few = num_forward_tiles<typename ForwardChoice<kHeadDim>::OneRow>(p) < device.one_row_blocks;
    plan.kernel = few ? ForwardKernel::kFewTiles : ForwardKernel::kOneRow;
  }
  plan.copies_bias2 = bias2.copied;
  plan.workspace_bytes = bias2.workspace_bytes();
  return plan;
}

}  // namespace ds4s::sm90
