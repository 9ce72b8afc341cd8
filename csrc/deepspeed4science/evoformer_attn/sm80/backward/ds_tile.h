// dS of a tile of queries in shared memory, 16 bits, [keys][queries].
#pragma once

#include "sm80/backward/config.h"
#include "sm80/backward/transposed_gradient.h"

namespace ds4s {

template <typename Config>
struct DsTile {
  using scalar_t = typename Config::scalar_t;
  using Mma = typename Config::Mma;
  static constexpr int kQueries = Config::kStreamed, kKeys = Config::kOwned;
  static constexpr int kBytes = kKeys * kQueries * int(sizeof(scalar_t));

  // The order in which 16 keys are contracted: a lane's four keys are neighbours.
  CUTLASS_HOST_DEVICE static constexpr int key_at(int half, int c) { return 4 * (c >> 1) + 2 * half + (c & 1); }

  // Permutes chunks of eight queries, so that neither the stores below nor ldmatrix of eight keys key_at(half, 0 .. 7)
  // have bank conflicts.
  CUTLASS_HOST_DEVICE static constexpr int swizzle(int key) { return (key & 1) << 2 | ((key >> 2) & 3); }
  CUTLASS_HOST_DEVICE static constexpr int offset(int key, int chunk) {
    static_assert(kQueries % 64 == 0, "the swizzle permutes eight chunks");
    return key * kQueries + (chunk ^ swizzle(key)) * 8;
  }

  // Clears all queries of a warp's 32 keys.
  CUTLASS_DEVICE static void clear(scalar_t* sDs, int warp_row, int lane) {
    CUTLASS_PRAGMA_UNROLL
    for (int chunk = 0; chunk < kQueries / 8; ++chunk) {
      *reinterpret_cast<uint4*>(sDs + offset(warp_row + lane, chunk)) = make_uint4(0, 0, 0, 0);
    }
  }
  // The first offset of a lane in a warp's 32 keys x 32 queries, for store().
  CUTLASS_DEVICE static int lane_offset(int warp_row, int lane) {
    return offset(warp_row + Mma::row_of_lane(lane), lane & 3);
  }
  // lane % 4, from lane_offset().
  CUTLASS_DEVICE static int quad_lane(int lane_offset) {
    static_assert(kQueries == 64 && swizzle(4) == 1 && swizzle(8) == 2, "bits of a key's row and of its chunk");
    return (lane_offset ^ lane_offset >> 5) >> 3 & 3;
  }
  CUTLASS_DEVICE static void store(scalar_t* sDs, int lane_offset, const ScoreWords& words, int stripe) {
    for_each_chunk(lane_offset, words, stripe,
                   [&](int offset, uint4 x) { *reinterpret_cast<uint4*>(sDs + offset) = x; });
  }
  // Calls put(offset, chunk) for the lane's chunks of 32 keys x 32 queries. The swizzle of the eighth key from here on
  // differs by 2, that of stripes by 4.
  template <typename Put>
  CUTLASS_DEVICE static void for_each_chunk(int lane_offset, const ScoreWords& words, int stripe, Put put) {
    static_assert(Mma::kRowStep == 8 && swizzle(8) == 2 && swizzle(16) == 0 && kQueries == 64, "swizzled offsets");
    CUTLASS_PRAGMA_UNROLL
    for (int lane_row = 0; lane_row < Mma::kLaneRows; ++lane_row) {
      const uint32_t (&w)[4] = words.w[lane_row];
      const int begin = (lane_offset ^ 8 * (4 * stripe)) ^ 8 * (2 * (lane_row & 1));
      put(begin + Mma::kRowStep * lane_row * kQueries, make_uint4(w[0], w[1], w[2], w[3]));
    }
  }
};

}  // namespace ds4s
