// When a key is hidden, math.md (6a).
#pragma once

#include "../params.h"
#include "ptx.h"

namespace ds4s {

// Which keys a row n sees, given the largest finite bias1 of that row (-inf where there is none).
template <typename scalar_t>
struct MaskRule {
  static constexpr bool kHalf = cutlass::platform::is_same<scalar_t, cutlass::half_t>::value;
  static constexpr float kThreshold = kMaskThreshold[kHalf ? kFloat16 : kFloat32];

  // Neither -inf nor too far below the largest one. A huge largest one equals its own limit and stays visible. NaN and
  // +inf are visible.
  CUTLASS_DEVICE static bool is_visible(float bias1, float largest) {
    return !(bias1 <= largest - kThreshold) || (bias1 == largest && bias1 > -infinity());
  }
  CUTLASS_DEVICE static float shift(float largest) { return largest > -infinity() ? largest : 0.f; }
};

}  // namespace ds4s
