// Host side of common/key_mask.h: its result in a workspace (common/key_mask_layout.h), and its launch.
#pragma once

#include <cuda_runtime.h>

#include "common/key_mask.h"
#include "common/key_mask_layout.h"
#include "common/launch.h"

namespace ds4s {

// Made from FwdParams or BwdParams.
template <typename Params>
class KeyMaskBuffers {
 public:
  explicit KeyMaskBuffers(const Params& p) : p_(p), layout_(p) {}

  bool needed() const { return layout_.needed(); }
  int64_t bytes() const { return layout_.bytes(); }

  // workspace: bytes() bytes, aligned to 256.
  KeyMask at(void* workspace) const {
    if (!needed()) return {};
    return {ds4s::at<float>(workspace, layout_.shift()), ds4s::at<uint32_t>(workspace, layout_.visible()),
            ds4s::at<int2>(workspace, layout_.range()), layout_.words()};
  }

  // 0 when the kernels that follow find_visible_keys begin.
  int32_t* counter(void* workspace) const {
    return needed() ? ds4s::at<int32_t>(workspace, layout_.counter()) : nullptr;
  }

  // For each row n the only key that it sees; null where it is not needed.
  int32_t* only_key(void* workspace) const { return ds4s::at<int32_t>(workspace, layout_.only_key()); }

  // copy: receives a contiguous copy of bias1, or null.
  KeyMaskArgs arguments(void* workspace, void* copy, PostprocessFlag flag = {}) const {
    KeyMask mask = at(workspace);
    return {p_.bias1,
            {p_.bias1_stride[0], p_.bias1_stride[1], p_.bias1_stride[2]},
            p_.row_mask,
            {p_.row_mask_stride[0], p_.row_mask_stride[1]},
            uint32_t(p_.N),
            p_.Lk,
            const_cast<float*>(mask.shift),
            const_cast<uint32_t*>(mask.visible),
            const_cast<int2*>(mask.range),
            layout_.words(),
            p_.bias1 != nullptr ? copy : nullptr,
            counter(workspace),
            only_key(workspace),
            flag};
  }
  int64_t num_blocks() const { return layout_.rows(); }
  template <typename scalar_t>
  cudaError_t fill(void* workspace, void* copy, cudaStream_t stream, PostprocessFlag flag = {}) const {
    if (!needed() || num_blocks() == 0) return cudaSuccess;
    if (workspace == nullptr) return cudaErrorInvalidValue;
    return launch_overlapping(find_visible_keys<scalar_t>, num_blocks(), kKeyMaskThreads, /*shared=*/0, stream,
                              arguments(workspace, copy, flag));
  }

 private:
  const Params& p_;
  KeyMaskLayout layout_;
};

}  // namespace ds4s
