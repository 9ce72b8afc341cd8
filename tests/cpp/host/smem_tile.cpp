// Tiles in shared memory: each chunk has a place of its own, an address is a sum, and neither eight rows of ldmatrix
// nor a copy of aligned 32 bytes meet in a bank more often than they must. Prints the number of places that were
// checked; stops at the first wrong one.
#include "sm80/mma/smem_tile.h"

#include <cutlass/half.h>

#include <cstdio>
#include <cstdlib>
#include <set>

namespace {

using ds4s::SectorTile;
using ds4s::Tile;
using Element = cutlass::half_t;
constexpr int kRows = 64, kVec = 8;

// The rows of a permuted score tile, sm80/mma/mma.h: of ldmatrix in tile j, and those that kernels add to a lane's row.
int permuted_row(int j, int i) { return 8 * (i / 2) + 2 * j + i % 2; }

int num_checked = 0;

void check(bool right, const char* what, int chunks, int row, int chunk) {
  ++num_checked;
  if (right) return;
  std::printf("%s: %d chunks, row %d, chunk %d\n", what, chunks, row, chunk);
  std::exit(1);
}

// Each chunk has its own place, within the tile's bytes.
template <typename TileT>
void check_places() {
  std::set<int> places;
  for (int row = 0; row < kRows; ++row) {
    for (int chunk = 0; chunk < TileT::kChunks; ++chunk) {
      const int place = TileT::offset(row, chunk * kVec);
      check(place % kVec == 0 && places.insert(place).second, "place", TileT::kChunks, row, chunk);
      check(place >= 0 && (place + kVec) * int(sizeof(Element)) <= TileT::kBytes, "size", TileT::kChunks, row, chunk);
    }
  }
}

// The constants that kernels add to a lane's offset: 32 rows, the rows of Permuted, two chunks.
template <typename TileT>
void check_sums() {
  for (int row = 0; row < 32; ++row) {
    for (int chunk = 0; chunk < TileT::kChunks; ++chunk) {
      const int place = TileT::offset(row, chunk * kVec);
      check(TileT::offset(row + 32, chunk * kVec) == place + TileT::offset(32), "32 rows", TileT::kChunks, row, chunk);
      if (row & 6) continue;
      for (int tile = 0; tile < 4; ++tile) {
        const int below = permuted_row(tile, 0);
        check(TileT::offset(row + below, chunk * kVec) == place + TileT::offset(below), "permuted rows", TileT::kChunks,
              row, chunk);
      }
      if (chunk > 1) continue;
      for (int beside = 0; beside < TileT::kChunks; beside += 2) {
        check(TileT::offset(row, (chunk + beside) * kVec) == place + TileT::offset(0, beside * kVec), "chunks",
              TileT::kChunks, row, chunk);
      }
    }
  }
}

template <typename TileT>
void check_after() {
  for (int row = 0; row < kRows; ++row) {
    for (int by = 0; row + by < kRows; ++by) {
      const int chunk = (row + by) % TileT::kChunks, place = TileT::offset(row, chunk * kVec);
      const int right = TileT::offset(row + by, chunk * kVec);
      check(TileT::after(place, row, by) == right, "after", TileT::kChunks, row, chunk);
      if ((row & by) == 0) check(TileT::after(place, 0, by) == right, "after 0", TileT::kChunks, row, chunk);
    }
  }
}

// Eight chunks of 16 bytes use all 32 banks once.
template <typename TileT, typename RowOf>
void check_banks(RowOf row_of) {
  for (int first = 0; first < 4; ++first) {
    for (int chunk = 0; chunk < TileT::kChunks; ++chunk) {
      std::set<int> banks;
      for (int i = 0; i < 8; ++i) {
        check(banks.insert(TileT::offset(row_of(first, i), chunk * kVec) / kVec % 8).second, "banks", TileT::kChunks,
              row_of(first, i), chunk);
      }
    }
  }
}

template <typename TileT>
void check_sectors() {
  for (int row = 0; row < kRows; ++row) {
    for (int chunk = 0; chunk < TileT::kChunks; chunk += 2) {
      const int place = TileT::offset(row, chunk * kVec) / kVec, next = TileT::offset(row, (chunk + 1) * kVec) / kVec;
      check((place ^ next) == 1, "sector", TileT::kChunks, row, chunk);
    }
  }
}

template <int kCols>
void check_tiles() {
  using Padded = Tile<Element, kRows, kCols>;
  check_places<Padded>(), check_sums<Padded>(), check_after<Padded>(), check_banks<Padded>(permuted_row);
  check_banks<Padded>([](int group, int i) { return 8 * group + i; });
  using Sectors = SectorTile<Element, kRows, kCols>;
  check_places<Sectors>(), check_sums<Sectors>(), check_after<Sectors>(), check_banks<Sectors>(permuted_row);
  check_sectors<Sectors>();
}

}  // namespace

int main() {
  check_tiles<16>(), check_tiles<32>(), check_tiles<48>(), check_tiles<64>(), check_tiles<96>(), check_tiles<128>();
  check_tiles<256>();
  std::printf("%d places\n", num_checked);
}
