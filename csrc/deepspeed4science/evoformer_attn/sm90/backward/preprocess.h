// Before the passes of the Hopper backward: what common/preprocess.h wants to know.
#pragma once

#include "common/preprocess.h"

namespace ds4s::sm90 {

// Rows on 16 bytes, as the tensor memory accelerator needs them.
template <typename Element, int kHeadDim_>
struct PrepareConfig {
  using scalar_t = Element;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kIsAligned = true, kTf32 = false;
};

}  // namespace ds4s::sm90
