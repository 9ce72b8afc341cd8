// AVX2 with FMA and F16C: eight floats a vector.
#pragma once

#include <immintrin.h>

#include "scalar.h"

namespace ds4s::cpu {

struct Avx2 {
  using Vec = __m256;
  using Mask = __m256;

  static constexpr int kWidth = 8;
  // 4 x 3 accumulators, 3 right operands and one broadcast: all sixteen registers.
  static constexpr int kTileRows = 4;
  static constexpr int kTileVecs = 3;

  static Vec zero() { return _mm256_setzero_ps(); }
  static Vec set1(float x) { return _mm256_set1_ps(x); }
  static Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
  static Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
  static Vec fms(Vec a, Vec b, Vec c) { return _mm256_fmsub_ps(a, b, c); }
  static Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }

  static Mask first(int count) { return _mm256_castsi256_ps(first_lanes(count)); }
  static Vec select(Mask mask, Vec yes, Vec no) { return _mm256_blendv_ps(no, yes, mask); }

  static Vec load(const float* p) { return _mm256_loadu_ps(p); }
  static Vec load(const bfloat16_t* p) { return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static Vec load(const half_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static Vec load_first(const float* p, int count) { return _mm256_maskload_ps(p, first_lanes(count)); }
  static Vec load_first(const bfloat16_t* p, int count) { return widen(copy_first(p, count)); }
  static Vec load_first(const half_t* p, int count) { return _mm256_cvtph_ps(copy_first(p, count)); }

  static void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
  static void store(bfloat16_t* p, Vec x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_bfloat16(x)); }
  static void store(half_t* p, Vec x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_half(x)); }
  static void store_first(float* p, Vec x, int count) { _mm256_maskstore_ps(p, first_lanes(count), x); }
  static void store_first(bfloat16_t* p, Vec x, int count) { write_first(p, to_bfloat16(x), count); }
  static void store_first(half_t* p, Vec x, int count) { write_first(p, to_half(x), count); }

  static float reduce_max(Vec x) {
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
  }
  static float reduce_add(Vec x) {
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
  }

  // The transpose of eight vectors: pairs of 32, of 64, then of 128 bits change places.
  static void transpose(Vec (&x)[8]) {
    Vec y[8];
    for (int i = 0; i < 8; i += 2) {
      y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
      y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
    }
    Vec z[8];
    for (int i = 0; i < 8; i += 4) {
      z[i] = _mm256_shuffle_ps(y[i], y[i + 2], 0x44);
      z[i + 1] = _mm256_shuffle_ps(y[i], y[i + 2], 0xee);
      z[i + 2] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0x44);
      z[i + 3] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {
      x[i] = _mm256_permute2f128_ps(z[i], z[4 + i], 0x20);
      x[4 + i] = _mm256_permute2f128_ps(z[i], z[4 + i], 0x31);
    }
  }

  // x * 2^n where z >= cutoff, NaN where z is NaN, else 0. n holds integers from -126 on where z >= cutoff.
  static Vec scale_above(Vec x, Vec n, Vec z, Vec cutoff) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    const Vec scaled = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), exponent));
    const Vec kept = _mm256_and_ps(scaled, _mm256_cmp_ps(z, cutoff, _CMP_GE_OQ));
    return _mm256_or_ps(kept, _mm256_cmp_ps(z, z, _CMP_UNORD_Q));
  }

 private:
  static __m256i first_lanes(int count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static __m128i copy_first(const void* p, int count) {
    alignas(16) uint16_t lanes[8] = {};
    std::memcpy(lanes, p, size_t(count < 8 ? count : 8) * 2);
    return _mm_load_si128(reinterpret_cast<const __m128i*>(lanes));
  }
  static void write_first(void* p, __m128i bits, int count) {
    alignas(16) uint16_t lanes[8];
    _mm_store_si128(reinterpret_cast<__m128i*>(lanes), bits);
    std::memcpy(p, lanes, size_t(count < 8 ? count : 8) * 2);
  }
  static Vec widen(__m128i bits) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16)); }
  static __m128i to_half(Vec x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static __m128i to_bfloat16(Vec x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i nan = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i words = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, nan, is_nan), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  }
};

}  // namespace ds4s::cpu
