// How the clusters of kernel_dbias2 divide the tiles and their rows n among themselves, where all tiles have equally
// many rows n: more evenly than slices, with fewer beginnings of a tile, and so that clusters that run at the same time
// read few different rows n.
//
//   rounds    tiles with all of their rows n, one for each cluster, as long as there are as many tiles as clusters
//   columns   of each other tile one cluster computes the first `column_rows` rows n, another one the next as many, and
//             so on, as long as there are as many clusters as tiles
//   tails     the rows n that are left are divided in the same way among the clusters that are left
//
// With 24 tiles of 384 rows n and 66 clusters: two columns of 143 rows n. 18 clusters are left for 24 tails of 98 rows
// n: a tail for each, and three columns of 33 rows n for the other six.
#pragma once

namespace ds4s::sm90 {

class RowPartition {
 public:
  static constexpr int kStartRows = 8;    // a beginning costs as much as so many rows n
  static constexpr int kLeastRows = 16;   // columns have at least so many
  static constexpr int kMostPieces = 16;  // of a cluster, with a last one without rows n
  static constexpr int kMostRows = 1 << 16;

  struct Piece {
    int tile, first, count;  // rows n from `first` on; count: 0 after a cluster's last piece
  };

  constexpr RowPartition(int num_tiles, int num_rows, int num_clusters)
      : tiles_(num_tiles), rows_(num_rows), clusters_(num_clusters) {}

  // Whether no column is too short, and the numbers fit.
  constexpr bool suits() const {
    const Level level(tiles_, rows_, clusters_, /*has_tails=*/true);
    return rows_ <= kMostRows && level.rounds <= kMostRounds &&
           (level.divided_tiles == 0 || level.column_rows >= kLeastRows);
  }

  // The pieces of a cluster, index from 0 on.
  constexpr Piece piece(int cluster, int index) const {
    int tiles = tiles_, rows = rows_, clusters = clusters_, first_tile = 0, first_row = 0;
    for (int depth = 0; depth < kLevels; ++depth) {
      const Level level(tiles, rows, clusters, depth + 1 < kLevels);
      if (index < level.rounds) return {first_tile + cluster + index * clusters, first_row, rows};
      if (level.divided_tiles == 0) break;
      index -= level.rounds, first_tile += level.rounds * clusters;
      const int in_columns = level.columns * level.divided_tiles;
      if (cluster < in_columns) {
        const int column = cluster / level.divided_tiles, first = column * level.column_rows;
        const int rest = rows - first, count = rest < level.column_rows ? rest : level.column_rows;
        if (index > 0 || count <= 0) break;
        return {first_tile + cluster - column * level.divided_tiles, first_row + first, count};
      }
      if (level.tail_rows == 0) break;
      tiles = level.divided_tiles, rows = level.tail_rows, first_row += level.columns * level.column_rows;
      cluster -= in_columns, clusters -= in_columns;
    }
    return {0, 0, 0};
  }

 private:
  static constexpr int kLevels = 3;  // tails of tails; these have no tails
  static constexpr int kMostRounds = 3, kMostTails = 6;
  static_assert(kMostRounds + (kMostTails - 1) + kMostTails + 1 < kMostPieces, "rounds of each level, and a column");

  struct Level {
    int rounds, divided_tiles, columns = 0, column_rows = 0, tail_rows = 0;

    constexpr Level(int tiles, int rows, int clusters, bool has_tails)
        : rounds(tiles / clusters), divided_tiles(tiles - rounds * clusters) {
      if (divided_tiles == 0) return;
      columns = clusters / divided_tiles;
      const int tail_clusters = clusters - columns * divided_tiles;
      // All clusters end at the same time: column_rows + kStartRows =
      // (tail_rows + kStartRows) divided_tiles / tail_clusters + kStartRows
      column_rows = (rows + kStartRows) * divided_tiles / clusters + 1;
      tail_rows = rows - columns * column_rows;
      // Neither tails so short that they hardly pay, nor many for each cluster.
      if (!has_tails || tail_rows < kStartRows || tail_clusters * kMostTails < divided_tiles) {
        column_rows = (rows + columns - 1) / columns, tail_rows = 0;
      }
    }
  };

  int tiles_, rows_, clusters_;
};

}  // namespace ds4s::sm90
