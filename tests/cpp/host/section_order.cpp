// sm90/backward/section_order.h: `section_order SEED` numbers the sections of random calls, and prints a line for each
// call in which two sections have one number, or a cluster gets to a couple whose first section is numbered before the
// last one of a couple that the cluster has earlier.
#include "sm90/backward/section_order.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

using ds4s::sm90::SectionOrder;

bool is_right(int couples, int tiles, int clusters, int sections) {
  const SectionOrder order(couples, tiles, clusters, sections);
  std::vector<int> seen(size_t(2) * couples * sections, 0);
  for (int couple = 0; couple < couples; ++couple) {
    for (int s = 0; s < sections; ++s) {
      for (int i = 0; i < 2; ++i) {
        const int position = order.position(couple, s, i);
        if (position < 0 || position >= int(seen.size()) || seen[position]++) return false;
        if (sections == 1 && position != 2 * couple + i) return false;
      }
      if (s > 0 && order.position(couple, s, 0) < order.position(couple, s - 1, 1)) return false;
    }
  }
  if (tiles > clusters) return sections == 1;  // more sections are not planned then
  for (int tile = clusters; tile < couples * tiles; ++tile) {
    const int earlier = (tile - clusters) / tiles, later = tile / tiles;
    if (order.position(earlier, sections - 1, 1) >= order.position(later, 0, 0)) return false;
  }
  return true;
}

int main(int, char** argv) {
  std::mt19937 random(uint32_t(std::atoi(argv[1])));
  auto between = [&](int least, int most) { return least + int(random() % uint32_t(most - least + 1)); };
  for (int round = 0; round < 3000; ++round) {
    const int clusters = round % 2 == 0 ? 66 : between(1, 90), tiles = between(1, 80), couples = between(1, 90);
    const int sections = tiles > clusters ? 1 : between(1, 12);
    if (!is_right(couples, tiles, clusters, sections)) {
      std::printf("wrong: %d couples of %d tiles, %d clusters, %d sections\n", couples, tiles, clusters, sections);
    }
  }
  std::printf("done\n");
}
