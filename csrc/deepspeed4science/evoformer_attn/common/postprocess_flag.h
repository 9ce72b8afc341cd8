// The flag by which kernels of a backward tell its last one that it has work to do (common/postprocess.h).
#pragma once

#include "ptx.h"

namespace ds4s {

// The word is never cleared: it counts as raised where it holds the number of this call, and each call has another
// number. A word that holds the number by chance, or from an earlier replay of the same graph, costs time and changes
// no result.
struct PostprocessFlag {
  uint32_t* word;
  uint32_t raised;

  CUTLASS_DEVICE void raise() const { *word = raised; }
  CUTLASS_DEVICE bool is_raised() const { return ptx::load_written(word) == raised; }
};

}  // namespace ds4s
