// AVX-512 with FMA and F16C: sixteen floats a vector.
#pragma once

#include <immintrin.h>

#include "scalar.h"

namespace ds4s::cpu {

struct Avx512 {
  using Vec = __m512;
  using Mask = __mmask16;

  static constexpr int kWidth = 16;
  // Micro-tile of gemm_fma.h: 8 x 3 accumulators, 3 right operands and one broadcast fill 28 of 32 registers.
  static constexpr int kTileRows = 8;
  static constexpr int kTileVecs = 3;

  static Vec zero() { return _mm512_setzero_ps(); }
  static Vec set1(float x) { return _mm512_set1_ps(x); }
  static Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
  static Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
  static Vec fms(Vec a, Vec b, Vec c) { return _mm512_fmsub_ps(a, b, c); }
  static Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }

  static Mask first(int count) { return count >= 16 ? Mask(0xffff) : Mask((1u << count) - 1); }
  static Vec select(Mask mask, Vec yes, Vec no) { return _mm512_mask_blend_ps(mask, no, yes); }

  static Vec load(const float* p) { return _mm512_loadu_ps(p); }
  static Vec load(const bfloat16_t* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static Vec load(const half_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static Vec load_first(const float* p, int count) { return _mm512_maskz_loadu_ps(first(count), p); }
  static Vec load_first(const bfloat16_t* p, int count) { return widen(_mm256_maskz_loadu_epi16(first(count), p)); }
  static Vec load_first(const half_t* p, int count) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(count), p));
  }

  static void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
  static void store(bfloat16_t* p, Vec x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bfloat16(x)); }
  static void store(half_t* p, Vec x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_half(x)); }
  static void store_first(float* p, Vec x, int count) { _mm512_mask_storeu_ps(p, first(count), x); }
  static void store_first(bfloat16_t* p, Vec x, int count) {
    _mm256_mask_storeu_epi16(p, first(count), to_bfloat16(x));
  }
  static void store_first(half_t* p, Vec x, int count) { _mm256_mask_storeu_epi16(p, first(count), to_half(x)); }

  static float reduce_max(Vec x) { return _mm512_reduce_max_ps(x); }
  static float reduce_add(Vec x) { return _mm512_reduce_add_ps(x); }

  // The transpose of sixteen vectors: pairs of 32, of 64, then of 128 bits change places.
  static void transpose(Vec (&x)[16]) {
    Vec y[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 2) {
      y[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
      y[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
    }
    Vec z[16];
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
      z[i] = unpacklo_pairs(y[i], y[i + 2]);
      z[i + 1] = unpackhi_pairs(y[i], y[i + 2]);
      z[i + 2] = unpacklo_pairs(y[i + 1], y[i + 3]);
      z[i + 3] = unpackhi_pairs(y[i + 1], y[i + 3]);
    }
    // z[4 g + c] holds columns c, c + 4, c + 8, c + 12 of rows 4 g .. 4 g + 3, a quarter each.
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      const Vec low_even = _mm512_shuffle_f32x4(z[c], z[4 + c], 0x88);
      const Vec low_odd = _mm512_shuffle_f32x4(z[c], z[4 + c], 0xdd);
      const Vec high_even = _mm512_shuffle_f32x4(z[8 + c], z[12 + c], 0x88);
      const Vec high_odd = _mm512_shuffle_f32x4(z[8 + c], z[12 + c], 0xdd);
      x[c] = _mm512_shuffle_f32x4(low_even, high_even, 0x88);
      x[8 + c] = _mm512_shuffle_f32x4(low_even, high_even, 0xdd);
      x[4 + c] = _mm512_shuffle_f32x4(low_odd, high_odd, 0x88);
      x[12 + c] = _mm512_shuffle_f32x4(low_odd, high_odd, 0xdd);
    }
  }

  // z - floor(z).
  static Vec above_floor(Vec z) { return _mm512_reduce_ps(z, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }

  // x * 2^floor(n) where z >= cutoff or z is NaN, else 0.
  static Vec scale_above(Vec x, Vec n, Vec z, Vec cutoff) {
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(z, cutoff, _CMP_NLT_UQ), x, n);
  }

 private:
  static Vec unpacklo_pairs(Vec a, Vec b) {
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  }
  static Vec unpackhi_pairs(Vec a, Vec b) {
    return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  }
  static Vec widen(__m256i bits) {
    // Word 2 i + 1 from word i, zeros between: one instruction where conversion and shift are two.
    const __m512i order = _mm512_set_epi16(15, 0, 14, 0, 13, 0, 12, 0, 11, 0, 10, 0, 9, 0, 8, 0, 7, 0, 6, 0, 5, 0, 4, 0,
                                           3, 0, 2, 0, 1, 0, 0, 0);
    return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, order, _mm512_castsi256_si512(bits)));
  }
  static __m256i to_half(Vec x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static __m256i to_bfloat16(Vec x) {
    // Not vcvtneps2bf16: it flushes denormals, and eager PyTorch keeps them.
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512i nan = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const Mask is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_blend_epi32(is_nan, rounded, nan), 16));
  }
};

}  // namespace ds4s::cpu
