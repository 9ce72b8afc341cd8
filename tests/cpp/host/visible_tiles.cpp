// KeyMask::visible_tiles (common/key_mask.h) against a plain loop: `visible_tiles SEED` goes through random masks,
// prints a line for each that went wrong, and at the end how many there were.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "sm80/visible_keys.h"  // common/key_mask.h; the one beside this program is a stub

using namespace ds4s;

int cases = 0;

template <int kTile>
void check(const std::vector<uint32_t>& words, int Lk, bool masked) {
  KeyMask mask{nullptr, masked ? words.data() : nullptr, nullptr, int(words.size())};
  int count = 0, last = -1;
  for (int tile = 0; tile * kTile < Lk; ++tile) {
    bool sees = !masked;
    for (int unit = tile * kTile / KeyMask::kUnit; unit < (tile + 1) * kTile / KeyMask::kUnit; ++unit) {
      sees |= (words[unit / 32] >> unit % 32 & 1) != 0;
    }
    if (sees) ++count, last = tile;
  }
  const KeyMask::Tiles tiles = mask.template visible_tiles<kTile>(0, Lk);
  ++cases;
  if (tiles.count != count || tiles.last != last) std::printf("wrong: tiles of %d, Lk = %d, %d\n", kTile, Lk, masked);
}

int main(int, char** argv) {
  std::mt19937 random(std::atoi(argv[1]));
  for (int round = 0; round < 1000; ++round) {
    const int Lk = 1 + random() % 2100, masked = random() % 8 != 0, rare = random() % 4 == 0 ? 2 : 40;
    std::vector<uint32_t> words(KeyMaskLayout::num_words(Lk));
    bool visible = random() % 2;
    for (int unit = 0; unit * KeyMask::kUnit < Lk; ++unit) {
      if (random() % rare == 0) visible = !visible;
      if (visible) words[unit / 32] |= 1u << unit % 32;
    }
    check<128>(words, Lk, masked), check<64>(words, Lk, masked);
  }
  std::printf("%d cases\n", cases);
}
