// How a warp stores 32 rows of a 16-bit gradient: four lanes exchange words, so that each stores 16 bytes of a row.
// With 4 bytes a lane every store would write half sectors of memory, 16 of 32 bytes, and the fused kernel would
// take 1.06 times as long at (1,384,384,4,32).
#pragma once

#include "common/ptx.h"

namespace ds4s {

// Transposes four words of each of four neighbouring lanes: lane `index` of the four gets word `index` of each lane.
CUTLASS_DEVICE uint4 transpose_4x4(const uint32_t (&w)[4], int index) {
  const bool high = index & 2, odd = index & 1;
  const uint32_t mine0 = high ? w[2] : w[0], mine1 = high ? w[3] : w[1];
  const uint32_t theirs0 = ptx::shfl_xor(high ? w[0] : w[2], 2), theirs1 = ptx::shfl_xor(high ? w[1] : w[3], 2);
  const uint32_t a = odd ? mine1 : mine0, b = odd ? theirs1 : theirs0;  // of this lane, and the second from it
  const uint32_t c = ptx::shfl_xor(odd ? mine0 : mine1, 1), d = ptx::shfl_xor(odd ? theirs0 : theirs1, 1);
  const uint2 near = odd ? make_uint2(c, a) : make_uint2(a, c), far = odd ? make_uint2(d, b) : make_uint2(b, d);
  return high ? make_uint4(far.x, far.y, near.x, near.y) : make_uint4(near.x, near.y, far.x, far.y);
}

template <typename scalar_t, int kTiles>
struct WarpGradientRows {
  static_assert(kTiles % 2 == 0, "pairs of tiles");
  uint32_t w[kTiles][4];  // [tile][lane_row]: channels 8 tile + 2 (lane % 4) and + 1 of row lane / 4 + 8 lane_row

  // g: the warp's first row in global memory, whose rows are aligned to 16 bytes; rows, cols: how many exist.
  CUTLASS_DEVICE void store(scalar_t* g, int64_t stride, int rows, int cols, int lane) const {
    const int quad_lane = lane & 3;
    auto put = [&](const uint32_t (&four)[4], int row, int tile) {
      const uint4 eight = transpose_4x4(four, quad_lane);
      if (row < rows && 8 * tile < cols) *reinterpret_cast<uint4*>(g + row * stride + 8 * tile) = eight;
    };
    const int row = lane >> 2;
    constexpr int kFours = kTiles / 4 * 4;
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < 4; ++x) {
      CUTLASS_PRAGMA_UNROLL
      for (int t = 0; t < kFours; t += 4)
        put({w[t][x], w[t + 1][x], w[t + 2][x], w[t + 3][x]}, row + 8 * x, t + quad_lane);
    }
    if constexpr (kFours < kTiles) {  // two tiles of two rows
      constexpr int t = kFours;
      CUTLASS_PRAGMA_UNROLL
      for (int x = 0; x < 4; x += 2) {
        put({w[t][x], w[t + 1][x], w[t][x + 1], w[t + 1][x + 1]}, row + 8 * (x + quad_lane / 2), t + quad_lane % 2);
      }
    }
  }
};

}  // namespace ds4s
