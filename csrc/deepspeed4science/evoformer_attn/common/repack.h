// Copies a bias whose rows cannot be read 16 bytes at a time (odd lengths, transposed or expanded last dimension) into
// the workspace, once in each call, as rows of `pitch` elements with zeros at the end. The kernel reads bias2 once for
// each of the N rows of the batch, so the copy costs one N-th of that.
#pragma once

#include <cutlass/array.h>

#include "common/arch.h"

namespace ds4s {

struct RepackParams {
  const void* src;    // [outer, middle, rows, columns], strides below
  void* dst;          // [outer, middle, rows, pitch]
  int64_t stride[4];  // elements
  int64_t middle, rows, columns, pitch;
  int64_t num_vectors;  // outer * middle * rows * pitch / kVec
};

template <typename T>
__global__ void __launch_bounds__(256) repack_rows(RepackParams p) {
  constexpr int kVec = 16 / int(sizeof(T));
  int64_t vectors_per_row = p.pitch / kVec;
  for (int64_t i = int64_t(blockIdx.x) * 256 + threadIdx.x; i < p.num_vectors; i += int64_t(gridDim.x) * 256) {
    int64_t row = i / vectors_per_row;
    int64_t column = (i - row * vectors_per_row) * kVec;
    int64_t plane = row / p.rows;
    int64_t outer = plane / p.middle;
    const T* src = static_cast<const T*>(p.src) + outer * p.stride[0] + (plane - outer * p.middle) * p.stride[1] +
                   (row - plane * p.rows) * p.stride[2];
    cutlass::AlignedArray<T, kVec> x;
    CUTLASS_PRAGMA_UNROLL
    for (int e = 0; e < kVec; ++e) x[e] = column + e < p.columns ? src[(column + e) * p.stride[3]] : T(0);
    reinterpret_cast<cutlass::AlignedArray<T, kVec>*>(p.dst)[i] = x;
  }
}

}  // namespace ds4s
