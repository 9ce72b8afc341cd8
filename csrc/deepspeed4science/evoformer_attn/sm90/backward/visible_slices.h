// How kernel_dbias2 divides the rows n, by the visible keys: as RowPartition says where all tiles that see any have
// equally many, else in slices, whose number is chosen as on the host (common/slices.h). With hidden keys, tiles may
// have different numbers of rows n, and some none; more slices distribute the work more evenly.
#pragma once

#include "common/slices.h"
#include "sm90/backward/args.h"

namespace ds4s::sm90 {

struct VisibleSlices {
  int num_slices;
  // Of all lists that are not empty, where these are equally long and the first ones of each batch; else 0.
  int num_rows;
  int lists;  // of a batch that are not empty
};

// Called by a warp. The estimate counts the rows n of all lists as so many tiles with the longest list's length,
// `largest`.
CUTLASS_DEVICE VisibleSlices choose_visible_slices(const BackwardArgs& args, int num_clusters) {
  const RowLists& lists = args.row_lists;
  const int lane = int(threadIdx.x) % 32, num_lists = args.B * lists.tiles;
  int total = 0, largest = 0, num_visible = 0;  // num_visible: lists that are not empty
  int count = 0;                                // of this lane's list, where there are up to 32
  CUTLASS_PRAGMA_NO_UNROLL
  for (int i = lane; i < num_lists; i += 32) {
    count = lists.counts[i];
    total += count, largest = max(largest, count), num_visible += count > 0;
  }
  total = int(__reduce_add_sync(0xffffffffu, uint32_t(total)));
  largest = max(int(__reduce_max_sync(0xffffffffu, uint32_t(largest))), 1);
  num_visible = int(__reduce_add_sync(0xffffffffu, uint32_t(num_visible)));
  const int visible = args.B == 1 ? num_visible : num_visible / args.B;
  const int list = args.B == 1 ? lane : lane % lists.tiles;
  const bool equal =
      __all_sync(0xffffffffu, count == (lane < num_lists && list < visible ? largest : 0)) && num_lists <= 32;
  const int tiles_of_list = args.num_tiles / num_lists;
  const float clusters = float(num_clusters), tiles = float(tiles_of_list) * float(total) / float(largest);
  // Where tiles differ in cost, at least four for each cluster.
  const bool differ = total < largest * num_visible;
  const int least = differ ? (4 * num_clusters - 1) / (tiles_of_list * num_visible) + 1 : 1;

  // Each lane rates one number of slices. 0.01 keeps a rounding error from adding a wave.
  const int slices = lane + 1, most = max(min(largest / 8, int(kMostSlices)), 1);
  const float waves = ceilf(tiles * float(slices) / clusters - 0.01f);
  const float cost = slices >= min(least, most) && slices <= most ? waves * (1.f / float(slices) + 0.02f) : infinity();
  const int best = int(__reduce_min_sync(0xffffffffu, (__float_as_uint(cost) & ~31u) | uint32_t(lane)) & 31u) + 1;
  // Where blocks have many tiles, slices of 96 n are faster (plan.h).
  const int num_slices = tiles < 4.f * clusters ? best : max(best, min((largest + 95) / 96, int(kMostSlices)));
  return {num_slices, equal && visible > 0 ? largest : 0, visible};
}

}  // namespace ds4s::sm90
