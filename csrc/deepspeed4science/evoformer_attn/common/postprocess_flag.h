// The flag that a backward's kernels raise where its last kernel (common/postprocess.h) must repair gradients.
#pragma once

#include "ptx.h"

namespace ds4s {

// The flag is a word in the workspace. It is raised if it holds the number of this call; each call has another number,
// so the word is never cleared. If it holds the number by chance, or from an earlier replay of the same CUDA graph, the
// last kernel runs without need: this costs time and changes no result.
struct PostprocessFlag {
  uint32_t* word;
  uint32_t raised;

  CUTLASS_DEVICE void raise() const { *word = raised; }
  CUTLASS_DEVICE bool is_raised() const { return ptx::load_written(word) == raised; }
};

}  // namespace ds4s
