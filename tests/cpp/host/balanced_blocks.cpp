// sm90/balanced_blocks.h: `balanced_blocks BLOCKS TILES PERIOD ...` prints a number of blocks for each three numbers.
#include "sm90/balanced_blocks.h"

#include <cstdio>
#include <cstdlib>

int main(int argc, char** argv) {
  for (int i = 1; i + 2 < argc; i += 3) {
    const long long blocks = std::atoll(argv[i]), tiles = std::atoll(argv[i + 1]), period = std::atoll(argv[i + 2]);
    std::printf("%lld\n", static_cast<long long>(ds4s::sm90::balanced_blocks(blocks, tiles, period)));
  }
}
