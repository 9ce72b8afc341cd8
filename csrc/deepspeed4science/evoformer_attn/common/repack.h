// Copies a bias whose rows cannot be read 16 bytes at a time (odd lengths, transposed or expanded last dimension) into
// the workspace, once in each call, as rows of `pitch` elements with zeros at the end. The kernel reads bias2 once for
// each of the N rows of the batch, so the copy costs one N-th of that.
#pragma once

#include <cutlass/array.h>

#include "common/arch.h"
#include "common/ptx.h"

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

// The copy in tiles of 32 x 32 (BiasRows::tiles), with zeros past the ends. A warp that owns 32 x 32 scores then loads
// 512 bytes side by side with one instruction instead of eight rows of 64.
constexpr int kTileThreads = 128;
struct TileParams {
  const void* src;
  void* dst;
  int64_t stride[4];
  uint32_t middle, row_tiles, column_tiles;
  int64_t rows, columns;
  bool is_aligned;  // vectors of src are aligned to 16 bytes
};

// Copies one tile. Called by a block of kTileThreads threads, a vector of 16 bytes for each.
template <typename T>
CUTLASS_DEVICE void repack_tile(const TileParams& p, uint32_t tile) {
  constexpr int kVec = 16 / int(sizeof(T));
  static_assert(32 * 32 == kTileThreads * kVec, "a thread copies one vector");
  const uint32_t strip = tile / p.column_tiles, matrix = strip / p.row_tiles, outer = matrix / p.middle;
  const int64_t row = int64_t(strip - matrix * p.row_tiles) * 32 + threadIdx.x / (32 / kVec);
  const int64_t column = int64_t(tile - strip * p.column_tiles) * 32 + threadIdx.x % (32 / kVec) * kVec;
  const T* src = static_cast<const T*>(p.src) + outer * p.stride[0] + (matrix - outer * p.middle) * p.stride[1] +
                 row * p.stride[2] + column * p.stride[3];
  uint4 x = make_uint4(0, 0, 0, 0);
  if (p.is_aligned) {
    if (row < p.rows && column < p.columns) x = *reinterpret_cast<const uint4*>(src);
  } else if (row < p.rows) {
    T* const elements = reinterpret_cast<T*>(&x);
    CUTLASS_PRAGMA_UNROLL
    for (int e = 0; e < kVec; ++e) {
      if (column + e < p.columns) elements[e] = src[e * p.stride[3]];
    }
  }
  static_cast<uint4*>(p.dst)[int64_t(tile) * kTileThreads + threadIdx.x] = x;
}

}  // namespace ds4s
