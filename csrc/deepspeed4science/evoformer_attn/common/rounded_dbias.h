// Host side: bias gradients in the type of q. Their float32 sums lie in the workspace, before the pieces of the
// backward's plan, and the backward's last kernel (common/postprocess.h) rounds them. The caller therefore allocates no
// sums and launches no kernel that rounds.
#pragma once

#include <cuda_runtime.h>

#include "common/plan_print.h"
#include "common/workspace.h"

namespace ds4s {

// Backward: the host side of a backward, which writes bias gradients in float32.
template <typename Backward>
struct RoundedDbias {
  static int64_t workspace_bytes(const BwdParams& p) {
    const Sums sums(p);
    const int64_t others = Backward::workspace_bytes(sums.added_to(p, kAnywhere));
    return others < 0 ? others : sums.bytes + others;
  }
  static int run(const BwdParams& p, cudaStream_t stream) {
    const Sums sums(p);
    if (sums.bytes == 0) return Backward::run(p, stream);
    const bool fits = (!p.rounded_dbias1 || p.bias1) && (!p.rounded_dbias2 || p.bias2) && p.workspace != nullptr;
    return fits ? int(Backward::run(sums.added_to(p, p.workspace), stream)) : int(cudaErrorInvalidValue);
  }
  static void print_plan(const BwdParams& p, PlanText& text) {
    Backward::print_plan(Sums(p).added_to(p, kAnywhere), text);
  }

 private:
  static inline void* const kAnywhere = reinterpret_cast<void*>(256);  // for plans, which read only null and alignment

  struct Sums {
    explicit Sums(const BwdParams& p) {
      WorkspaceLayout layout;
      dbias1 = layout.reserve(p.rounded_dbias1 != nullptr, p.B * p.N * p.Lk * 4);
      const bool rounds = p.rounded_dbias2 != nullptr && Backward::rounds_dbias2(p);
      dbias2 = layout.reserve(p.rounded_dbias2 != nullptr && !rounds, p.B * p.H * p.Lq * p.Lk * 4);
      bytes = layout.bytes();
    }
    BwdParams added_to(BwdParams p, void* workspace) const {
      if (dbias1 >= 0) p.dbias1 = at<float>(workspace, dbias1);
      if (dbias2 >= 0) p.dbias2 = at<float>(workspace, dbias2);
      if (bytes > 0) p.workspace = at<void>(workspace, bytes);
      return p;
    }
    int64_t dbias1, dbias2, bytes;
  };
};

}  // namespace ds4s
