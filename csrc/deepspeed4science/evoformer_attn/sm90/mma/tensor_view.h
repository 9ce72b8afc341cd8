// Sizes and strides of a tensor for TMA: for plans, and for tensor_map.h.
#pragma once

#include <cstdint>

namespace ds4s::sm90 {

// Of 16-bit elements, innermost dimension first; strides in elements, that of the innermost is 1.
template <int kRank>
struct TensorView {
  const void* ptr;
  int64_t size[kRank];
  int64_t stride[kRank];
};

// Whether TMA can read a tensor (PTX ISA 5.5.8): base and strides aligned to 16 bytes, no repeated elements.
template <int kRank>
bool has_tensor_map(const TensorView<kRank>& t) {
  bool ok = reinterpret_cast<uintptr_t>(t.ptr) % 16 == 0 && (t.stride[0] == 1 || t.size[0] == 1);
  for (int d = 1; d < kRank; ++d) {
    ok = ok && (t.size[d] == 1 || (t.stride[d] > 0 && t.stride[d] % 8 == 0 && t.stride[d] < (int64_t(1) << 39)));
  }
  return ok;
}

// [B, N, L, H, D] by its strides over B, N, L and H.
template <typename Params>
TensorView<5> tensor_view(const Params& p, const void* ptr, const int64_t (&stride)[4], int64_t L, int64_t D) {
  return {ptr, {D, L, p.H, p.N, p.B}, {1, stride[2], stride[3], stride[1], stride[0]}};
}

}  // namespace ds4s::sm90
