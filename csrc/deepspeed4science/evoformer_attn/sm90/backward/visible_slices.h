// common/slices.h on the device: into how many slices the rows n are cut for kernel_dbias2, when it is known what is
// visible. With hidden keys tiles have different numbers of rows n, and some none: more slices share them out.
#pragma once

#include "common/slices.h"
#include "sm90/backward/args.h"

namespace ds4s::sm90 {

// By a warp. Tiles count as if all visible rows n were those of tiles that have the most, `largest` each.
CUTLASS_DEVICE int choose_visible_slices(const BackwardArgs& args, int num_clusters) {
  const RowLists& lists = args.row_lists;
  const int lane = int(threadIdx.x) % 32, num_lists = args.B * lists.tiles;
  int total = 0, largest = 0, num_visible = 0;  // lists that are not empty
  CUTLASS_PRAGMA_NO_UNROLL
  for (int i = lane; i < num_lists; i += 32) {
    const int count = lists.counts[i];
    total += count, largest = max(largest, count), num_visible += count > 0;
  }
  total = int(__reduce_add_sync(0xffffffffu, uint32_t(total)));
  largest = max(int(__reduce_max_sync(0xffffffffu, uint32_t(largest))), 1);
  num_visible = int(__reduce_add_sync(0xffffffffu, uint32_t(num_visible)));
  const int tiles_of_list = args.num_tiles / num_lists;
  const float clusters = float(num_clusters), tiles = float(tiles_of_list) * float(total) / float(largest);
  // Where tiles cost different amounts, at least four for each cluster.
  const bool differ = total < largest * num_visible;
  const int least = differ ? (4 * num_clusters - 1) / (tiles_of_list * num_visible) + 1 : 1;

  // A lane for each number of slices. Waves that are missed by a rounding are none.
  const int slices = lane + 1, most = max(min(largest / 8, int(kMostSlices)), 1);
  const float waves = ceilf(tiles * float(slices) / clusters - 0.01f);
  const float cost = slices >= min(least, most) && slices <= most ? waves * (1.f / float(slices) + 0.02f) : infinity();
  const int best = int(__reduce_min_sync(0xffffffffu, (__float_as_uint(cost) & ~31u) | uint32_t(lane)) & 31u) + 1;
  // Where blocks come to many tiles, slices of 96 n are faster (plan.h).
  return tiles < 4.f * clusters ? best : max(best, min((largest + 95) / 96, int(kMostSlices)));
}

}  // namespace ds4s::sm90
