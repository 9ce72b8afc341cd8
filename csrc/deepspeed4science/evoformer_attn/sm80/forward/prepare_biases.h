// Runs before the forward where it reads bias2 in tiles: a block finds the visible keys of a row n, or copies a tile.
// As two kernels, one after the other, they would take 1 to 2 us more.
#pragma once

#include "common/key_mask.h"
#include "common/repack.h"

namespace ds4s {

// num_rows: rows n whose keys are found, none without bias1 and row_mask; the other blocks copy tiles.
template <typename scalar_t>
__global__ void __launch_bounds__(kTileThreads)
    prepare_biases(const __grid_constant__ KeyMaskArgs key_mask, const uint32_t num_rows,
                   const __grid_constant__ TileParams tiles) {
  static_assert(kTileThreads == kKeyMaskThreads, "a block may do either");
  ptx::wait_for_kernel_before();
  ptx::let_next_kernel_start();
  if (blockIdx.x < num_rows) {
    find_visible_keys_of<scalar_t>(key_mask, blockIdx.x);
  } else {
    repack_tile<scalar_t>(tiles, blockIdx.x - num_rows);
  }
}

}  // namespace ds4s
