// sm90/backward/row_partition.h: `row_partition SEED` divides random tiles and prints how many times, and a line for
// each time in which a row n of a tile had no piece or two, a cluster too many pieces, or one cluster far more work
// than its share.
#include "sm90/backward/row_partition.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

using ds4s::sm90::RowPartition;

// The work of the cluster that has the most, in rows n; -1 where the pieces are wrong.
int most_work(const RowPartition& partition, int tiles, int rows, int clusters) {
  std::vector<int> seen(size_t(tiles) * rows, 0);
  int most = 0;
  for (int cluster = 0; cluster < clusters; ++cluster) {
    int work = 0, index = 0;
    while (true) {
      if (index == RowPartition::kMostPieces) return -1;  // the table has a last piece without rows n, too
      const RowPartition::Piece piece = partition.piece(cluster, index++);
      if (piece.count == 0) break;
      if (piece.tile < 0 || piece.tile >= tiles || piece.first < 0 || piece.first + piece.count > rows) return -1;
      for (int i = 0; i < piece.count; ++i) ++seen[size_t(piece.tile) * rows + piece.first + i];
      work += piece.count + RowPartition::kStartRows;
    }
    most = std::max(most, work);
  }
  return std::all_of(seen.begin(), seen.end(), [](int times) { return times == 1; }) ? most : -1;
}

int main(int, char** argv) {
  std::mt19937 random(uint32_t(std::atoi(argv[1])));
  auto between = [&](int least, int most) { return least + int(random() % uint32_t(most - least + 1)); };
  int divided = 0;
  for (int round = 0; round < 4000; ++round) {
    const int clusters = round % 2 == 0 ? 66 : between(1, 140), tiles = between(1, 4 * clusters);
    const int rows = between(16, round % 20 == 0 ? 3000 : 400);
    const RowPartition partition(tiles, rows, clusters);
    if (!partition.suits()) continue;
    ++divided;
    const int most = most_work(partition, tiles, rows, clusters);
    const double share = double(tiles) * rows / clusters, starts = (tiles / clusters + 3) * RowPartition::kStartRows;
    // A column is up to a tile's rows n divided by the number of whole columns.
    if (most < 0 || most > std::max(1.5 * share, share + rows / std::max(clusters / tiles, 1) / 2.0) + starts) {
      std::printf("wrong: %d tiles of %d rows, %d clusters: %d where %.1f is a share\n", tiles, rows, clusters, most,
                  share);
    }
  }
  std::printf("%s\n", divided > 2000 ? "all right" : "too few");
  // The work beside a share of equal size, for (1,L,L,4,32): tiles of 128 x 192 elements.
  for (const auto& [tiles, rows] : {std::pair{24, 384}, std::pair{96, 768}, std::pair{16, 256}}) {
    const RowPartition partition(tiles, rows, 66);
    std::printf("%d %d %d\n", tiles, rows, most_work(partition, tiles, rows, 66));
  }
  // On both sides of each limit of suits(): rows n of a column, rounds, rows n.
  for (const auto& [tiles, rows] : {std::pair{1, 66 * 15 + 1}, std::pair{1, 66 * 15}, std::pair{4 * 66 - 1, 384},
                                    std::pair{4 * 66, 384}, std::pair{24, 1 << 16}, std::pair{24, (1 << 16) + 1}}) {
    std::printf("%d", RowPartition(tiles, rows, 66).suits());
  }
  std::printf("\n");
}
