// How a kernel tells the last one of a backward that it has something to do (common/postprocess.h).
#pragma once

#include "ptx.h"

namespace ds4s {

// A word that nobody has cleared: it is raised where it holds a number that is another one in each call. One that
// holds it by chance, or since a graph was replayed before, costs time and changes nothing.
struct PostprocessFlag {
  uint32_t* word;
  uint32_t raised;

  CUTLASS_DEVICE void raise() const { *word = raised; }
  CUTLASS_DEVICE bool is_raised() const { return ptx::load_written(word) == raised; }
};

}  // namespace ds4s
