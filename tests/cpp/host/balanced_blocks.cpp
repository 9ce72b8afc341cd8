// sm90/balanced_blocks.h: `balanced_blocks BLOCKS TILES PARTS PARTS_OF_TILE ...` prints a number of blocks for each
// four numbers.
#include "sm90/balanced_blocks.h"

#include <cstdio>
#include <cstdlib>

int main(int argc, char** argv) {
  for (int i = 1; i + 3 < argc; i += 4) {
    auto number = [&](int place) { return std::atoll(argv[i + place]); };
    const int64_t blocks = ds4s::sm90::balanced_blocks(number(0), number(1), number(2), number(3));
    std::printf("%lld\n", static_cast<long long>(blocks));
  }
}
