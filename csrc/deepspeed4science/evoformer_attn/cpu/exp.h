// exp and log over an ISA policy.
#pragma once

#include "scalar.h"

namespace ds4s::cpu {

// Below this, exp would be a denormal float and is taken as 0: products with denormals are a hundred times slower.
constexpr float kExpCutoff = -87.33f;

constexpr float kLog2e = 0x1.715476p0f;

// exp(z) for z <= 0 (or slightly above), NaN for NaN. Relative error: kPrecise 1e-7, otherwise 3e-6 (more without a
// fused multiply-add, of the size of the rounding of z log2 e).
// n = round(z log2 e), then exp z = 2^n exp(z - n ln 2), the latter by a minimax polynomial with exp 0 = 1.
template <bool kPrecise, typename V>
inline typename V::Vec exp(typename V::Vec z) {
  using Vec = typename V::Vec;
  const Vec magic = V::set1(0x1.8p23f);  // adding it leaves an integer in the low bits of the significand
  const Vec log2e = V::set1(kLog2e);
  const Vec n = V::sub(V::fma(z, log2e, magic), magic);
  Vec r, y;
  if constexpr (kPrecise) {
    // ln 2 in two parts, the first of nine bits: n times it is exact, so processors without fma lose nothing.
    r = V::fma(n, V::set1(-0x1.63p-1f), z);
    r = V::fma(n, V::set1(0x1.bd0106p-13f), r);
    y = V::set1(0x1.6ae702p-10f);
    y = V::fma(y, r, V::set1(0x1.1267b2p-7f));
    y = V::fma(y, r, V::set1(0x1.555824p-5f));
    y = V::fma(y, r, V::set1(0x1.55541ap-3f));
    y = V::fma(y, r, V::set1(0x1.fffffcp-2f));
    y = V::fma(y, r, V::set1(1.0f));
  } else {
    r = V::fms(z, log2e, n);
    y = V::set1(0x1.3a02ccp-7f);
    y = V::fma(y, r, V::set1(0x1.c9fc46p-5f));
    y = V::fma(y, r, V::set1(0x1.ec0378p-3f));
    y = V::fma(y, r, V::set1(0x1.62e12cp-1f));
  }
  y = V::fma(y, r, V::set1(1.0f));
  return V::scale_above(y, n, z, V::set1(kExpCutoff));
}

// For a larger base, multiplying by log2 e before the subtraction loses too many digits.
constexpr float kCoarseExpLimit = 256.0f;

// 2^z for results that become bfloat16: relative error 7.5e-5, NaN for NaN, 0 below the smallest normal float.
template <typename V>
inline typename V::Vec coarse_exp2(typename V::Vec z) {
  using Vec = typename V::Vec;
  const Vec r = V::above_floor(z);
  Vec y = V::set1(0x1.3f96a4p-4f);
  y = V::fma(y, r, V::set1(0x1.cefc4cp-3f));
  y = V::fma(y, r, V::set1(0x1.64444cp-1f));
  y = V::fma(y, r, V::set1(0x1.fff632p-1f));
  return V::scale_above(y, z, z, V::set1(-126.0f));
}

}  // namespace ds4s::cpu
