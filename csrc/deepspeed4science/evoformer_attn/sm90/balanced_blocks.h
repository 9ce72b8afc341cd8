// The number of blocks of a persistent kernel whose blocks take every so many-th tile, one row n after
// another. No CUDA, for host tests.
#pragma once

#include <cstdint>
#include <numeric>

#include "common/workspace.h"

namespace ds4s::sm90 {

// Of at most `tiles` blocks. A tile has `parts_of_tile` of the `parts` that queries or keys of a row n consist of, a
// part for a warpgroup. Where that does not divide evenly, the last tile of each row n is short: it takes about three
// quarters of the time of a whole one. If the number of blocks and that of tiles of a row n had a common divisor, some
// blocks would get all short tiles and others none. So a block or two stay idle, if the others then have less to do.
inline int64_t balanced_blocks(int64_t blocks, int64_t tiles, int64_t parts, int64_t parts_of_tile) {
  if (blocks < 2 || parts % parts_of_tile == 0) return blocks;
  const int64_t of_row = ceil_div(parts, parts_of_tile);
  int64_t coprime = blocks;
  while (std::gcd(coprime, of_row) != 1) --coprime;
  const bool pays = ceil_div(tiles, coprime) * (4 * of_row - 1) < ceil_div(tiles, blocks) * 4 * of_row;
  return pays ? coprime : blocks;
}

}  // namespace ds4s::sm90
