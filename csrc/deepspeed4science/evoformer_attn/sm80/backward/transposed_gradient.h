// dk and dv, math.md (12), (14), of a warp's 32 keys, transposed: channels x keys, as the product of Q^T or dO^T with
// dS or P. Scores are then the right operand, and a lane's eight queries of a key are four consecutive registers, from
// which dS is stored as well. As left operand they would have to be copied, before nearly every matrix instruction
// where registers are few.
//
// Values 4 lane_row .. 4 lane_row + 3 of gradient[channel / 16], counted through both tiles, are those of keys
// 8 lane_row + 2 (lane % 4) and + 1: first at channel lane / 4 of the 16, then at the channel 8 above it.
#pragma once

#include "sm80/backward/gradient_rows.h"

namespace ds4s {

// 32 x 32 scores in 16 bits: of keys lane / 4 + 8 lane_row the queries that `tile` has in this lane.
struct ScoreWords {
  uint32_t w[4][4];  // [lane_row][tile]

  template <typename scalar_t>
  CUTLASS_DEVICE static ScoreWords of(const float (&s)[4][8]) {
    ScoreWords words;
    CUTLASS_PRAGMA_UNROLL
    for (int lane_row = 0; lane_row < 4; ++lane_row) {
      CUTLASS_PRAGMA_UNROLL
      for (int tile = 0; tile < 4; ++tile) {
        words.w[lane_row][tile] = ptx::pack<scalar_t>(s[tile][2 * lane_row], s[tile][2 * lane_row + 1]);
      }
    }
    return words;
  }
};

// gradient += columns^T x words. lane_b: lane_b_nk of the first query, in a tile of queries x channels.
template <typename Config, typename ColTile, typename scalar_t, int kTiles>
CUTLASS_DEVICE void multiply_transposed(float (&gradient)[kTiles][8], const ScoreWords& words, const scalar_t* lane_b) {
  CUTLASS_PRAGMA_UNROLL
  for (int step = 0; step < 2; ++step) {
    CUTLASS_PRAGMA_UNROLL
    for (int m = 0; m < kTiles / 2; ++m) {
      uint32_t a[4];
      ptx::ldmatrix_trans(a, lane_b + ColTile::offset(Config::Mma::Permuted::at(2 * step, 0), 16 * m));
      CUTLASS_PRAGMA_UNROLL
      for (int lane_row = 0; lane_row < 4; ++lane_row) {
        ptx::mma_16x8x16<scalar_t, typename Config::ArchTag>(gradient[2 * m + lane_row / 2] + 4 * (lane_row % 2), a,
                                                             words.w[lane_row] + 2 * step);
      }
    }
  }
}

// factor * gradient, as rows of keys.
template <typename scalar_t, int kTiles>
CUTLASS_DEVICE WarpGradientRows<scalar_t, kTiles> rows_of_transposed(const float (&gradient)[kTiles][8], float factor) {
  WarpGradientRows<scalar_t, kTiles> rows;
  CUTLASS_PRAGMA_UNROLL
  for (int tile = 0; tile < kTiles; ++tile) {
    CUTLASS_PRAGMA_UNROLL
    for (int lane_row = 0; lane_row < 4; ++lane_row) {
      const float* pair = gradient[tile / 2 * 2 + lane_row / 2] + 4 * (lane_row % 2) + 2 * (tile % 2);
      rows.w[tile][lane_row] = ptx::transpose_8x8(ptx::pack<scalar_t>(factor * pair[0], factor * pair[1]));
    }
  }
  return rows;
}

}  // namespace ds4s
