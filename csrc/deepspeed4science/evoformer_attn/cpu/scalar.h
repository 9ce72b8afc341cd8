// The 16-bit number types as bits, with exact scalar conversions (round to nearest, ties to even).
#pragma once

#include <cstdint>
#include <cstring>

// gcc and clang define it, as 0 or 1. Masks are infinities, and NaNs must be kept.
#if __FINITE_MATH_ONLY__
#error "this compiler assumes that there are no infinities (-ffast-math): name another one in CXX"
#endif

namespace ds4s::cpu {

struct bfloat16_t {
  uint16_t bits;
};

struct half_t {
  uint16_t bits;
};

inline uint32_t float_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float float_from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

constexpr float kInfinity = __builtin_inff();

inline float to_float(float x) { return x; }

inline float to_float(bfloat16_t x) { return float_from_bits(uint32_t(x.bits) << 16); }

inline float to_float(half_t x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16;
  const uint32_t magnitude = x.bits & 0x7fff;
  if (magnitude >= 0x7c00) return float_from_bits(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  if (magnitude < 0x0400) {  // zero and denormals: a multiple of 2^-24
    const float value = float(magnitude) * 0x1p-24f;
    return sign ? -value : value;
  }
  return float_from_bits(sign | ((magnitude << 13) + (112u << 23)));
}

template <typename T>
T from_float(float x);

template <>
inline float from_float<float>(float x) {
  return x;
}

template <>
inline bfloat16_t from_float<bfloat16_t>(float x) {
  const uint32_t bits = float_bits(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return {uint16_t(bits >> 16 | 0x40)};
  return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

template <>
inline half_t from_float<half_t>(float x) {
  const uint32_t bits = float_bits(x);
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return {uint16_t(sign | 0x7e00)};
  if (magnitude >= 0x477ff000) return {uint16_t(sign | 0x7c00)};  // rounds past 65504
  if (magnitude < 0x38800000) {
    // Below 2^-14: adding 2^-1 * 2^0 aligns the last bit at 2^-24, and the addition rounds.
    const float aligned = float_from_bits(magnitude) + 0.5f;
    return {uint16_t(sign | (float_bits(aligned) - 0x3f000000))};
  }
  const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
  return {uint16_t(sign | (rounded - (112u << 23)) >> 13)};
}

}  // namespace ds4s::cpu
