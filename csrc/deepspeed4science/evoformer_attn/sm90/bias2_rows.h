// Host side: bias2 as the tensor memory accelerator reads it.
#pragma once

#include "common/repack.h"
#include "params.h"
#include "sm90/mma/tensor_map.h"

namespace ds4s::sm90 {

// bias2 itself, or a copy with padded rows (odd lengths, transposed or expanded rows).
template <typename Element>
struct Bias2Rows {
  TensorView<5> view;  // Lk, Lq, H, 1, B; heads or batches over which bias2 is the same have size 1
  bool copied;

  template <typename Params>
  explicit Bias2Rows(const Params& p)
      : view{p.bias2,
             {p.Lk, p.Lq, p.bias2_stride[1] == 0 ? 1 : p.H, 1, p.bias2_stride[0] == 0 ? 1 : p.B},
             {p.bias2_stride[3], p.bias2_stride[2], p.bias2_stride[1], 0, p.bias2_stride[0]}},
        copied(p.bias2 != nullptr && !has_tensor_map(view)) {}

  int64_t pitch() const { return (view.size[0] + 7) / 8 * 8; }
  int64_t num_rows() const { return view.size[1] * view.size[2] * view.size[4]; }
  int64_t workspace_bytes() const { return copied ? num_rows() * pitch() * int64_t(sizeof(Element)) : 0; }

  cudaError_t prepare(void* workspace, cudaStream_t stream) {
    if (!copied) return cudaSuccess;
    if (workspace == nullptr) return cudaErrorInvalidValue;
    RepackParams p{view.ptr,
                   workspace,
                   {view.stride[4], view.stride[2], view.stride[1], view.stride[0]},
                   view.size[2],
                   view.size[1],
                   view.size[0],
                   pitch(),
                   num_rows() * pitch() / 8};
    int64_t blocks = (p.num_vectors + 255) / 256;
    repack_rows<Element><<<unsigned(blocks < 65536 ? blocks : 65536), 256, 0, stream>>>(p);
    view.ptr = workspace;
    view.stride[0] = 1, view.stride[1] = pitch();
    view.stride[2] = view.stride[1] * view.size[1], view.stride[4] = view.stride[2] * view.size[2];
    return cudaGetLastError();
  }
};

}  // namespace ds4s::sm90
