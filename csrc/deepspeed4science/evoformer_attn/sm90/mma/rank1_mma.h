// Rank-1 updates: adds x[row] + y[column] to a product by 16 more contracted columns, as the matrix product of (x, 1)
// and (1, y). Each term is a sum of three bfloat16, which is exact, whatever the type of the operands.
#pragma once

#include "sm90/mma/pipeline.h"

namespace ds4s::sm90 {

// 64 rows or columns.
using Rank1Tile = SwizzledTile<64, 16>;

struct Rank1Terms {
  using scalar_t = cutlass::bfloat16_t;
  // Rows 0 to 7 are read as all 64. The memory after them must exist, since sanitizers count 64 rows as read.
  static constexpr int kOnesBytes = 8 * Rank1Tile::kRowBytes;

  // x as a sum of three: its upper 8 digits, the next 8, the last 8. -inf becomes the smallest float, which hides as
  // well; NaN stays NaN.
  struct Parts {
    static constexpr float kSmallest = -3.4e38f;
    uint32_t high, middle, low;  // each in the upper half
    CUTLASS_DEVICE explicit Parts(float x) {
      if (x < kSmallest) x = kSmallest;
      high = __float_as_uint(x) & kUpper;
      float rest = x - __uint_as_float(high);
      middle = __float_as_uint(rest) & kUpper;
      low = __float_as_uint(rest - __uint_as_float(middle));
    }
  };

  // (x, 0): with `ones`, x alone. (x, 1): with (1, y) on the other side, the sum of both.
  CUTLASS_DEVICE static void store_alone(uint8_t* tile, int row, float x) { store(tile, row, terms_alone(x)); }
  CUTLASS_DEVICE static void store_first(uint8_t* tile, int row, float x) {
    Parts p(x);
    store(tile, row, make_uint4(pack(p.high, p.middle), pack(p.low, kOne), pack(kOne, kOne), 0));
  }
  CUTLASS_DEVICE static void store_second(uint8_t* tile, int row, float y) {
    Parts p(y);
    store(tile, row, make_uint4(pack(kOne, kOne), pack(kOne, p.high), pack(p.middle, p.low), 0));
  }
  CUTLASS_DEVICE static void store_ones(uint8_t* tile, int row) {
    store(tile, row, make_uint4(pack(kOne, kOne), pack(kOne, 0), 0, 0));
  }
  // Clears the upper 8 of the 16 columns; once, before all else.
  CUTLASS_DEVICE static void clear(uint8_t* tile, int row) {
    *reinterpret_cast<uint4*>(tile + Rank1Tile::offset(row, 1)) = make_uint4(0, 0, 0, 0);
  }

  // x = the sum of a row's term and a column's, by their start addresses.
  template <int kN>
  CUTLASS_DEVICE static void start_sum(float (&x)[kN / 2], uint32_t rows, uint32_t columns) {
    wgmma<scalar_t, kN, Major::K>(x, Rank1Tile::descriptor(rows), Rank1Tile::descriptor(columns), ScaleOut::Zero);
  }
  // Terms of one side alone; the other side is ones.
  template <int kN>
  CUTLASS_DEVICE static void start_rows(float (&x)[kN / 2], uint32_t rows, uint32_t ones) {
    wgmma<scalar_t, kN, Major::K>(x, Rank1Tile::descriptor(rows), same_rows(ones), ScaleOut::Zero);
  }
  template <int kN>
  CUTLASS_DEVICE static void start_columns(float (&x)[kN / 2], uint32_t ones, uint32_t columns) {
    wgmma<scalar_t, kN, Major::K>(x, same_rows(ones), Rank1Tile::descriptor(columns), ScaleOut::Zero);
  }

  // The same with terms that take 16 bytes each, side by side: 8 of the 16 contracted columns. The product reads them
  // as the other 8 too, and the ones have zeros there.
  template <int kN>
  CUTLASS_DEVICE static void start_dense_columns(float (&x)[kN / 2], uint32_t ones, uint32_t columns) {
    constexpr uint64_t kEightRows = uint64_t(8 * 16 >> 4) << 32;  // no swizzle; 0 bytes to the upper 8 columns
    wgmma<scalar_t, kN, Major::K>(x, same_rows(ones), kEightRows | columns, ScaleOut::Zero);
  }
  CUTLASS_DEVICE static uint4 terms_alone(float x) {
    Parts p(x);
    return make_uint4(pack(p.high, p.middle), pack(p.low, 0), 0, 0);
  }

 private:
  // A descriptor that reads the same eight rows 64 / 8 times: the step to the next eight rows is 0.
  CUTLASS_DEVICE static uint64_t same_rows(uint32_t start) {
    return Rank1Tile::descriptor(start) & ~(uint64_t(0x3fff) << 32);
  }
  static constexpr uint32_t kUpper = 0xffff0000u, kOne = 0x3f800000u;
  CUTLASS_DEVICE static uint32_t pack(uint32_t x, uint32_t y) { return __byte_perm(x, y, 0x7632); }  // upper halves
  CUTLASS_DEVICE static void store(uint8_t* tile, int row, uint4 value) {
    *reinterpret_cast<uint4*>(tile + Rank1Tile::offset(row, 0)) = value;
  }
};

}  // namespace ds4s::sm90
