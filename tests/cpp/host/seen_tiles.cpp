// sm90/backward/seen_tiles.h: `seen_tiles SEED` finds the tiles of keys of random masks, and prints a line for
// each mask of which a tile with a visible key is left out, a tile comes twice, or one neither comes nor is counted as
// left out.
#include "sm90/backward/seen_tiles.h"

#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

using namespace ds4s;
using namespace ds4s::sm90;

void find(const FindSeenTilesArgs& args) {
  block.threads = kPrepareThreads;
  int2 keys;
  std::vector<std::thread> all;
  for (int thread = 0; thread < kPrepareThreads; ++thread) {
    all.emplace_back([&, thread] {
      threadIdx.x = thread;
      find_seen_tiles(args, keys);
    });
  }
  for (std::thread& thread : all) thread.join();
}

bool is_right(const BackwardArgs& args, const SeenTiles& seen, int first, int last) {
  const int tiles = args.by_blocks.divisor, pairs = args.num_tiles / tiles;
  std::vector<int> times(args.num_tiles);
  int last_tile = -1;
  for (int i = 0; i < seen.count; ++i) {
    const int tile = seen.tile(args, i);
    if (tile < 0 || tile >= args.num_tiles) return false;
    if (tile <= last_tile) return false;  // in their order
    last_tile = tile, ++times[tile];
  }
  for (int tile = 0; tile < args.num_tiles; ++tile) {
    const int of_pair = tile % tiles;
    if (times[tile] != (of_pair >= first && of_pair <= last)) return false;
  }
  std::vector<bool> left_out(tiles);
  for (int i = 0; i < seen.num_left_out(args); ++i) left_out.at(seen.left_out(i)) = true;
  for (int tile = 0; tile < tiles; ++tile) {
    if (left_out[tile] != (tile < first || tile > last)) return false;
  }
  return seen.tile(args, seen.count) == args.num_tiles && seen.count == pairs * (last - first + 1);
}

int main(int, char** argv) {
  std::mt19937 random(uint32_t(std::atoi(argv[1])));
  auto below = [&](int most) { return int(random() % uint32_t(most)); };
  for (int call = 0; call < 40; ++call) {
    const int rows = 1 + below(300), Lk = 1 + below(1500), tile_keys = 128, units = (Lk + 15) / 16;
    std::vector<int2> range(rows);
    int first = 1 << 30, last = -1;
    const int least = below(units), most = least + 1 + below(units - least);
    for (int2& keys : range) {
      const int begin = least + below(most - least), end = begin + 1 + below(most - begin);
      keys = call % 8 == 0 || below(3) == 0 ? make_int2(0x7fffffff, 0) : make_int2(16 * begin, 16 * end);
      if (keys.x >= keys.y) continue;
      first = std::min(first, keys.x / tile_keys), last = std::max(last, (std::min(keys.y, Lk) - 1) / tile_keys);
    }
    if (last < 0) first = last = 0;
    BackwardArgs args{};
    args.by_blocks = cutlass::FastDivmod((Lk + tile_keys - 1) / tile_keys);
    args.num_tiles = args.by_blocks.divisor * (1 + below(40)), args.Lk = Lk;
    int2 found[2];
    KeyMask mask{};
    mask.range = range.data();
    find({mask, rows, Lk, tile_keys, found});
    args.seen_tiles = call % 8 == 1 ? nullptr : found;
    if (call % 8 == 1) first = 0, last = args.by_blocks.divisor - 1;
    SeenTiles seen;
    seen.load(args);
    const bool counts = seen.by_blocks.divisor == SeenTiles::num_of_pair(args);
    if (counts && is_right(args, seen, first, last)) continue;
    std::printf("wrong: tiles %d to %d of %d keys\n", first, last, Lk);
  }
  std::printf("done\n");
}
