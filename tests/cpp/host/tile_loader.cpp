// sm80/mma/tile_loader.h, one thread after another: a matrix goes into a tile and out again, with rows and columns that
// do not exist. Prints the number of matrices; stops at the first wrong one.
#include "sm80/mma/tile_loader.h"

#include <cstdio>
#include <cstdlib>
#include <vector>

using namespace ds4s;

constexpr int kStoredRows = 32;

int num_matrices = 0;

void check(bool right, const char* what, int chunks, int threads, int row, int col) {
  if (right) return;
  std::printf("%s: %d chunks, %d threads, row %d, column %d\n", what, chunks, threads, row, col);
  std::exit(1);
}

template <typename T>
T* aligned(std::vector<T>& memory) {
  T* p = memory.data();
  while (reinterpret_cast<uintptr_t>(p) % 16 != 0) ++p;
  return p;
}

template <typename TileT, typename T, int kThreads, int kStoreThreads, bool kAligned, bool kAsync>
void check_matrix(int rows, int cols) {
  constexpr int kRows = TileT::kRows, kCols = TileT::kCols, kStride = kCols + 16;
  const T untouched(-1.f);
  std::vector<T> from_memory(2 * kRows * kStride + 16), to_memory(kRows * kStride + 16, untouched);
  std::vector<T> tile_memory(TileT::kBytes / sizeof(T) + 16, untouched);
  T *from = aligned(from_memory), *to = aligned(to_memory), *tile = aligned(tile_memory);
  auto value = [](int row, int col) { return T(float((row * 37 + col * 5) % 251 + 1)); };
  for (int row = 0; row < 2 * kRows; ++row) {
    for (int x = 0; x < kStride; ++x) from[row * kStride + x] = value(row, x);
  }
  // The second tile of a matrix, all rows of the first existing.
  for (int thread = 0; thread < kThreads; ++thread) {
    TileLoader<T, TileT, kThreads, kAligned, kAsync> loader(from, kStride, cols, thread);
    loader.advance();
    loader.load(tile, rows);
  }
  for (int row = 0; row < kRows; ++row) {
    for (int x = 0; x < kCols; ++x) {
      const float wanted = row < rows && x < cols ? float(value(kRows + row, x)) : 0.f;
      check(float(tile[TileT::offset(row, x)]) == wanted, "loaded", TileT::kChunks, kThreads, row, x);
    }
  }
  for (int thread = 0; thread < kStoreThreads; ++thread) {
    TileStorer<T, TileT, kStoredRows, kStoreThreads, kAligned>::store(to, kStride, tile, thread, rows, cols);
  }
  for (int row = 0; row < kRows; ++row) {
    for (int x = 0; x < kStride; ++x) {
      const bool stored = row < kStoredRows && row < rows && x < cols;
      const float wanted = stored ? float(value(kRows + row, x)) : -1.f;
      check(float(to[row * kStride + x]) == wanted, "stored", TileT::kChunks, kStoreThreads, row, x);
    }
  }
  ++num_matrices;
}

template <typename TileT, typename T, int kThreads>
void check_tile() {
  constexpr int kVec = TileT::kVec, kCols = TileT::kCols;
  for (int rows : {TileT::kRows, 33, 17, 1, 0}) {
    check_matrix<TileT, T, kThreads, 32, true, true>(rows, kCols);
    check_matrix<TileT, T, kThreads, 32, true, false>(rows, kCols - kVec);
    check_matrix<TileT, T, kThreads, 32, false, false>(rows, kCols - 3);
  }
}

template <int kCols>
void check_cols() {
  using Element = cutlass::bfloat16_t;
  check_tile<Tile<Element, 64, kCols>, Element, 128>(), check_tile<SectorTile<Element, 64, kCols>, Element, 128>();
  check_tile<Tile<Element, 64, kCols>, Element, 64>(), check_tile<SectorTile<Element, 64, kCols>, Element, 64>();
  check_tile<Tile<Element, 64, kCols>, Element, 96>(), check_tile<SectorTile<Element, 128, kCols>, Element, 96>();
  check_tile<Tile<float, 64, kCols>, float, 128>();
}

int main() {
  check_cols<16>(), check_cols<32>(), check_cols<48>(), check_cols<64>(), check_cols<96>(), check_cols<128>();
  check_cols<256>();
  std::printf("%d matrices\n", num_matrices);
}
