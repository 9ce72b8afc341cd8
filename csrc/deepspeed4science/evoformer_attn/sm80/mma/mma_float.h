// float: TF32 tensor cores on Sm80 (mma.m16n8k8), or FFMA in full precision on every family.
#pragma once

namespace ds4s {

template <typename ArchTag>
struct WarpMma<float, ArchTag, true, void> : QuadLayout<float> {
  static_assert(ArchTraits<ArchTag>::kCapability >= 80, "TF32 begins with Sm80");
  static constexpr int kStepK = 8;
  struct FragA {
    uint32_t r[2][4];
  };
  struct FragB {
    uint32_t r[2][2];
  };
  using FragBnk = FragB;
  using FragBkn = FragB;

  // ldmatrix moves a 32-bit element as two 16-bit ones: eight rows of four floats.
  template <typename TileT>
  CUTLASS_DEVICE static int lane_a(int lane) {
    return TileT::offset(lane & 15, 4 * (lane >> 4));
  }
  template <typename TileT, typename Order = Permuted>
  CUTLASS_DEVICE static int lane_b_nk(int lane) {
    return TileT::offset(Order::at(lane >> 4, lane & 7), 4 * ((lane >> 3) & 1));
  }
  // The instruction's k = t, t + 4 are the score columns 2 t, 2 t + 1, which a lane's accumulator holds.
  template <typename TileT, typename Order = Permuted>
  CUTLASS_DEVICE static int lane_b_kn(int lane) {
    return TileT::offset(Order::at(0, contracted<Order>(lane & 3, 0)), lane >> 2);
  }

  template <typename TileT>
  CUTLASS_DEVICE static void load_a(FragA& a, const float* lane_ptr, int row0, int k0) {
    CUTLASS_PRAGMA_UNROLL
    for (int m = 0; m < 2; ++m) {
      ptx::ldmatrix(a.r[m], lane_ptr + TileT::offset(row0 + 16 * m, k0));
      CUTLASS_PRAGMA_UNROLL
      for (int x = 0; x < 4; ++x) a.r[m][x] = round(a.r[m][x]);
    }
  }
  template <typename TileT, typename Order = Permuted>
  CUTLASS_DEVICE static void load_b_nk(FragBnk& b, const float* lane_ptr, int n0, int pair, int k0) {
    uint32_t r[4];
    ptx::ldmatrix(r, lane_ptr + TileT::offset(n0 + Order::at(2 * pair, 0), k0));
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < 4; ++x) b.r[x >> 1][x & 1] = round(r[x]);
  }
  template <typename TileT, typename Order = Permuted>
  CUTLASS_DEVICE static void load_b_kn(FragBkn& b, const float* lane_ptr, int k0, int step, int n0) {
    CUTLASS_PRAGMA_UNROLL
    for (int tile = 0; tile < 2; ++tile) {
      CUTLASS_PRAGMA_UNROLL
      for (int x = 0; x < 2; ++x) {
        b.r[tile][x] =
            ptx::to_tf32(lane_ptr[TileT::offset(k0 + Order::at(step, contracted<Order>(0, x)), n0 + 8 * tile)]);
      }
    }
  }

  CUTLASS_DEVICE static void from_scores(FragA& a, const float (&s)[4][8], int step, int /*lane*/) {
    CUTLASS_PRAGMA_UNROLL
    for (int m = 0; m < 2; ++m) {
      CUTLASS_PRAGMA_UNROLL
      for (int x = 0; x < 4; ++x) a.r[m][x] = ptx::to_tf32(s[step][4 * m + 2 * (x & 1) + (x >> 1)]);
    }
  }

  CUTLASS_DEVICE static void mma(float (&c0)[8], float (&c1)[8], const FragA& a, const FragB& b) {
    CUTLASS_PRAGMA_UNROLL
    for (int m = 0; m < 2; ++m) {
      ptx::mma_16x8x8_tf32(c0 + 4 * m, a.r[m], b.r[0]);
      ptx::mma_16x8x8_tf32(c1 + 4 * m, a.r[m], b.r[1]);
    }
  }

 private:
  template <typename Order>
  CUTLASS_HOST_DEVICE static constexpr int contracted(int t, int x) {
    return cutlass::platform::is_same<Order, NaturalOrder>::value ? t + 4 * x : 2 * t + x;
  }
  CUTLASS_DEVICE static uint32_t round(uint32_t x) { return ptx::to_tf32(__uint_as_float(x)); }
};

template <typename ArchTag>
struct WarpMma<float, ArchTag, false, void> : QuadLayout<float> {
  static constexpr int kStepK = 4;
  struct FragA {
    float r[4][4];
  };  // [lane_row][k]
  struct FragBnk {
    float r[2][2][4];
  };  // [tile][column of the pair][k]
  using FragBkn = FragBnk;

  template <typename TileT>
  CUTLASS_DEVICE static int lane_a(int lane) {
    return TileT::offset(lane >> 2);
  }
  template <typename TileT, typename Order = Permuted>
  CUTLASS_DEVICE static int lane_b_nk(int lane) {
    return TileT::offset(Order::at(0, 2 * (lane & 3)));
  }
  template <typename TileT, typename Order = Permuted>
  CUTLASS_DEVICE static int lane_b_kn(int lane) {
    return 2 * (lane & 3);
  }

  template <typename TileT>
  CUTLASS_DEVICE static void load_a(FragA& a, const float* lane_ptr, int row0, int k0) {
    CUTLASS_PRAGMA_UNROLL
    for (int lane_row = 0; lane_row < 4; ++lane_row)
      load_4(a.r[lane_row], lane_ptr + TileT::offset(row0 + 8 * lane_row, k0));
  }
  template <typename TileT, typename Order = Permuted>
  CUTLASS_DEVICE static void load_b_nk(FragBnk& b, const float* lane_ptr, int n0, int pair, int k0) {
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < 4; ++x) {
      load_4(b.r[x >> 1][x & 1], lane_ptr + TileT::offset(n0 + Order::at(2 * pair + (x >> 1), x & 1), k0));
    }
  }
  // Four neighbouring keys belong to one lane of the quad, so the permuted order of a step is the natural one.
  template <typename TileT, typename Order = Permuted>
  CUTLASS_DEVICE static void load_b_kn(FragBkn& b, const float* lane_ptr, int k0, int step, int n0) {
    CUTLASS_PRAGMA_UNROLL
    for (int tile = 0; tile < 2; ++tile) {
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < 4; ++k) {
        float2 x = *reinterpret_cast<const float2*>(lane_ptr + TileT::offset(k0 + 4 * step + k, n0 + 8 * tile));
        b.r[tile][0][k] = x.x, b.r[tile][1][k] = x.y;
      }
    }
  }

  CUTLASS_DEVICE static void from_scores(FragA& a, const float (&s)[4][8], int step, int /*lane*/) {
    CUTLASS_PRAGMA_UNROLL
    for (int lane_row = 0; lane_row < 4; ++lane_row) {
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < 4; ++k) {
        a.r[lane_row][k] = ptx::shfl_quad(s[2 * (step >> 2) + (k >> 1)][2 * lane_row + (k & 1)], step & 3);
      }
    }
  }

  // Four products are summed before they are added to the accumulator, which makes a quarter of the roundings at its
  // size. At D = 128, one chain over all channels that begins with the bias has 1.7 times the error of PyTorch's
  // product, this has 0.9 times.
  CUTLASS_DEVICE static void mma(float (&c0)[8], float (&c1)[8], const FragA& a, const FragBnk& b) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 8; ++i) {
      c0[i] += dot_4(a.r[i >> 1], b.r[0][i & 1]);
      c1[i] += dot_4(a.r[i >> 1], b.r[1][i & 1]);
    }
  }

 private:
  CUTLASS_DEVICE static float dot_4(const float (&x)[4], const float (&y)[4]) {
    return fmaf(x[3], y[3], fmaf(x[2], y[2], fmaf(x[1], y[1], x[0] * y[0])));
  }
  CUTLASS_DEVICE static void load_4(float (&r)[4], const float* p) {
    float4 x = *reinterpret_cast<const float4*>(p);
    r[0] = x.x, r[1] = x.y, r[2] = x.z, r[3] = x.w;
  }
};

}  // namespace ds4s
