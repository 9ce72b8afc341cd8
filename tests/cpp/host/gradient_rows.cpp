// sm80/backward/gradient_rows.h with a warp of 32 threads: each word reaches its place, and memory past the rows and
// channels that exist stays as it is. Prints the number of matrices; stops at the first wrong one.
#include "sm80/backward/gradient_rows.h"

#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

using namespace ds4s;
using Element = cutlass::bfloat16_t;

constexpr int kRows = 32, kGuardRows = 4;

int num_matrices = 0;

// The value of a row's channel, as 16 bits that no other element has.
uint16_t bits(int row, int channel) { return uint16_t(row * 256 + channel); }

template <int kTiles>
void check(int rows, int cols, int stride) {
  constexpr uint16_t kUntouched = 0xffff;
  std::vector<uint16_t> memory((kRows + kGuardRows) * stride + 8, kUntouched);
  uint16_t* g = memory.data();
  while (reinterpret_cast<uintptr_t>(g) % 16 != 0) ++g;
  std::vector<std::thread> lanes;
  for (int lane = 0; lane < 32; ++lane) {
    lanes.emplace_back([=] {
      threadIdx.x = lane;
      WarpGradientRows<Element, kTiles> words;
      for (int tile = 0; tile < kTiles; ++tile) {
        for (int lane_row = 0; lane_row < 4; ++lane_row) {
          const int row = lane / 4 + 8 * lane_row, channel = 8 * tile + 2 * (lane % 4);
          words.w[tile][lane_row] = bits(row, channel) | uint32_t(bits(row, channel + 1)) << 16;
        }
      }
      words.store(reinterpret_cast<Element*>(g), stride, rows, cols, lane);
    });
  }
  for (std::thread& lane : lanes) lane.join();
  ++num_matrices;
  for (int row = 0; row < kRows + kGuardRows; ++row) {
    for (int x = 0; x < stride; ++x) {
      const uint16_t wanted = row < rows && x < cols ? bits(row, x) : kUntouched;
      if (g[row * stride + x] == wanted) continue;
      std::printf("%d tiles, %d rows, %d channels, stride %d: row %d, channel %d\n", kTiles, rows, cols, stride, row,
                  x);
      std::exit(1);
    }
  }
}

template <int kTiles>
void check_all() {
  for (int rows : {32, 31, 17, 8, 1, 0}) {
    for (int cols = 8; cols <= 8 * kTiles; cols += 8) check<kTiles>(rows, cols, 8 * kTiles + 16);
  }
}

int main() {
  check_all<2>(), check_all<4>(), check_all<6>(), check_all<8>(), check_all<16>();
  std::printf("%d matrices\n", num_matrices);
}
