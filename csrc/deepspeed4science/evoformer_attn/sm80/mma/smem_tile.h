// Tiles of rows in shared memory (tile_loader.h fills them).
//
//   Tile         for reads of eight neighbouring rows, and of the rows {0, 1, 8, 9, 16, 17, 24, 25} + 2j of a permuted
//                score tile (sm80/mma/mma.h)
//   SectorTile   for reads of permuted rows only; cheaper to fill by cp.async
//
// A row consists of 16-byte chunks. Both tiles place rows so that the eight rows of an ldmatrix phase lie in different
// banks. Unlike an XOR swizzle, this works for rows of any length (48 and 96 channels too), and an address is a lane's
// constant plus a compile-time constant.
#pragma once

#include <cutlass/cutlass.h>
#include <cutlass/platform/platform.h>

namespace ds4s {

// Rows are padded to an odd number of chunks; every eighth row starts two chunks later.
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
  // The place of a chunk `by` rows after the one at `place`, which is in row `row`; 0 stands for any row that has no
  // common bits with `by`.
  CUTLASS_HOST_DEVICE static constexpr int after(int place, int row, int by) {
    return place + offset(row + by) - offset(row);
  }
};

// Rows begin at multiples of 32 bytes, so that every aligned 32 bytes of global memory, a sector, stay together: a
// warp's cp.async takes 10 cycles of shared memory then, and 15 where every second row begins between two sectors.
// Where rows 16 apart would meet in a bank, the two chunks of each sector are exchanged.
template <typename T, int kRows_, int kCols_>
struct SectorTile {
  static constexpr int kRows = kRows_;
  static constexpr int kCols = kCols_;
  static constexpr int kVec = 16 / int(sizeof(T));
  static constexpr int kChunks = kCols / kVec;
  // The rows {0, 1, 8, 9} begin at four different multiples of two chunks, modulo the eight chunks of all banks.
  static constexpr bool kSeparates = kChunks % 8 == 0;
  static constexpr int kSkew = kChunks % 8 == 4 ? 2 : 4;  // chunks, for every eighth row
  static constexpr int kBytes = (kRows * (kChunks + kSeparates) + kRows / 8 * kSkew) * 16;
  static_assert(kCols % (2 * kVec) == 0, "a row is a whole number of sectors");
  static_assert(kRows % 8 == 0, "the skew counts groups of eight rows");

  // Offset in elements. offset(a | b) = offset(a) + offset(b) if a and b have no common bits and b is neither in an odd
  // chunk nor in an odd group of 16 rows.
  CUTLASS_HOST_DEVICE static constexpr int offset(int row, int col = 0) { return begin(row) + (col ^ exchange(row)); }
  CUTLASS_HOST_DEVICE static constexpr int after(int place, int row, int by) {
    return (place ^ exchange(row + by) ^ exchange(row)) + begin(row + by) - begin(row);
  }

 private:
  CUTLASS_HOST_DEVICE static constexpr int begin(int row) {
    return (row * (kChunks + kSeparates) + (row & kSeparates) + (row >> 3) * kSkew) * kVec;
  }
  CUTLASS_HOST_DEVICE static constexpr int exchange(int row) { return (row >> 4 & 1) * kVec; }
};

// The tile for rows that are read in permuted order. kCopies: it is filled by cp.async.
template <typename T, int kRows, int kCols, bool kCopies>
using PermutedTile = typename cutlass::platform::conditional<kCopies && sizeof(T) == 2, SectorTile<T, kRows, kCols>,
                                                             Tile<T, kRows, kCols>>::type;

}  // namespace ds4s
