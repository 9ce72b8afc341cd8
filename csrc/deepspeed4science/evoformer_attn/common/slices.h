// The number of slices of the rows n for kernel_dbias2, such that its blocks fill the device evenly.
#pragma once

#include <algorithm>

#include "common/workspace.h"

namespace ds4s {

constexpr int64_t kMostSlices = 16;

// The number of slices, `least` or more, of at least eight rows n each, with the lowest estimated time: waves of blocks
// times rows n of a slice. Each slice adds 2 %, since it reads bias2 and adds to dbias2 once more.
inline int64_t choose_slices(int64_t N, int64_t num_tiles, int64_t resident_blocks, int64_t least = 1) {
  resident_blocks = std::max(resident_blocks, int64_t(1));
  const int64_t most = std::max(std::min(N / 8, kMostSlices), int64_t(1)), first = std::min(least, most);
  int64_t best = first;
  double best_cost = 0;
  for (int64_t slices = first; slices <= most; ++slices) {
    const double waves = double(ceil_div(num_tiles * slices, resident_blocks));
    const double cost = waves / double(slices) * (1.0 + 0.02 * double(slices));
    if (slices == first || cost < best_cost) best = slices, best_cost = cost;
  }
  return best;
}

}  // namespace ds4s
