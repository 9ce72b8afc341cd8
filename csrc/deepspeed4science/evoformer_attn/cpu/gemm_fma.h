// The fma engine: float32 products of small packed operands, for any ISA policy and any input type.
//
// C[m][n] (+)= sum over k of A[m][k] B[k][n]. A is read by broadcast, so it may have any strides; B and C have
// contiguous rows. Rows of C are computed kTileRows at a time and columns one vector at a time: buffers are padded to
// kQueries rows and kWidth columns, and the padding is never used.
#pragma once

#include <cstdint>

#include "scalar.h"
#include "tile_sizes.h"

namespace ds4s::cpu {

constexpr int round_up(int64_t x, int64_t multiple) { return int((x + multiple - 1) / multiple * multiple); }

// The left operand of a product: element (m, k) is data[m * row_stride + k * depth_stride].
template <typename T>
struct Left {
  const T* data;
  int row_stride;
  int depth_stride;
};

// Prefetches the cache lines of rows that are packed or written soon. Rows of one head lie far apart, and the
// processor's own prefetchers do not follow them: without this, packing took a quarter of the AMX forward.
template <bool kWrite, typename T>
inline void prefetch_rows(const T* first, int64_t stride, int64_t rows, int64_t cols) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; j += kLine) __builtin_prefetch(first + i * stride + j, kWrite);
  }
}

constexpr int kPrefetchRows = 32;  // prefetch distance of packing: about a memory latency

// Converts rows [rows, cols] of any type to float, row-major with `ld` columns; columns past `cols` and rows past
// `rows` become 0.
template <typename V, typename T>
inline void pack_float_rows(float* out, int ld, const T* in, int64_t stride, int rows, int rows_padded, int cols) {
  for (int i = 0; i < rows; ++i) {
    const T* row = in + i * stride;
    if (i + kPrefetchRows < rows) prefetch_rows<false>(row + kPrefetchRows * stride, stride, 1, cols);
    for (int j = 0; j < ld; j += V::kWidth) {
      const int left = cols - j;
      V::store(out + int64_t(i) * ld + j, left >= V::kWidth ? V::load(row + j)
                                          : left > 0        ? V::load_first(row + j, left)
                                                            : V::zero());
    }
  }
  for (int64_t x = int64_t(rows) * ld; x < int64_t(rows_padded) * ld; x += V::kWidth) V::store(out + x, V::zero());
}

template <typename V_, int kKeys_>
struct FmaEngine {
  using V = V_;
  using Vec = typename V::Vec;
  using Elem = float;

  static constexpr int kQueries = kFmaQueries;
  static constexpr int kKeys = kKeys_;
  static constexpr int kDepthAlign = 1;  // the contracted dimension needs no padding
  static constexpr int kChannelAlign = V::kWidth;
  static constexpr bool kInPlace = true;  // a score tile is an operand without being copied
  static constexpr int kProbVecs = 1;
  static constexpr bool kPacksTransposedLeft = false;

  struct Session {};  // per-thread state of the processor: none
  static int prepare() { return 0; }

  template <typename T>
  static void pack_left(float* out, int ld, const T* in, int64_t stride, int rows, int rows_padded, int cols) {
    pack_float_rows<V>(out, ld, in, stride, rows, rows_padded, cols);
  }

  // Stores a vector of a score tile into the left operand of a product.
  static void store_left(float* out, typename V::Vec x) { V::store(out, x); }

  // Stores one vector of rows i and i + 1 (i even) of a score tile into the right operand of a product.
  static void store_right(float* out, int i, int j, typename V::Vec x, typename V::Vec y) {
    V::store(out + i * kKeys + j, x);
    V::store(out + (i + 1) * kKeys + j, y);
  }

  template <typename T>
  static void pack_right(float* out, int ld, const T* in, int64_t stride, int rows, int rows_padded, int cols) {
    pack_float_rows<V>(out, ld, in, stride, rows, rows_padded, cols);
  }

  // The transpose [cols][kKeys] of at most kKeys rows, zeros past `rows` up to a vector.
  template <typename T>
  static void pack_right_transposed(float* out, const T* in, int64_t stride, int rows, int cols) {
    for (int i = 0; i < rows; i += V::kWidth) {
      const int ahead = rows - i - kPrefetchRows;
      prefetch_rows<false>(in + int64_t(i + kPrefetchRows) * stride, stride, ahead < V::kWidth ? ahead : V::kWidth,
                           cols);
      for (int j = 0; j < cols; j += V::kWidth) {
        Vec square[V::kWidth];
        for (int r = 0; r < V::kWidth; ++r) {
          const T* row = in + (i + r) * stride + j;
          const int left = i + r < rows ? cols - j : 0;
          square[r] = left >= V::kWidth ? V::load(row) : left > 0 ? V::load_first(row, left) : V::zero();
        }
        V::transpose(square);
        for (int r = 0; r < V::kWidth; ++r) V::store(out + int64_t(j + r) * kKeys + i, square[r]);
      }
    }
  }

  template <bool kAccumulate, int kMaxDepth = 128>
  static void multiply(int m, int n, int k, Left<float> a, const float* b, int ldb, float* c, int ldc) {
    const int depth = n <= kFewColumns ? 16 : kMaxDepth;
    multiply_piece<kAccumulate>(m, n, k < depth ? k : depth, a, b, ldb, c, ldc);
    for (int x = depth; x < k; x += depth) {
      const Left<float> rest{a.data + int64_t(x) * a.depth_stride, a.row_stride, a.depth_stride};
      multiply_piece<true>(m, n, k - x < depth ? k - x : depth, rest, b + int64_t(x) * ldb, ldb, c, ldc);
    }
  }

  // Many short sums round less than a long one, and scores matter most: the absolute error of a score is the relative
  // error of its weight. In pieces of 16 channels the error of O is 0.4 to 0.7 of that in pieces of 128.
  template <bool kPrecise>
  static void multiply_scores(int m, int n, int k, Left<float> a, const float* b, int ldb, float* c, int ldc) {
    multiply</*kAccumulate=*/false, /*kMaxDepth=*/kPrecise ? 16 : 128>(m, n, k, a, b, ldb, c, ldc);
  }

 private:
  // With so few channels, the rounding errors of O or dq do not average out.
  static constexpr int kFewColumns = 4;

  template <bool kAccumulate>
  static void multiply_piece(int m, int n, int k, Left<float> a, const float* b, int ldb, float* c, int ldc) {
    constexpr int kMost = V::kTileVecs;
    int vecs = (n + V::kWidth - 1) / V::kWidth;
    while (vecs > 0) {
      // Two equal strips are faster than a full one and a single vector.
      const int take = vecs <= kMost ? vecs : kMost == 3 && vecs == 4 ? 2 : kMost;
      if (take == 3) {
        strip < kMost<3 ? kMost : 3, kAccumulate>(m, k, a, b, ldb, c, ldc);
      } else if (take == 2) {
        strip<2, kAccumulate>(m, k, a, b, ldb, c, ldc);
      } else {
        strip<1, kAccumulate>(m, k, a, b, ldb, c, ldc);
      }
      b += take * V::kWidth;
      c += take * V::kWidth;
      vecs -= take;
    }
  }

  template <int kVecs, bool kAccumulate>
  static void strip(int m, int k, Left<float> a, const float* b, int ldb, float* c, int ldc) {
    for (int i = 0; i < m; i += V::kTileRows) {
      tile<kVecs, kAccumulate>(k, a.data + i * a.row_stride, a.row_stride, a.depth_stride, b, ldb, c + int64_t(i) * ldc,
                               ldc);
    }
  }

  template <int kVecs, bool kAccumulate>
  static void tile(int k, const float* a, int64_t row_stride, int64_t depth_stride, const float* b, int ldb, float* c,
                   int64_t ldc) {
    constexpr int kRows = V::kTileRows;
    Vec sum[kRows][kVecs];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; ++j) sum[r][j] = V::zero();
    }
    for (int x = 0; x < k; ++x, a += depth_stride, b += ldb) {
      Vec right[kVecs];
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; ++j) right[j] = V::load(b + j * V::kWidth);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Vec left = V::set1(a[r * row_stride]);
#pragma GCC unroll 4
        for (int j = 0; j < kVecs; ++j) sum[r][j] = V::fma(left, right[j], sum[r][j]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; ++j) {
        // C is added last: many short sums round less than one long one.
        float* const to = c + r * ldc + j * V::kWidth;
        V::store(to, kAccumulate ? V::add(V::load(to), sum[r][j]) : sum[r][j]);
      }
    }
  }
};

}  // namespace ds4s::cpu
