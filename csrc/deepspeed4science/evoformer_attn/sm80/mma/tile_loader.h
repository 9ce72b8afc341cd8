// How a block copies rows of a matrix between global memory and a tile in shared memory.
#pragma once

#include <cutlass/array.h>

#include "../../common/ptx.h"
#include "smem_tile.h"

namespace ds4s {

// Copies the rows of a matrix in global memory into tiles, kRows at a time, with zeros outside the matrix. Each thread
// keeps one column chunk and iterates over the rows.
template <typename T, typename TileT, int kThreads, bool kAligned, bool kAsync>
struct TileLoader {
  static constexpr int kVec = TileT::kVec;
  static constexpr int kRowsPerPass = kThreads / TileT::kChunks;
  static constexpr int kPasses = (TileT::kRows + kRowsPerPass - 1) / kRowsPerPass;
  static constexpr bool kEven = TileT::kRows % kRowsPerPass == 0 && kThreads % TileT::kChunks == 0;
  // Whether a thread's row has common bits with a pass's first row (TileT::after).
  static constexpr bool kSharesBits = (kRowsPerPass & (kRowsPerPass - 1)) != 0;
  static_assert(kRowsPerPass > 0, "a block has at least one thread for each chunk of a row");

  const T* g;      // this thread's chunk of the next tile's first pass
  int64_t stride;  // elements between rows
  int row;         // of the first pass; past the tile for surplus threads
  int valid;       // elements of the chunk that exist: none when <= 0
  int first;       // the first pass reads if this row exists; never where the chunk does not exist
  int s;           // offset in the tile

  TileLoader() = default;
  // gMatrix: element (0, 0); cols: columns that exist.
  CUTLASS_DEVICE TileLoader(const T* gMatrix, int64_t stride_, int cols, int thread) : stride(stride_) {
    row = int(uint32_t(thread) / TileT::kChunks);
    const int col = int(uint32_t(thread) % TileT::kChunks) * kVec;
    valid = cols - col;
    if (kThreads % TileT::kChunks != 0 && row >= kRowsPerPass) row = TileT::kRows;
    first = valid > 0 ? row : 1 << 30;
    g = gMatrix + int64_t(row) * stride + col;
    s = TileT::offset(row, col);
  }
  // The loader of a thread that has kept its address alone; the rest is computed again.
  CUTLASS_DEVICE static TileLoader at(const T* g, int64_t stride, int cols, int thread) {
    TileLoader loader(nullptr, 0, cols, thread);
    loader.g = g, loader.stride = stride;
    return loader;
  }

  // Copies the next tile; rows: how many of its rows exist.
  CUTLASS_DEVICE void load(T* sTile, int rows) const {
    CUTLASS_PRAGMA_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      int r = row + pass * kRowsPerPass;
      if (kEven || r < TileT::kRows) {
        const int place = TileT::after(s, kSharesBits ? row : 0, pass * kRowsPerPass);
        copy_chunk(sTile + place, g + pass * kRowsPerPass * stride, rows - first > pass * kRowsPerPass);
      }
    }
  }
  CUTLASS_DEVICE void advance() { g += TileT::kRows * stride; }

 private:
  CUTLASS_DEVICE void copy_chunk(T* dst, const T* src, bool exists) const {
    if constexpr (kAligned && kAsync) {
      ptx::cp_async_16(dst, src, exists);
    } else if constexpr (kAligned) {
      uint4 x = make_uint4(0, 0, 0, 0);
      if (exists) x = *reinterpret_cast<const uint4*>(src);
      *reinterpret_cast<uint4*>(dst) = x;
    } else {
      cutlass::AlignedArray<T, kVec> x;
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < kVec; ++e) x[e] = exists && e < valid ? src[e] : T(0);
      *reinterpret_cast<cutlass::AlignedArray<T, kVec>*>(dst) = x;
    }
  }
};

// Writes the first kRows rows of a tile, as far as they are below `rows`, and columns below `cols` to a matrix in
// global memory, 16 bytes a thread at a time. Each thread keeps a column chunk and iterates over the rows.
template <typename T, typename TileT, int kRows, int kThreads, bool kAligned>
struct TileStorer {
  static constexpr int kThreadsPerRow = TileT::kChunks < kThreads ? TileT::kChunks : kThreads;
  static constexpr int kRowsPerPass = kThreads / kThreadsPerRow;
  static constexpr int kPasses = (kRows + kRowsPerPass - 1) / kRowsPerPass;
  static constexpr bool kEven = kRows % kRowsPerPass == 0 && kThreads % kThreadsPerRow == 0;
  static constexpr bool kSharesBits = (kRowsPerPass & (kRowsPerPass - 1)) != 0;
  static constexpr int kAtOnce = 4;  // passes whose reads do not wait for one another
  using Chunk = cutlass::AlignedArray<T, TileT::kVec>;

  CUTLASS_DEVICE static void store(T* g, int64_t stride, const T* sTile, int thread, int rows, int cols) {
    const int row = int(uint32_t(thread) / kThreadsPerRow);
    if (!kEven && row >= kRowsPerPass) return;
    CUTLASS_PRAGMA_UNROLL
    for (int chunk = 0; chunk < TileT::kChunks; chunk += kThreadsPerRow) {
      const int col = (chunk + int(uint32_t(thread) % kThreadsPerRow)) * TileT::kVec;
      if (col >= cols) return;
      store_column(g + row * stride + col, stride, sTile, row, col, rows, cols);
    }
  }

 private:
  // g: of the row and column.
  CUTLASS_DEVICE static void store_column(T* g, int64_t stride, const T* sTile, int row, int col, int rows, int cols) {
    const int s = TileT::offset(row, col);
    const int end = kEven || rows < kRows ? rows : kRows;
    CUTLASS_PRAGMA_UNROLL
    for (int first = 0; first < kPasses; first += kAtOnce) {
      Chunk chunks[kAtOnce];
      CUTLASS_PRAGMA_UNROLL
      for (int pass = first; pass < kPasses && pass < first + kAtOnce; ++pass) {
        const int place = TileT::after(s, kSharesBits ? row : 0, pass * kRowsPerPass);
        if (kEven || row + pass * kRowsPerPass < kRows)
          chunks[pass - first] = *reinterpret_cast<const Chunk*>(sTile + place);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int pass = first; pass < kPasses && pass < first + kAtOnce; ++pass, g += kRowsPerPass * stride) {
        if (row + pass * kRowsPerPass < end) store_chunk(g, chunks[pass - first], cols - col);
      }
    }
  }
  CUTLASS_DEVICE static void store_chunk(T* dst, const Chunk& chunk, int valid) {
    if constexpr (kAligned) {
      ptx::store_16(dst, *reinterpret_cast<const uint4*>(&chunk));
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < TileT::kVec; ++e) {
        if (e < valid) dst[e] = chunk[e];
      }
    }
  }
};

// Zeros in rows [0, rows) x columns [0, cols) of a matrix in global memory.
template <typename T, int kThreads, bool kAligned>
CUTLASS_DEVICE void store_zeros(T* g, int64_t stride, int thread, int rows, int cols) {
  constexpr int kVec = kAligned ? 16 / int(sizeof(T)) : 1;
  int chunks = (cols + kVec - 1) / kVec;
  CUTLASS_PRAGMA_NO_UNROLL
  for (int i = thread; i < rows * chunks; i += kThreads) {
    int row = i / chunks, col = (i - row * chunks) * kVec;
    if constexpr (kAligned) {
      *reinterpret_cast<uint4*>(g + row * stride + col) = make_uint4(0, 0, 0, 0);
    } else {
      g[row * stride + col] = T(0);
    }
  }
}

}  // namespace ds4s
