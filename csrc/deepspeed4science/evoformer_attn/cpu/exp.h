// exp and log over an ISA policy.
#pragma once

#include "scalar.h"

namespace ds4s::cpu {

// Below this exp is a denormal float: taken as 0, since products with denormals are a hundred times slower.
constexpr float kExpCutoff = -87.33f;

// exp(z) for z <= 0 (or slightly above), NaN for NaN. Relative error: kPrecise 1e-7, otherwise 3e-6.
// n = round(z log2 e), r = z log2 e - n in [-1/2, 1/2], exp z = 2^n 2^r; 2^r by a minimax polynomial with 2^0 = 1.
template <bool kPrecise, typename V>
inline typename V::Vec exp(typename V::Vec z) {
  using Vec = typename V::Vec;
  const Vec magic = V::set1(0x1.8p23f);  // adding it leaves an integer in the low bits of the significand
  const Vec log2e = V::set1(0x1.715476p0f);
  const Vec n = V::sub(V::fma(z, log2e, magic), magic);
  Vec r = V::fms(z, log2e, n);
  Vec y;
  if constexpr (kPrecise) {
    r = V::fma(z, V::set1(0x1.4ae0c0p-26f), r);  // log2 e - float(log2 e)
    y = V::set1(0x1.41fbbcp-13f);
    y = V::fma(y, r, V::set1(0x1.5f3e54p-10f));
    y = V::fma(y, r, V::set1(0x1.3b2d4cp-7f));
    y = V::fma(y, r, V::set1(0x1.c6aee8p-5f));
    y = V::fma(y, r, V::set1(0x1.ebfbdcp-3f));
    y = V::fma(y, r, V::set1(0x1.62e430p-1f));
  } else {
    y = V::set1(0x1.3a02ccp-7f);
    y = V::fma(y, r, V::set1(0x1.c9fc46p-5f));
    y = V::fma(y, r, V::set1(0x1.ec0378p-3f));
    y = V::fma(y, r, V::set1(0x1.62e12cp-1f));
  }
  y = V::fma(y, r, V::set1(1.0f));
  return V::scale_above(y, n, z, V::set1(kExpCutoff));
}

}  // namespace ds4s::cpu
