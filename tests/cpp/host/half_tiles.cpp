// sm90/half_tiles.h: `half_tiles TILES BLOCKS ...` prints first_half and num_tiles for each two numbers.
#include "sm90/half_tiles.h"

#include <cstdio>
#include <cstdlib>

int main(int argc, char** argv) {
  for (int i = 1; i + 1 < argc; i += 2) {
    const auto tiles = ds4s::sm90::HalfTiles::of(std::atoll(argv[i]), std::atoll(argv[i + 1]));
    std::printf("%lld %lld\n", static_cast<long long>(tiles.first_half), static_cast<long long>(tiles.num_tiles));
  }
}
