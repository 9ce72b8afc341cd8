// Sm70 with half_t: mma.m8n8k4. The four quad pairs (lanes 4q..4q+3 and 16+4q..) lie below one another: 32 rows.
//
// A lane of its accumulator has two rows and half of their columns, a lane of its A operand one row and all columns.
// One exchange with lane ^ 2 converts the former into the latter, so P needs no shared memory here either.
#pragma once

namespace ds4s {

template <>
struct WarpMma<cutlass::half_t, cutlass::arch::Sm70, false, void> {
  using scalar_t = cutlass::half_t;
  static constexpr int kVec = 8;
  static constexpr int kLaneRows = 2;
  static constexpr int kRowStep = 2;
  static constexpr bool kVectorsInOrder = false;

  CUTLASS_DEVICE static int row_of_lane(int lane) { return 8 * ((lane >> 2) & 3) + 4 * (lane >> 4) + (lane & 1); }
  CUTLASS_DEVICE static bool leads_row(int lane) { return (lane & 2) == 0; }
  CUTLASS_HOST_DEVICE static constexpr int lane_row_of(int i) { return (i >> 1) & 1; }
  CUTLASS_DEVICE static int column_of(int lane, int i) { return (i & 4) + (lane & 2) + (i & 1); }
  CUTLASS_DEVICE static float reduce_max(float x) { return fmaxf(x, ptx::shfl_xor(x, 2)); }
  template <typename Row>
  CUTLASS_DEVICE static void reduce_max_in_loop(Row& rows) {  // of one step
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kLaneRows; ++r) rows[r] = reduce_max(rows[r]);
  }
  CUTLASS_DEVICE static float reduce_sum(float x) { return x + ptx::shfl_xor(x, 2); }

  // The lane with bit 1 = b holds the eight neighbours 8 b .. 8 b + 7 in every group of 16.
  struct Permuted {
    CUTLASS_HOST_DEVICE static constexpr int at(int tile, int c) {
      return 16 * (tile >> 1) + 8 * ((c >> 1) & 1) + 4 * (tile & 1) + 2 * (c >> 2) + (c & 1);
    }
  };
  CUTLASS_HOST_DEVICE static constexpr int place_of_pair(int pair) { return pair; }
  static constexpr int kGroups = 2;
  static constexpr int kGroupStep = 16;
  CUTLASS_DEVICE static int first_column(int lane) { return 8 * ((lane >> 1) & 1); }
  CUTLASS_HOST_DEVICE static constexpr int tile_of(int group, int e) { return 2 * group + (e >> 2); }
  CUTLASS_HOST_DEVICE static constexpr int value_of(int lane_row, int e) {
    return 2 * (e & 2) + 2 * lane_row + (e & 1);
  }

  static constexpr int kStepK = 16;  // four instructions
  struct FragA {
    uint32_t r[4][2];
  };
  struct FragBnk {
    uint32_t r[2][4][2];
  };
  struct FragBkn {
    uint32_t r[2][4][2];
  };

  CUTLASS_DEVICE static int row_of_operand(int lane) { return (lane & 3) + 4 * (lane >> 4); }

  template <typename TileT>
  CUTLASS_DEVICE static int lane_a(int lane) {
    return TileT::offset(row_of_operand(lane) + 8 * ((lane >> 2) & 3));
  }
  template <typename TileT, typename Order = Permuted>
  CUTLASS_DEVICE static int lane_b_nk(int lane) {
    return TileT::offset(Order::at(0, row_of_operand(lane)));
  }
  template <typename TileT, typename Order = Permuted>
  CUTLASS_DEVICE static int lane_b_kn(int lane) {
    return TileT::offset(Order::at(0, lane & 3), 4 * (lane >> 4));
  }

  template <typename TileT>
  CUTLASS_DEVICE static void load_a(FragA& a, const scalar_t* lane_ptr, int row0, int k0) {
    load_16(a.r, lane_ptr + TileT::offset(row0, k0));
  }
  template <typename TileT, typename Order = Permuted>
  CUTLASS_DEVICE static void load_b_nk(FragBnk& b, const scalar_t* lane_ptr, int n0, int pair, int k0) {
    load_16(b.r[0], lane_ptr + TileT::offset(n0 + Order::at(2 * pair, 0), k0));
    load_16(b.r[1], lane_ptr + TileT::offset(n0 + Order::at(2 * pair + 1, 0), k0));
  }
  template <typename TileT, typename Order = Permuted>
  CUTLASS_DEVICE static void load_b_kn(FragBkn& b, const scalar_t* lane_ptr, int k0, int step, int n0) {
    CUTLASS_PRAGMA_UNROLL
    for (int tile = 0; tile < 2; ++tile) {
      CUTLASS_PRAGMA_UNROLL
      for (int q = 0; q < 4; ++q) {
        uint2 x = *reinterpret_cast<const uint2*>(
            lane_ptr + TileT::offset(k0 + Order::at(2 * step + (q >> 1), 4 * (q & 1)), n0 + 8 * tile));
        b.r[tile][q][0] = x.x, b.r[tile][q][1] = x.y;
      }
    }
  }

  CUTLASS_DEVICE static void from_scores(FragA& a, const float (&s)[4][8], int step, int lane) {
    bool upper = (lane & 2) != 0;
    CUTLASS_PRAGMA_UNROLL
    for (int q = 0; q < 4; ++q) {
      const float* x = &s[2 * step + (q >> 1)][4 * (q & 1)];
      uint32_t row0_pair = ptx::pack<scalar_t>(x[0], x[1]);
      uint32_t row1_pair = ptx::pack<scalar_t>(x[2], x[3]);
      uint32_t other = ptx::shfl_xor(upper ? row0_pair : row1_pair, 2);
      a.r[q][0] = upper ? other : row0_pair;
      a.r[q][1] = upper ? row1_pair : other;
    }
  }

  CUTLASS_DEVICE static void mma(float (&c0)[8], float (&c1)[8], const FragA& a, const FragBnk& b) {
    CUTLASS_PRAGMA_UNROLL
    for (int q = 0; q < 4; ++q) {
      ptx::mma_8x8x4_row_col(c0, a.r[q], b.r[0][q]);
      ptx::mma_8x8x4_row_col(c1, a.r[q], b.r[1][q]);
    }
  }
  CUTLASS_DEVICE static void mma(float (&c0)[8], float (&c1)[8], const FragA& a, const FragBkn& b) {
    CUTLASS_PRAGMA_UNROLL
    for (int q = 0; q < 4; ++q) {
      ptx::mma_8x8x4_row_row(c0, a.r[q], b.r[0][q]);
      ptx::mma_8x8x4_row_row(c1, a.r[q], b.r[1][q]);
    }
  }

 private:
  CUTLASS_DEVICE static void load_16(uint32_t (&r)[4][2], const scalar_t* p) {
    uint4 x = reinterpret_cast<const uint4*>(p)[0];
    uint4 y = reinterpret_cast<const uint4*>(p)[1];
    r[0][0] = x.x, r[0][1] = x.y, r[1][0] = x.z, r[1][1] = x.w;
    r[2][0] = y.x, r[2][1] = y.y, r[3][0] = y.z, r[3][1] = y.w;
  }
};

}  // namespace ds4s
