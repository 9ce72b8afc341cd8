// A warp's 32 x 32 scores, and the steps common to the backward's kernels: math.md (8), (10), (11).
#pragma once

#include "sm80/backward/config.h"
#include "sm80/backward/gradient_rows.h"

namespace ds4s {

// The 32 rows of the left operand: fragments in registers, or an address in shared memory.
template <typename Mma, typename TileT, typename scalar_t, bool kResident>
struct LeftOperand {
  using FragA = typename Mma::FragA;
  static constexpr int kSteps = TileT::kCols / Mma::kStepK;
  static constexpr int kUnrolled = Mma::kStepK > 4 ? kSteps : 1;  // FFMA: a step is 256 instructions
  FragA fragments[kResident ? kSteps : 1];
  const scalar_t* lane_ptr;

  CUTLASS_DEVICE void attach(const scalar_t* sTile, int row0, int lane) {
    lane_ptr = sTile + TileT::offset(row0) + Mma::template lane_a<TileT>(lane);
  }
  // To be called when the tile is in shared memory.
  CUTLASS_DEVICE void fetch() {
    if constexpr (kResident) {
      CUTLASS_PRAGMA_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        Mma::template load_a<TileT>(fragments[step], lane_ptr, 0, step * Mma::kStepK);
      }
    }
  }
  CUTLASS_DEVICE const FragA& at(int step) {
    if constexpr (kResident) return fragments[step];
    Mma::template load_a<TileT>(fragments[0], lane_ptr, 0, step * Mma::kStepK);
    return fragments[0];
  }
};

// acc (tiles of kPairs pairs from first_pair on) += rows x columns^T. lane_b: lane_b_nk of the stripe's first row.
template <typename Mma, typename ColTile, int kPairs, typename Operand, typename scalar_t>
CUTLASS_DEVICE void multiply_rows(float (&acc)[4][8], int first_pair, Operand& rows, const scalar_t* lane_b) {
  constexpr int kUnrolled = Operand::kUnrolled;
#pragma unroll(kUnrolled)
  for (int step = 0; step < Operand::kSteps; ++step) {
    const typename Mma::FragA& a = rows.at(step);
    CUTLASS_PRAGMA_UNROLL
    for (int pair = first_pair; pair < first_pair + kPairs; ++pair) {
      typename Mma::FragBnk b;
      Mma::template load_b_nk<ColTile>(b, lane_b, 0, pair, step * Mma::kStepK);
      Mma::mma(acc[2 * pair], acc[2 * pair + 1], a, b);
    }
  }
}

// out += from_scores(x, step) * columns, all of the head dimension. lane_b: lane_b_kn of the stripe's first row.
template <typename Mma, typename ColTile, typename scalar_t, int kTiles>
CUTLASS_DEVICE void multiply_operand(float (&out)[kTiles][8], const typename Mma::FragA& a, int step,
                                     const scalar_t* lane_b) {
  CUTLASS_PRAGMA_UNROLL
  for (int tile = 0; tile < kTiles; tile += 2) {
    typename Mma::FragBkn b;
    Mma::template load_b_kn<ColTile>(b, lane_b, 0, step, 8 * tile);
    Mma::mma(out[tile], out[tile + 1], a, b);
  }
}
template <typename Mma, typename ColTile, typename scalar_t, int kTiles>
CUTLASS_DEVICE void multiply_scores(float (&out)[kTiles][8], const float (&x)[4][8], int step, const scalar_t* lane_b,
                                    int lane) {
  typename Mma::FragA a;
  Mma::from_scores(a, x, step, lane);
  multiply_operand<Mma, ColTile>(out, a, step, lane_b);
}

// x as a statistic: a float, or two parts of which the second is 0.
template <typename T>
CUTLASS_DEVICE T one_part(float x) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return x;
  } else {
    return make_float2(x, 0.f);
  }
}

// Stores one value for each column in shared memory. Every pair of columns is stored twice, (x, y, x, y): this is the
// matrix instruction's initial accumulator, for two rows at once.
constexpr int kColumnBytes = 8;
template <typename Mma>
CUTLASS_DEVICE void store_column(float* sColumns, int column, float x) {
  float* pair = sColumns + 4 * Mma::place_of_pair(column / 2) + column % 2;
  pair[0] = x, pair[2] = x;
}
// The same for values of two parts: the first parts of two neighbouring columns, then their second parts.
template <typename Mma>
CUTLASS_DEVICE void store_column(float* sColumns, int column, float2 x) {
  float* pair = sColumns + 4 * Mma::place_of_pair(column / 2) + column % 2;
  pair[0] = x.x, pair[2] = x.y;
}
CUTLASS_DEVICE float2 column_of_pair(const float4& columns, int i) {
  return i % 2 == 0 ? make_float2(columns.x, columns.z) : make_float2(columns.y, columns.w);
}
// The initial values of a lane's elements 4 half .. 4 half + 3 of tile j.
template <typename Mma>
CUTLASS_DEVICE float4 columns_of(const float* sColumns, int j, int half, int lane) {
  const int lane_pair = Mma::Permuted::at(0, Mma::column_of(lane, 0)) / 2;
  const int pair = Mma::Permuted::at(j, Mma::column_of(0, 4 * half)) / 2;
  return reinterpret_cast<const float4*>(sColumns)[Mma::place_of_pair(lane_pair) + Mma::place_of_pair(pair)];
}
// The initial values of an accumulator.
template <typename Mma>
CUTLASS_DEVICE void begin_with_columns(float (&tile)[8], int j, const float* sColumns, int lane) {
  CUTLASS_PRAGMA_UNROLL
  for (int half = 0; half < 2; ++half) {
    float4 x = columns_of<Mma>(sColumns, j, half, lane);
    tile[4 * half] = x.x, tile[4 * half + 1] = x.y, tile[4 * half + 2] = x.z, tile[4 * half + 3] = x.w;
  }
}

// One value for each of a lane's rows, as initial values of an accumulator. They have registers of their own, else the
// compiler would assemble them again for every tile.
template <typename Mma>
struct RowBegin {
  float values[8];
  CUTLASS_DEVICE void set(const float (&rows)[Mma::kLaneRows]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 8; ++i) values[i] = opaque(rows[Mma::lane_row_of(i)]);
  }
  CUTLASS_DEVICE void begin(float (&tile)[8]) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 8; ++i) tile[i] = values[i];
  }

 private:
  CUTLASS_DEVICE static float opaque(float x) {
    int bits = __float_as_int(x);
    ptx::keep(bits);
    return __int_as_float(bits);
  }
};

// A lane's part of a 32 x 32 bias tile, not converted: 16-byte vectors of neighbouring columns.
template <typename Mma, typename scalar_t>
struct BiasFragment {
  uint32_t words[Mma::kLaneRows][Mma::kGroups][4];

  // Loads from the lane's first row and its first column on. Past the last row or vector, that one is repeated:
  // P is 0 there, or not stored.
  CUTLASS_DEVICE void load(const scalar_t* g, int stride, int row, int last_row, int col, int last_col) {
    CUTLASS_PRAGMA_UNROLL
    for (int group = 0; group < Mma::kGroups; ++group) {
      const scalar_t* column = g + min(col + group * Mma::kGroupStep, last_col);
      CUTLASS_PRAGMA_UNROLL
      for (int lane_row = 0; lane_row < Mma::kLaneRows; ++lane_row) {
        int64_t offset = int64_t(min(row + lane_row * Mma::kRowStep, last_row)) * stride;
        set(lane_row, group, __ldg(reinterpret_cast<const uint4*>(column + offset)));
      }
    }
  }
  CUTLASS_DEVICE void set(int lane_row, int group, const uint4& x) {
    uint32_t (&w)[4] = words[lane_row][group];
    w[0] = x.x, w[1] = x.y, w[2] = x.z, w[3] = x.w;
  }
  // Stops the compiler from unpacking the tile once in front of the loop, which would take twice the registers.
  CUTLASS_DEVICE void keep_packed() {
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < Mma::kLaneRows * Mma::kGroups * 4; ++x) {
      ptx::keep(reinterpret_cast<int&>(words[x / (4 * Mma::kGroups)][x / 4 % Mma::kGroups][x % 4]));
    }
  }
  CUTLASS_DEVICE float2 pair(int lane_row, int group, int e) const {
    const uint32_t (&w)[4] = words[lane_row][group];
    if constexpr (sizeof(scalar_t) == 2) {
      return ptx::unpack<scalar_t>(w[e / 2]);
    } else {
      return make_float2(__uint_as_float(w[e]), __uint_as_float(w[e + 1]));
    }
  }
};

// P, math.md (8), of kTiles tiles from `first` on. One of the two terms, -lse and bias1, belongs to the rows and the
// other to the columns (kLseInColumns); terms of the columns are in units of column_unit, of the rows in units of
// row_unit.
//
// Fast: 2^(to_log2 (rows x columns^T + column) + log2(e) bias2 + row), one FMA for each term but the column's, which is
// the accumulator's initial value. Exact (float in full precision): exp(((scale S + bias1) + bias2) - max) / sum, with
// the small terms first: in base 2, or with a term inside the product's sums, rounding errors would be several times
// larger.
template <typename Config, typename ColTile, int kTiles, bool kLseInColumns>
struct Probabilities {
  using Mma = typename Config::Mma;
  using scalar_t = typename Config::scalar_t;
  static constexpr bool kExact = Config::kExact;
  static constexpr float row_unit = kExact ? 1.f : kLog2e;
  using Row = typename cutlass::platform::conditional<kLseInColumns, float, typename Config::QueryValue>::type;
  float scale, to_log2;

  CUTLASS_DEVICE explicit Probabilities(float scale_) : scale(scale_), to_log2(scale_ * kLog2e) {}
  CUTLASS_DEVICE float column_unit() const { return kExact ? 1.f : 1.f / scale; }

  template <typename Operand>
  CUTLASS_DEVICE void operator()(float (&s)[4][8], int first, Operand& rows, const scalar_t* lane_b,
                                 const float* sColumns, const Row (&row)[Mma::kLaneRows],
                                 const BiasFragment<Mma, scalar_t>& bias, int lane) const {
    CUTLASS_PRAGMA_UNROLL
    for (int j = first; j < first + kTiles; ++j) {
      if constexpr (kExact) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 8; ++i) s[j][i] = 0.f;
      } else {
        begin_with_columns<Mma>(s[j], j, sColumns, lane);
      }
    }
    multiply_rows<Mma, ColTile, kTiles / 2>(s, first / 2, rows, lane_b);
    CUTLASS_PRAGMA_UNROLL
    for (int lane_row = 0; lane_row < Mma::kLaneRows; ++lane_row) {
      CUTLASS_PRAGMA_UNROLL
      for (int x = 0; x < Mma::kGroups * Mma::kVec; x += 2) {
        int group = x / Mma::kVec, e = x % Mma::kVec;
        int j = Mma::tile_of(group, e), i = Mma::value_of(lane_row, e);
        if (j < first || j >= first + kTiles) continue;
        float2 b = make_float2(0.f, 0.f);
        if constexpr (Config::kHasBias2) b = bias.pair(lane_row, group, e);
        if constexpr (kExact) {
          float4 column = columns_of<Mma>(sColumns, j, i / 4, lane);
          if constexpr (kLseInColumns) {
            s[j][i] = exact(s[j][i], b.x, row[lane_row], column_of_pair(column, 0));
            s[j][i + 1] = exact(s[j][i + 1], b.y, row[lane_row], column_of_pair(column, 1));
          } else {
            s[j][i] = exact(s[j][i], b.x, column.x, row[lane_row]);
            s[j][i + 1] = exact(s[j][i + 1], b.y, column.y, row[lane_row]);
          }
        } else {
          s[j][i] = fast(s[j][i], b.x, row[lane_row]);
          s[j][i + 1] = fast(s[j][i + 1], b.y, row[lane_row]);
        }
      }
    }
  }

  // The scores of which exact() takes the exponential, and statistics.h the maximum.
  CUTLASS_DEVICE float exact_score(float s, float bias1, float bias2) const { return fmaf(s, scale, bias1) + bias2; }

 private:
  CUTLASS_DEVICE float fast(float s, float bias2, float row) const {
    float shift = Config::kHasBias2 ? fmaf(bias2, kLog2e, row) : row;
    return ptx::exp2(fmaf(s, to_log2, shift));
  }
  // lse: -max, 1 / sum.
  CUTLASS_DEVICE float exact(float s, float bias2, float bias1, float2 lse) const {
    return expf(exact_score(s, bias1, bias2) + lse.x) * lse.y;
  }
};

// dS / P in full precision. delta: its two parts, negated. They are subtracted from dP one after the other: where one
// key holds nearly all of P, the first difference is nearly exact.
CUTLASS_DEVICE float subtract_delta(float dp, float2 delta) { return (dp + delta.x) + delta.y; }

// factor * acc as rows, in 16 bits.
template <typename Mma, typename scalar_t, int kTiles>
CUTLASS_DEVICE WarpGradientRows<scalar_t, kTiles> rows_of_tiles(const float (&acc)[kTiles][8], float factor) {
  WarpGradientRows<scalar_t, kTiles> rows;
  CUTLASS_PRAGMA_UNROLL
  for (int tile = 0; tile < kTiles; ++tile) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 8; i += 2)
      rows.w[tile][Mma::lane_row_of(i)] = ptx::pack<scalar_t>(factor * acc[tile][i], factor * acc[tile][i + 1]);
  }
  return rows;
}

// Stores factor * acc as rows of a matrix in global memory. g: row 0 of the warp; rows, cols: how many exist.
template <typename Mma, bool kAligned, typename scalar_t, int kTiles>
CUTLASS_DEVICE void store_rows(scalar_t* g, int64_t stride, const float (&acc)[kTiles][8], float factor, int rows,
                               int cols, int lane) {
  if constexpr (kAligned && sizeof(scalar_t) == 2 && Mma::kLaneRows == 4) {
    rows_of_tiles<Mma, scalar_t>(acc, factor).store(g, stride, rows, cols, lane);
  } else {
    CUTLASS_PRAGMA_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 8; i += 2) {
        int row = Mma::row_of_lane(lane) + Mma::kRowStep * Mma::lane_row_of(i);
        int col = 8 * tile + Mma::column_of(lane, i);
        if (row >= rows || col >= cols) continue;
        scalar_t* dst = g + row * stride + col;
        float x = factor * acc[tile][i], y = factor * acc[tile][i + 1];
        if constexpr (kAligned && sizeof(scalar_t) == 2) {
          *reinterpret_cast<uint32_t*>(dst) = ptx::pack<scalar_t>(x, y);
        } else if constexpr (kAligned) {
          *reinterpret_cast<float2*>(dst) = make_float2(x, y);
        } else {
          dst[0] = scalar_t(x);
          if (col + 1 < cols) dst[1] = scalar_t(y);
        }
      }
    }
  }
}

}  // namespace ds4s
