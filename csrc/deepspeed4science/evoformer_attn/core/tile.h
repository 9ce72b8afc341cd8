// A tile of rows in shared memory, and how a block fills it from global memory.
//
// A row is cut into 16-byte chunks and padded to an odd number of them; every eighth row starts two chunks later. Then
// the eight rows that one ldmatrix phase touches lie in different banks, both for eight neighbours and for the rows
// {0, 1, 8, 9, 16, 17, 24, 25} + 2j of a permuted score tile (core/mma.h). Unlike an XOR swizzle this serves
// rows of any length (48 and 96 channels too), and an address is a lane's constant plus a compile-time constant.
#pragma once

#include <cutlass/array.h>

#include "core/ptx.h"

namespace ds4s {

template <typename T, int kRows_, int kCols_>
struct Tile {
  static constexpr int kRows = kRows_;
  static constexpr int kCols = kCols_;
  static constexpr int kVec = 16 / int(sizeof(T));  // elements of one chunk
  static constexpr int kChunks = kCols / kVec;
  static constexpr int kPitch = kChunks | 1;
  static constexpr int kBytes = (kRows * kPitch + kRows / 8 * 2) * 16;
  static_assert(kCols % kVec == 0, "a row is a whole number of 16-byte chunks");
  static_assert(kRows % 8 == 0, "the skew counts groups of eight rows");

  // Offset in elements. Linear over sums of rows with no common bits: offset(a | b) = offset(a) + offset(b).
  CUTLASS_HOST_DEVICE static constexpr int offset(int row, int col = 0) {
    return (row * kPitch + (row >> 3) * 2) * kVec + col;
  }
};

// Copies rows [0, rows) x columns [0, cols) of a matrix in global memory into a tile and fills the rest with zeros.
// Each thread keeps one column chunk and steps through the rows.
template <typename T, typename TileT, int kThreads, bool kAligned, bool kAsync>
struct TileLoader {
  static constexpr int kVec = TileT::kVec;
  static constexpr int kRowsPerPass = kThreads / TileT::kChunks;
  static constexpr int kPasses = (TileT::kRows + kRowsPerPass - 1) / kRowsPerPass;
  static_assert(kRowsPerPass > 0, "a block has at least one thread for each chunk of a row");

  int row;  // of the first pass; past the tile for the threads left over
  int col;

  CUTLASS_DEVICE explicit TileLoader(int thread) {
    row = thread / TileT::kChunks;
    col = (thread - row * TileT::kChunks) * kVec;
    if (row >= kRowsPerPass) row = TileT::kRows;
  }

  // gTile: element (0, 0); stride: elements between rows.
  CUTLASS_DEVICE void load(T* sTile, const T* gTile, int64_t stride, int rows, int cols) const {
    const T* g = gTile + int64_t(row) * stride + col;
    T* s = sTile + TileT::offset(row, col);
    CUTLASS_PRAGMA_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      int r = row + pass * kRowsPerPass;
      if (r < TileT::kRows) {
        const T* src = g + int64_t(pass * kRowsPerPass) * stride;
        T* dst = kRowsPerPass % 8 == 0 ? s + TileT::offset(pass * kRowsPerPass) : sTile + TileT::offset(r, col);
        copy_chunk(dst, src, r < rows ? cols - col : 0);
      }
    }
  }

 private:
  // valid: how many elements of the chunk exist (may be negative or more than a chunk holds).
  CUTLASS_DEVICE static void copy_chunk(T* dst, const T* src, int valid) {
    if constexpr (kAligned && kAsync) {
      ptx::cp_async_16(dst, src, valid > 0);
    } else if constexpr (kAligned) {
      uint4 x = make_uint4(0, 0, 0, 0);
      if (valid > 0) x = *reinterpret_cast<const uint4*>(src);
      *reinterpret_cast<uint4*>(dst) = x;
    } else {
      cutlass::AlignedArray<T, kVec> x;
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < kVec; ++e) x[e] = e < valid ? src[e] : T(0);
      *reinterpret_cast<cutlass::AlignedArray<T, kVec>*>(dst) = x;
    }
  }
};

}  // namespace ds4s
