// The tiles of a persistent kernel's last round, of two rows n each. No CUDA, for host tests.
#pragma once

#include <cstdint>

namespace ds4s::sm90 {

// Tiles from first_half on are halves: numbers first_half + 2 i and first_half + 2 i + 1 are the two rows n of tile
// first_half + i.
struct HalfTiles {
  int64_t first_half, num_tiles;  // num_tiles: with each half as one

  // Where at most half of the blocks have a tile in the last round, twice as many have half a tile, which takes about
  // 0.8 of the time: a step takes less where fewer warpgroups are at work on a multiprocessor.
  static HalfTiles of(int64_t tiles, int64_t blocks) {
    const int64_t last = tiles % blocks;
    return 2 * last <= blocks ? HalfTiles{tiles - last, tiles + last} : HalfTiles{tiles, tiles};
  }
};

}  // namespace ds4s::sm90
