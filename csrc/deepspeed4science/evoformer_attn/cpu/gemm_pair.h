// The pair engine: bfloat16 products with float32 sums, two depths at a time.
//
// C[m][n] (+)= sum over k of A[m][k] B[k][n]. The left operand is row-major. The right operand holds two rows
// interleaved, [k / 2][n][2] (VNNI), as both `vdpbf16ps` and the AMX tile product read it. A vector of float scores
// becomes part of a left operand by conversion, and of a right operand by one more permutation. Q, K, V, dO are packed
// as 32-bit pairs, so that a transposition moves pairs.
//
// Multiplier supplies kDepthAlign, kChannelAlign, Session, prepare() and multiply<kAccumulate>(...).
#pragma once

#include <immintrin.h>

#include "gemm_fma.h"
#include "isa_avx512.h"

namespace ds4s::cpu {

template <typename Multiplier, int kQueries_, int kKeys_>
struct PairEngine {
  using V = Avx512;
  using Elem = bfloat16_t;

  static constexpr int kQueries = kQueries_;  // a multiple of 32, the depth of an AMX tile product
  static constexpr int kKeys = kKeys_;
  static constexpr int kDepthAlign = Multiplier::kDepthAlign;
  static constexpr int kChannelAlign = Multiplier::kChannelAlign;
  static constexpr bool kInPlace = false;
  static constexpr int kProbVecs = 2;  // vectors that the forward's softmax computes at a time
  static constexpr bool kPacksTransposedLeft = true;

  using Session = typename Multiplier::Session;
  static int prepare() { return Multiplier::prepare(); }

  // Row-major, zeros past `cols` and past `rows`.
  static void pack_left(Elem* out, int ld, const Elem* in, int64_t stride, int rows, int rows_padded, int cols) {
    for (int i = 0; i < rows_padded; ++i) {
      if (i + kPrefetchRows < rows) prefetch_rows<false>(in + (i + kPrefetchRows) * stride, stride, 1, cols);
      for (int j = 0; j < ld; j += 16) {
        const __m256i words = i < rows ? load_words(in + i * stride + j, cols - j) : _mm256_setzero_si256();
        store_half(out + int64_t(i) * ld + j, words);
      }
    }
  }

  // [kQueries][channels] to [channels][kQueries].
  static void transpose_left(Elem* out, const Elem* in, int channels) {
    for (int i = 0; i < kQueries; i += 32) {
      for (int j = 0; j < channels; j += 16) {
        __m512 pairs[16];
        for (int r = 0; r < 16; ++r) {
          const Elem* row = in + int64_t(i + 2 * r) * channels + j;
          pairs[r] = interleave(load_words(row, 16), load_words(row + channels, 16));
        }
        V::transpose(pairs);
        for (int r = 0; r < 16; ++r) {
          _mm512_storeu_ps(reinterpret_cast<float*>(out + int64_t(j + r) * kQueries + i), pairs[r]);
        }
      }
    }
  }

  static void pack_right(Elem* out, int ld, const Elem* in, int64_t stride, int rows, int rows_padded, int cols) {
    for (int i = 0; i < rows_padded; i += 2) {
      if (i + kPrefetchRows + 1 < rows) prefetch_rows<false>(in + (i + kPrefetchRows) * stride, stride, 2, cols);
      for (int j = 0; j < ld; j += 16) {
        const __m256i even = i < rows ? load_words(in + i * stride + j, cols - j) : _mm256_setzero_si256();
        const __m256i odd = i + 1 < rows ? load_words(in + (i + 1) * stride + j, cols - j) : _mm256_setzero_si256();
        _mm512_storeu_ps(reinterpret_cast<float*>(out + int64_t(i) * ld + 2 * j), interleave(even, odd));
      }
    }
  }

  // At most kKeys rows to [cols / 2][kKeys][2], zeros past `cols` up to kChannelAlign and past `rows` up to 16.
  static void pack_right_transposed(Elem* out, const Elem* in, int64_t stride, int rows, int cols) {
    const int padded = round_up(cols, kChannelAlign);
    for (int i = 0; i < rows; i += 16) {
      const int ahead = rows - i - kPrefetchRows;
      prefetch_rows<false>(in + int64_t(i + kPrefetchRows) * stride, stride, ahead < 16 ? ahead : 16, cols);
      for (int j = 0; j < padded; j += 32) {
        __m512 pairs[16];
        for (int r = 0; r < 16; ++r) {
          const int left = i + r < rows ? cols - j : 0;
          const __mmask32 mask = left >= 32 ? ~__mmask32(0) : left > 0 ? (__mmask32(1) << left) - 1 : 0;
          pairs[r] = _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(mask, in + (i + r) * stride + j));
        }
        V::transpose(pairs);
        const int count = padded - j < 32 ? (padded - j) / 2 : 16;
        for (int r = 0; r < count; ++r) {
          _mm512_storeu_ps(reinterpret_cast<float*>(out + (int64_t(j / 2 + r) * kKeys + i) * 2), pairs[r]);
        }
      }
    }
  }

  static void store_left(Elem* out, __m512 x) { store_half(out, reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x))); }

  // Two vectors of one row: one conversion instead of two.
  static void store_left(Elem* out, __m512 x, __m512 y) {
    _mm512_storeu_si512(out, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(y, x)));
  }

  // One vector of rows i and i + 1 (i even).
  static void store_right(Elem* out, int i, int j, __m512 x, __m512 y) {
    const __m512i halves = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(y, x));
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    _mm512_storeu_si512(out + int64_t(i) * kKeys + 2 * j, _mm512_permutexvar_epi16(order, halves));
  }

  template <bool kAccumulate>
  static void multiply(int m, int n, int k, Left<Elem> a, const Elem* b, int ldb, float* c, int ldc) {
    Multiplier::template multiply<kAccumulate>(m, n, k, a, b, ldb, c, ldc);
  }

  template <bool kPrecise>
  static void multiply_scores(int m, int n, int k, Left<Elem> a, const Elem* b, int ldb, float* c, int ldc) {
    multiply</*kAccumulate=*/false>(m, n, k, a, b, ldb, c, ldc);
  }

 private:
  static __m256i load_words(const Elem* p, int count) {
    const __mmask16 mask = count >= 16 ? __mmask16(0xffff) : count > 0 ? __mmask16((1u << count) - 1) : 0;
    return _mm256_maskz_loadu_epi16(mask, p);
  }
  static void store_half(Elem* p, __m256i words) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), words); }
  static __m512 interleave(__m256i even, __m256i odd) {
    return _mm512_castsi512_ps(
        _mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16)));
  }
};

// AVX512-BF16: the fma engine's micro-tile with a pair for a float.
struct DotMultiplier {
  static constexpr int kDepthAlign = 2;
  static constexpr int kChannelAlign = 16;

  struct Session {};
  static int prepare() { return 0; }

  template <bool kAccumulate>
  static void multiply(int m, int n, int k, Left<bfloat16_t> a, const bfloat16_t* b, int ldb, float* c, int ldc) {
    int vecs = (n + 15) / 16;
    while (vecs > 0) {
      const int take = vecs == 4 ? 2 : vecs < 3 ? vecs : 3;
      if (take == 3) {
        strip<3, kAccumulate>(m, k, a, b, ldb, c, ldc);
      } else if (take == 2) {
        strip<2, kAccumulate>(m, k, a, b, ldb, c, ldc);
      } else {
        strip<1, kAccumulate>(m, k, a, b, ldb, c, ldc);
      }
      b += take * 32;
      c += take * 16;
      vecs -= take;
    }
  }

 private:
  static constexpr int kRows = 8;

  template <int kVecs, bool kAccumulate>
  static void strip(int m, int k, Left<bfloat16_t> a, const bfloat16_t* b, int ldb, float* c, int ldc) {
    for (int i = 0; i < m; i += kRows) {
      tile<kVecs, kAccumulate>((k + 1) / 2, a.data + int64_t(i) * a.row_stride, a.row_stride, b, ldb,
                               c + int64_t(i) * ldc, ldc);
    }
  }

  template <int kVecs, bool kAccumulate>
  static void tile(int pairs, const bfloat16_t* a, int64_t row_stride, const bfloat16_t* b, int64_t ldb, float* c,
                   int64_t ldc) {
    __m512 sum[kRows][kVecs];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; ++j) sum[r][j] = _mm512_setzero_ps();
    }
    for (int x = 0; x < pairs; ++x, a += 2, b += 2 * ldb) {
      __m512i right[kVecs];
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; ++j) right[j] = _mm512_loadu_si512(b + j * 32);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        int32_t pair;
        std::memcpy(&pair, a + r * row_stride, sizeof pair);
        const __m512i left = _mm512_set1_epi32(pair);
#pragma GCC unroll 4
        for (int j = 0; j < kVecs; ++j) sum[r][j] = dot(sum[r][j], left, right[j]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; ++j) {
        float* const to = c + r * ldc + j * 16;
        _mm512_storeu_ps(to, kAccumulate ? _mm512_add_ps(_mm512_loadu_ps(to), sum[r][j]) : sum[r][j]);
      }
    }
  }

  static __m512 dot(__m512 sum, __m512i left, __m512i right) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(left), reinterpret_cast<__m512bh>(right));
  }
};

}  // namespace ds4s::cpu
