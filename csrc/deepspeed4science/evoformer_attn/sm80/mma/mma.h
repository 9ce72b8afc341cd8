// The warp-level matrix product, one policy for each family: a warp owns 32 rows.
//
//   WarpMma<scalar_t, ArchTag, kTf32>      half_t on Sm70 (mma.m8n8k4), Sm75 (m16n8k8), Sm80 (m16n8k16); bfloat16_t on
//                                          Sm80; float as TF32 on Sm80 when kTf32, in full precision (FFMA) everywhere
//
// An accumulator is float[tiles][8]: tile j is 32 rows x 8 columns, 8 values in each lane. What the lanes hold:
//   row_of_lane(lane) + kRowStep * lane_row   the lane's rows, lane_row from 0 to kLaneRows - 1
//   lane_row_of(i)                            value i's row among them
//   reduce_max, reduce_sum(x)                 over the lanes that share a row
//   reduce_max_in_loop(rows)                  likewise, of several rows by a loop
//   column_of(lane, i)                        value i's column in its tile, for plain matrices (outputs)
// Scores permute their columns: column c of tile j stands for index Permuted::at(j, c) of the stripe of 32. The
// permutation gives a lane whole 16-byte vectors of neighbouring indices, so a bias tile is loaded from global memory
// directly in the accumulator's layout, 128 bits at a time. K's and V's rows are read from shared memory in the same
// order, so products are not affected.
//
// Operands, for one step of kStepK contracted elements:
//   FragA     32 x kStepK     load_a(tile rows m, contiguous k);
//                             from_scores(accumulator, step): the contraction then runs over the permuted columns
//   FragBnk   16 x kStepK     load_b_nk(tile rows n, contiguous k), two accumulator tiles
//   FragBkn   16 x kStepK     load_b_kn(tile rows k, contiguous n)
//   mma(acc_tile0, acc_tile1, a, b)
// The loads take a pointer that already includes the lane's offset (lane_a, lane_b_nk, lane_b_kn: elements, computed
// once), and compile-time offsets for the rest.
#pragma once

#include "smem_tile.h"

namespace ds4s {

template <typename scalar_t, typename ArchTag, bool kTf32 = false, typename = void>
struct WarpMma {
  static_assert(sizeof(scalar_t) == 0,
                "no matrix instruction of this architecture multiplies this type: bfloat16 and TF32 begin with Sm80, "
                "16-bit types are not multiplied as TF32; take half_t, or float in full precision");
};

// Index in a stripe of 32 for column c of tile j. A natural order, for plain matrices.
struct NaturalOrder {
  CUTLASS_HOST_DEVICE static constexpr int at(int tile, int c) { return 8 * tile + c; }
};

// The layout of Sm75's, Sm80's and our FFMA accumulators: lane = 4 * (row in 8) + (pair of columns).
template <typename scalar_t>
struct QuadLayout {
  static constexpr int kVec = 16 / int(sizeof(scalar_t));
  static constexpr int kLaneRows = 4;  // rows of one lane
  static constexpr int kRowStep = 8;   // between them
  // Row by row, a stripe of 32 x 32 elements of 16 bits consists of 128 vectors; a lane has those of the numbers
  // lane + 32 lane_row.
  static constexpr bool kVectorsInOrder = kVec == 8;

  CUTLASS_DEVICE static int row_of_lane(int lane) { return lane >> 2; }
  CUTLASS_DEVICE static bool leads_row(int lane) { return (lane & 3) == 0; }  // one lane of those that share a row
  CUTLASS_DEVICE static float reduce_max(float x) {
    x = fmaxf(x, ptx::shfl_xor(x, 1));
    return fmaxf(x, ptx::shfl_xor(x, 2));
  }
  template <typename Row>
  CUTLASS_DEVICE static void reduce_max_in_loop(Row& rows) {
    CUTLASS_PRAGMA_NO_UNROLL
    for (int lanes = 1; lanes <= 2; lanes *= 2) {
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < kLaneRows; ++r) rows[r] = fmaxf(rows[r], ptx::shfl_xor(rows[r], lanes));
    }
  }
  CUTLASS_DEVICE static float reduce_sum(float x) {
    x += ptx::shfl_xor(x, 1);
    return x + ptx::shfl_xor(x, 2);
  }
  CUTLASS_HOST_DEVICE static constexpr int lane_row_of(int i) { return i >> 1; }
  CUTLASS_DEVICE static int column_of(int lane, int i) { return 2 * (lane & 3) + (i & 1); }

  // Lane t of a quad holds the kVec neighbours kVec * t .. in every group of 4 * kVec.
  struct Permuted {
    CUTLASS_HOST_DEVICE static constexpr int at(int tile, int c) {
      return tile / (kVec / 2) * (4 * kVec) + (c >> 1) * kVec + 2 * (tile % (kVec / 2)) + (c & 1);
    }
  };
  // Where the terms of a pair of columns lie in shared memory, so that the four lanes of a row read neighbours. Bits
  // are exchanged, so the place of a sum of numbers without common bits is the sum of their places.
  CUTLASS_HOST_DEVICE static constexpr int place_of_pair(int pair) {
    return kVec == 8 ? (pair & ~15) | (pair & 3) << 2 | (pair >> 2 & 3) : pair;
  }

  // A lane's vectors of a score stripe: kGroups of them in a row, the first at first_column(lane).
  static constexpr int kGroups = 32 / (4 * kVec);
  static constexpr int kGroupStep = 4 * kVec;
  CUTLASS_DEVICE static int first_column(int lane) { return (lane & 3) * kVec; }
  // Element e of the vector (lane_row, group) is value value_of(lane_row, e) of accumulator tile tile_of(group, e).
  CUTLASS_HOST_DEVICE static constexpr int tile_of(int group, int e) { return group * (kVec / 2) + (e >> 1); }
  CUTLASS_HOST_DEVICE static constexpr int value_of(int lane_row, int e) { return 2 * lane_row + (e & 1); }
};

}  // namespace ds4s

#include "mma_float.h"
#include "mma_sm70.h"
#include "mma_sm75.h"
