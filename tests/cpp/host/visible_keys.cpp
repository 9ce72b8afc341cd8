// sm80/visible_keys.h, sm80/forward/key_segments.h, sm80/backward/visible_rows.h and even_tile_keys against plain
// loops: `visible_keys SEED` goes through random masks and prints a line for each that went wrong, and at the end how
// many there were.
#include "sm80/visible_keys.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "common/key_mask_layout.h"
#include "sm80/backward/visible_rows.h"
#include "sm80/forward/key_segments.h"

using namespace ds4s;

int cases = 0;

// Bits of random runs, so that whole words are hidden too, over Lk keys.
std::vector<uint32_t> random_units(std::mt19937& random, int Lk) {
  std::vector<uint32_t> words(KeyMask::num_words(Lk));
  bool visible = random() % 2;
  for (int unit = 0; unit * KeyMask::kUnit < Lk; ++unit) {
    if (random() % (random() % 4 == 0 ? 2 : 40) == 0) visible = !visible;
    if (visible) words[unit / 32] |= 1u << unit % 32;
  }
  return words;
}
bool any(const std::vector<uint32_t>& words, int key, int count) {
  bool any = false;
  for (int unit = key / KeyMask::kUnit; unit < (key + count) / KeyMask::kUnit; ++unit) {
    any |= unit / 32 < int(words.size()) && (words[unit / 32] >> unit % 32 & 1) != 0;
  }
  return any;
}

template <int kTile, int kGroup>
void check_keys(const std::vector<uint32_t>& words, int Lk, bool masked) {
  KeyMask mask{nullptr, masked ? words.data() : nullptr, nullptr, int(words.size())};
  VisibleKeys<kTile, kGroup, true> keys{mask, 0, Lk};
  int passed = 0;
  auto pass_over = [&] { ++passed; };
  std::set<int> tiles;
  bool right = true;
  for (int tile = keys.seek(0, pass_over); keys.has(tile); tile = keys.seek(tile + 1, pass_over)) {
    tiles.insert(tile);
    uint32_t units = keys.units_of(tile);
    int last = kTile / kGroup;
    while (masked && last > 0 && !any(words, tile * kTile + (last - 1) * kGroup, kGroup)) --last;
    right &= masked ? keys.groups_in_use(units) == last : keys.groups_in_use(units) >= last;
    for (int group = 0; group < kTile / kGroup && keys.kSkipsGroups; ++group) {
      right &= keys.is_visible(units, group) == (!masked || any(words, tile * kTile + group * kGroup, kGroup));
    }
  }
  int num_tiles = (Lk + kTile - 1) / kTile;
  for (int tile = 0; tile < num_tiles; ++tile) {
    right &= (tiles.count(tile) == 1) == (!masked || any(words, tile * kTile, kTile));
  }
  right &= passed + int(tiles.size()) == num_tiles;  // a loader stands where the next tile is
  ++cases;
  if (!right) std::printf("wrong: tiles of %d in groups of %d, Lk = %d, %d\n", kTile, kGroup, Lk, masked);
}

// Runs function(lane) in 32 threads that are a warp.
template <typename Function>
void run_warp(Function function) {
  std::vector<std::thread> warp;
  for (int lane = 0; lane < 32; ++lane) {
    warp.emplace_back([&, lane] {
      threadIdx.x = lane;
      function(lane);
    });
  }
  for (std::thread& lane : warp) lane.join();
}

void check_segments(const std::vector<uint32_t>& words, int Lk, bool masked) {
  constexpr int kUnit = KeyMask::kUnit;
  using List = std::vector<std::pair<int, int>>;
  List expected, found[32];
  int2 range{0x7fffffff, 0};
  for (int key = 0, last = 0; key < Lk; key += kUnit) {
    if (masked && !any(words, key, kUnit)) continue;
    if (expected.empty() || key - last >= KeySegments::kGapUnits * kUnit) expected.push_back({key, 0});
    last = key + kUnit;
    int& end = expected.back().second;
    end = std::min(Lk, expected.back().first + (last - expected.back().first + 31) / 32 * 32);
    range = {std::min(range.x, key), last};
  }
  const float shift = 0;
  KeyMask mask{&shift, masked ? words.data() : nullptr, masked ? &range : nullptr, int(words.size())};
  run_warp([&](int lane) {
    const RowMask row = RowMask::load</*kSkips=*/true, /*kGiven=*/false>(mask, Lk);
    if (row.sees_nothing()) return;
    const KeySegments segments(row, Lk);
    KeySegment segment = segments.first(row);
    found[lane].push_back({segment.begin, segment.end});
    while (segments.has_more(segment)) {
      segment = segments.from(segment.end);
      found[lane].push_back({segment.begin, segment.end});
    }
  });
  ++cases;
  bool right = true;
  for (const List& lane : found) right &= lane == expected;
  if (!right) std::printf("wrong: segments of %d keys, %d\n", Lk, masked);
}

template <int kKeys, typename Index>
void check_rows(std::mt19937& random, int Lk, bool masked) {
  int N = 1 + random() % 100, b = random() % 2, num_words = KeyMask::num_words(Lk);
  std::vector<uint32_t> all;
  std::vector<std::vector<uint32_t>> rows;
  for (int bn = 0; bn < 2 * N; ++bn) {
    rows.push_back(random() % 3 ? random_units(random, Lk) : std::vector<uint32_t>(num_words));
    all.insert(all.end(), rows.back().begin(), rows.back().end());
  }
  KeyMask mask{nullptr, masked ? all.data() : nullptr, nullptr, num_words};
  int begin = random() % N, end = begin + random() % (N - begin + 1),
      key = random() % ((Lk + kKeys - 1) / kKeys) * kKeys;
  std::vector<int> found[32], expected;
  run_warp([&](int lane) {
    VisibleRows<kKeys, Index> rows(mask, Index(b * N), key, begin, end);
    for (int n = rows.next(begin); n < end; n = rows.next(n + 1)) found[lane].push_back(n);
  });
  for (int n = begin; n < end; ++n) {
    if (!masked || any(rows[b * N + n], key, kKeys)) expected.push_back(n);
  }
  ++cases;
  bool right = true;
  for (const std::vector<int>& lane : found) right &= lane == expected;
  if (!right) std::printf("wrong: rows %d to %d of %d, keys %d of %d, %d\n", begin, end, N, key, Lk, masked);
}

// Tiles of one size, each at least six eighths of the largest: as few as possible, and no eighth too wide.
void check_even_tiles(int end, int most) {
  const int keys = even_tile_keys(end, most), tiles = (end + most - 1) / most, eighth = most / 8;
  const bool fits = keys * tiles >= end, needed = (keys - eighth) * tiles < end || keys == 6 * eighth;
  ++cases;
  if (!fits || !needed || keys % eighth != 0 || keys > most) std::printf("wrong: %d of %d keys\n", keys, end);
}

int main(int, char** argv) {
  std::mt19937 random(std::atoi(argv[1]));
  for (int round = 0; round < 1000; ++round) {
    int Lk = 1 + random() % 2100;
    bool masked = random() % 8 != 0;
    std::vector<uint32_t> words = random_units(random, Lk);
    check_keys<32, 32>(words, Lk, masked), check_keys<64, 32>(words, Lk, masked),
        check_keys<128, 32>(words, Lk, masked);
    check_keys<96, 96>(words, Lk, masked), check_keys<64, 64>(words, Lk, masked),
        check_keys<512, 128>(words, Lk, masked);
    check_keys<384, 96>(words, Lk, masked);
    check_even_tiles(Lk, 192), check_even_tiles(Lk - 1, 64);
    if (round % 4 == 0) check_segments(words, Lk, masked);
    if (round % 40 == 0) check_segments(random_units(random, 16 * Lk), 16 * Lk, masked);  // more words than lanes
    if (round % 10 == 0) check_rows<128, int>(random, Lk, masked), check_rows<64, int64_t>(random, Lk, masked);
  }
  std::printf("%d cases\n", cases);
}
