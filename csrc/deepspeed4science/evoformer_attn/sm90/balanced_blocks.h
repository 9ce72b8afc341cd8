// The number of blocks of a persistent kernel whose blocks take every so many-th tile. No CUDA, for host tests.
#pragma once

#include <cstdint>
#include <numeric>

#include "common/workspace.h"

namespace ds4s::sm90 {

// Of at most `tiles` blocks. Every `period`-th tile is short, because only some warpgroups have queries or keys in it.
// If the number of blocks and the period had a common divisor, some blocks would get all short tiles and others none.
// So a block or two stay idle, where that is less work for the others: a short tile takes about three quarters of the
// time of a whole one.
inline int64_t balanced_blocks(int64_t blocks, int64_t tiles, int64_t period) {
  if (blocks < 2) return blocks;
  int64_t coprime = blocks;
  while (std::gcd(coprime, period) != 1) --coprime;
  const bool pays = ceil_div(tiles, coprime) * (4 * period - 1) < ceil_div(tiles, blocks) * 4 * period;
  return pays ? coprime : blocks;
}

}  // namespace ds4s::sm90
