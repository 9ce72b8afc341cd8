// The tiles of keys that kernel_dq_dkdv computes where its blocks take tiles from a counter (Config::kTakesTiles): of
// each (b, n, h) those from the first to the last key that some row n sees. Blocks count only these, so that no more
// (b, n, h) are under way, and have an accumulator of dq, than their computed tiles need. dk and dv of the others are
// zero (zero_gradients.h).
#pragma once

#include "common/preprocess.h"
#include "sm90/backward/args.h"

namespace ds4s::sm90 {

struct SeenTiles {
  cutlass::FastDivmod by_blocks;  // of a (b, n, h): one or more
  int first;                      // the first one, among all tiles of a (b, n, h)
  int count;                      // of the whole grid

  // Called by one thread, after find_seen_tiles where a mask is given. If this code found the divisor, ptxas would
  // spill registers of consumers.
  CUTLASS_DEVICE void load(const BackwardArgs& args) {
    by_blocks = args.by_blocks, first = 0, count = args.num_tiles;
    if (args.seen_tiles == nullptr) return;
    const int2 low = ptx::load_written(args.seen_tiles), high = ptx::load_written(args.seen_tiles + 1);
    by_blocks.divisor = low.x, by_blocks.multiplier = low.y, by_blocks.shift_right = high.x, first = high.y;
    count = args.by_blocks.div(args.num_tiles) * low.x;
  }

  // by_blocks.divisor, for threads of kernels after find_seen_tiles.
  CUTLASS_DEVICE static int num_of_pair(const BackwardArgs& args) {
    return args.seen_tiles == nullptr ? args.by_blocks.divisor : ptx::load_written(args.seen_tiles).x;
  }

  // The number among all tiles of the i-th seen one; args.num_tiles or more past the last one.
  CUTLASS_DEVICE int tile(const BackwardArgs& args, int i) const {
    if (args.seen_tiles == nullptr) return i;
    int pair, of_pair;
    by_blocks(pair, of_pair, i);
    return i < count ? pair * args.by_blocks.divisor + first + of_pair : args.num_tiles;
  }

  // So many tiles of a (b, n, h) are left out. The i-th of them, among all of its tiles.
  CUTLASS_DEVICE int num_left_out(const BackwardArgs& args) const { return args.by_blocks.divisor - by_blocks.divisor; }
  CUTLASS_DEVICE int left_out(int i) const { return i < first ? i : i + by_blocks.divisor; }
};

struct FindSeenTilesArgs {
  KeyMask mask;
  int32_t rows, Lk, tile_keys;  // rows n of all b
  int2* tiles;                  // the result, SeenTiles but for its count, or null
};

// Called by a block of kPrepareThreads. keys: shared memory; all visible keys lie from x to below y.
static CUTLASS_DEVICE void find_seen_tiles(const FindSeenTilesArgs& args, int2& keys) {
  if (threadIdx.x == 0) keys = make_int2(args.Lk, 0);
  __syncthreads();
  int2 mine = make_int2(args.Lk, 0);
  for (int bn = int(threadIdx.x); bn < args.rows; bn += kPrepareThreads) {
    const int2 seen = args.mask.keys_now(bn, args.Lk);
    if (seen.x < seen.y) mine.x = min(mine.x, seen.x), mine.y = max(mine.y, seen.y);
  }
  mine.x = __reduce_min_sync(0xffffffffu, mine.x), mine.y = __reduce_max_sync(0xffffffffu, mine.y);
  if (threadIdx.x % 32 == 0) atomicMin(&keys.x, mine.x), atomicMax(&keys.y, mine.y);
  __syncthreads();
  if (threadIdx.x != 0) return;
  const bool any = keys.x < keys.y;
  const int first = any ? keys.x / args.tile_keys : 0, last = any ? (min(keys.y, args.Lk) - 1) / args.tile_keys : 0;
  const cutlass::FastDivmod by_blocks(last - first + 1);
  args.tiles[0] = make_int2(by_blocks.divisor, int(by_blocks.multiplier));
  args.tiles[1] = make_int2(int(by_blocks.shift_right), first);
}

}  // namespace ds4s::sm90
