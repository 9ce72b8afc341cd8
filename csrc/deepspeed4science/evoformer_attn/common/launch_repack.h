// Host side of common/repack.h: when a bias needs an aligned copy, how large it is, and making it.
#pragma once

#include <cuda_runtime.h>

#include "common/repack.h"

namespace ds4s {

// A bias as [outer, middle, rows, columns] with strides in elements. Of a dimension of stride 0, one slice is copied.
template <typename T>
struct BiasRows {
  const void* ptr;
  int64_t size[4];
  int64_t stride[4];

  static constexpr int64_t kVec = 16 / int64_t(sizeof(T));

  // Whether rows are aligned to 16 bytes and consist of whole 16-byte chunks.
  bool aligned() const {
    bool ok = reinterpret_cast<uintptr_t>(ptr) % 16 == 0 && size[3] % kVec == 0 && unit();
    for (int d = 0; d < 3; ++d) ok = ok && (stride[d] % kVec == 0 || size[d] == 1);
    return ok;
  }
  bool unit() const { return stride[3] == 1 || size[3] == 1; }

  int64_t pitch() const { return (size[3] + 31) / 32 * 32; }
  int64_t count(int d) const { return stride[d] == 0 ? 1 : size[d]; }
  int64_t bytes() const {  // a multiple of 256
    return (count(0) * count(1) * count(2) * pitch() * int64_t(sizeof(T)) + 255) / 256 * 256;
  }

  // Copies into dst; from then on this describes the copy.
  cudaError_t repack(void* dst, cudaStream_t stream) {
    RepackParams p{ptr,     dst,     {stride[0], stride[1], stride[2], stride[3]},   count(1), count(2),
                   size[3], pitch(), count(0) * count(1) * count(2) * pitch() / kVec};
    int64_t blocks = (p.num_vectors + 255) / 256;
    repack_rows<T><<<unsigned(blocks < 65536 ? blocks : 65536), 256, 0, stream>>>(p);
    ptr = dst;
    int64_t step = pitch();
    for (int d = 2; d >= 0; --d) {
      int64_t copied = count(d);
      stride[d] = copied == 1 ? 0 : step;
      step *= copied;
    }
    stride[3] = 1;
    return cudaGetLastError();
  }
};

}  // namespace ds4s
