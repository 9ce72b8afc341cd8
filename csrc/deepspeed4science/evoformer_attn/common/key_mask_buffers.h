// Host side of common/key_mask.h: where its result lies in a workspace, and its launch.
#pragma once

#include <cuda_runtime.h>

#include "common/key_mask.h"

namespace ds4s {

// Of FwdParams or BwdParams.
template <typename Params>
class KeyMaskBuffers {
 public:
  explicit KeyMaskBuffers(const Params& p) : p_(p), rows_(p.B * p.N), words_(KeyMask::num_words(p.Lk)) {}

  bool needed() const { return p_.bias1 != nullptr || p_.row_mask != nullptr; }
  int64_t bytes() const {
    return needed() ? kCounterBytes + aligned(4 * rows_) + aligned(8 * rows_) + aligned(4 * rows_ * words_) : 0;
  }

  // The place of bytes() bytes on 256.
  KeyMask at(void* place) const {
    if (!needed()) return {};
    char* base = static_cast<char*>(place) + kCounterBytes;
    return {reinterpret_cast<float*>(base), reinterpret_cast<uint32_t*>(base + aligned(4 * rows_) + aligned(8 * rows_)),
            reinterpret_cast<int2*>(base + aligned(4 * rows_)), words_};
  }

  // 0 when the kernels run that follow find_visible_keys.
  int32_t* counter(void* place) const { return needed() ? static_cast<int32_t*>(place) : nullptr; }

  // copy: of bias1 in rows of Lk neighbours, or null.
  template <typename scalar_t>
  cudaError_t fill(void* place, void* copy, cudaStream_t stream) const {
    if (!needed() || rows_ == 0) return cudaSuccess;
    if (place == nullptr) return cudaErrorInvalidValue;
    KeyMask mask = at(place);
    KeyMaskArgs args{p_.bias1,
                     {p_.bias1_stride[0], p_.bias1_stride[1], p_.bias1_stride[2]},
                     p_.row_mask,
                     {p_.row_mask_stride[0], p_.row_mask_stride[1]},
                     uint32_t(p_.N),
                     p_.Lk,
                     const_cast<float*>(mask.shift),
                     const_cast<uint32_t*>(mask.visible),
                     const_cast<int2*>(mask.range),
                     words_,
                     p_.bias1 != nullptr ? copy : nullptr,
                     counter(place)};
    find_visible_keys<scalar_t><<<unsigned(rows_), kKeyMaskThreads, 0, stream>>>(args);
    return cudaGetLastError();
  }

 private:
  static constexpr int64_t kCounterBytes = 256;
  static int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

  const Params& p_;
  int64_t rows_;
  int32_t words_;
};

}  // namespace ds4s
