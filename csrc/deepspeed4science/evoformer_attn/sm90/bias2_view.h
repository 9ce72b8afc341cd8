// Sizes and strides of bias2 for TMA: for plans, and for bias2_rows.h.
#pragma once

#include "params.h"
#include "sm90/mma/tensor_view.h"

namespace ds4s::sm90 {

// bias2 itself, or a copy with padded rows (odd lengths, transposed or expanded rows).
struct Bias2View {
  TensorView<5> view;  // Lk, Lq, H, 1, B; heads or batches over which bias2 is the same have size 1
  bool copied;

  template <typename Params>
  explicit Bias2View(const Params& p)
      : view{p.bias2,
             {p.Lk, p.Lq, p.bias2_stride[1] == 0 ? 1 : p.H, 1, p.bias2_stride[0] == 0 ? 1 : p.B},
             {p.bias2_stride[3], p.bias2_stride[2], p.bias2_stride[1], 0, p.bias2_stride[0]}},
        copied(p.bias2 != nullptr && !has_tensor_map(view)) {}

  int64_t pitch() const { return (view.size[0] + 7) / 8 * 8; }
  int64_t num_rows() const { return view.size[1] * view.size[2] * view.size[4]; }
  int64_t workspace_bytes() const { return copied ? num_rows() * pitch() * 2 : 0; }

  // The tensor that kernels read: bias2 itself, or the copy.
  TensorView<5> read(const void* copy) const {
    if (!copied) return view;
    TensorView<5> x = view;
    x.ptr = copy;
    x.stride[0] = 1, x.stride[1] = pitch();
    x.stride[2] = x.stride[1] * x.size[1], x.stride[4] = x.stride[2] * x.size[2];
    return x;
  }
};

}  // namespace ds4s::sm90
