// When a key is hidden (params.h).
#pragma once

#include "../params.h"
#include "ptx.h"

namespace ds4s {

// Which keys a row n sees, by the largest finite bias1 of that row: -inf where it has none.
template <typename scalar_t>
struct MaskRule {
  static constexpr bool kHalf = cutlass::platform::is_same<scalar_t, cutlass::half_t>::value;
  static constexpr float kThreshold = kMaskThreshold[kHalf ? kFloat16 : kFloat32];

  // Not -inf and not so far below the largest (of which a huge one is its own limit). NaN is visible, and so is +inf.
  CUTLASS_DEVICE static bool is_visible(float bias1, float largest) {
    return !(bias1 <= largest - kThreshold) || (bias1 == largest && bias1 > -infinity());
  }
  CUTLASS_DEVICE static float shift(float largest) { return largest > -infinity() ? largest : 0.f; }
};

}  // namespace ds4s
