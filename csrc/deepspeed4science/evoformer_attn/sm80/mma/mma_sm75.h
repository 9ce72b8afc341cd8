// Sm75 and Sm80 with 16-bit elements: ldmatrix and mma.m16n8k16 (on Sm75 two m16n8k8, whose fragments are its halves).
#pragma once

namespace ds4s {

template <typename scalar_t, typename ArchTag>
struct WarpMma<
    scalar_t, ArchTag, false,
    typename cutlass::platform::enable_if<sizeof(scalar_t) == 2 && (ArchTraits<ArchTag>::kCapability >= 75)>::type>
    : QuadLayout<scalar_t> {
  using Base = QuadLayout<scalar_t>;
  using typename Base::Permuted;
  static_assert(ArchTraits<ArchTag>::kCapability >= 80 || cutlass::platform::is_same<scalar_t, cutlass::half_t>::value,
                "bfloat16 matrix instructions begin with Sm80");

  static constexpr int kStepK = 16;
  struct FragA {
    uint32_t r[2][4];
  };  // rows 0-15, 16-31
  struct FragB {
    uint32_t r[2][2];
  };  // columns 0-7, 8-15
  using FragBnk = FragB;
  using FragBkn = FragB;

  // A lane's offset: the row of the 8x8 matrix lane / 8 whose address it passes to ldmatrix.
  template <typename TileT>
  CUTLASS_DEVICE static int lane_a(int lane) {
    return TileT::offset(lane & 15, 8 * (lane >> 4));
  }
  template <typename TileT, typename Order = Permuted>
  CUTLASS_DEVICE static int lane_b_nk(int lane) {
    return TileT::offset(Order::at(lane >> 4, lane & 7), 8 * ((lane >> 3) & 1));
  }
  template <typename TileT, typename Order = Permuted>
  CUTLASS_DEVICE static int lane_b_kn(int lane) {
    return TileT::offset(Order::at((lane >> 3) & 1, lane & 7), 8 * (lane >> 4));
  }

  // A: rows row0 .. row0 + 31, elements k0 .. k0 + 15 of a tile with contiguous k.
  template <typename TileT>
  CUTLASS_DEVICE static void load_a(FragA& a, const scalar_t* lane_ptr, int row0, int k0) {
    ptx::ldmatrix(a.r[0], lane_ptr + TileT::offset(row0, k0));
    ptx::ldmatrix(a.r[1], lane_ptr + TileT::offset(row0 + 16, k0));
  }
  // B: accumulator tiles 2 * pair and 2 * pair + 1 of the stripe that begins at row n0; elements k0 .. k0 + 15.
  template <typename TileT, typename Order = Permuted>
  CUTLASS_DEVICE static void load_b_nk(FragBnk& b, const scalar_t* lane_ptr, int n0, int pair, int k0) {
    uint32_t r[4];
    ptx::ldmatrix(r, lane_ptr + TileT::offset(n0 + Order::at(2 * pair, 0), k0));
    b.r[0][0] = r[0], b.r[0][1] = r[1], b.r[1][0] = r[2], b.r[1][1] = r[3];
  }
  // B: contracted rows of step `step` of the stripe that begins at row k0; columns n0 .. n0 + 15.
  template <typename TileT, typename Order = Permuted>
  CUTLASS_DEVICE static void load_b_kn(FragBkn& b, const scalar_t* lane_ptr, int k0, int step, int n0) {
    uint32_t r[4];
    ptx::ldmatrix_trans(r, lane_ptr + TileT::offset(k0 + Order::at(2 * step, 0), n0));
    b.r[0][0] = r[0], b.r[0][1] = r[1], b.r[1][0] = r[2], b.r[1][1] = r[3];
  }

  CUTLASS_DEVICE static void from_scores(FragA& a, const float (&s)[4][8], int step, int /*lane*/) {
    CUTLASS_PRAGMA_UNROLL
    for (int m = 0; m < 2; ++m) {
      CUTLASS_PRAGMA_UNROLL
      for (int x = 0; x < 4; ++x) {
        const float* pair = &s[2 * step + (x >> 1)][4 * m + 2 * (x & 1)];
        a.r[m][x] = ptx::pack<scalar_t>(pair[0], pair[1]);
      }
    }
  }

  CUTLASS_DEVICE static void mma(float (&c0)[8], float (&c1)[8], const FragA& a, const FragB& b) {
    CUTLASS_PRAGMA_UNROLL
    for (int m = 0; m < 2; ++m) {
      ptx::mma_16x8x16<scalar_t, ArchTag>(c0 + 4 * m, a.r[m], b.r[0]);
      ptx::mma_16x8x16<scalar_t, ArchTag>(c1 + 4 * m, a.r[m], b.r[1]);
    }
  }
};

}  // namespace ds4s
