// Full precision: what the passes know of each query, from scores that have the same bits as theirs,
//
//   s = scale q k + bias1 + bias2       max = max over k of s       sum = sum over k of exp(s - max)
//   center = rowsum(do * o)             rest = sum over k of exp(s - max) / sum * (dP - center)
//
// written as (-max, 1 / sum) and (-center, -rest): P = exp(s - max) / sum and dS = P ((dP - center) - rest). The
// forward's lse in place of max and sum would add its own rounding, which is that of all of P in a row at once and
// grows with |lse|, and delta = center alone would inherit the rounding of o: with both, errors of the gradients are
// twice as large, and more where scores are (docs/kernels-sm80-backward.md).
//
// A block owns kRows queries of one (b, n, h) and walks over the keys, kCols at a time; warp w owns rows 32 w ...
// Shared memory: tiles of Q, dO, K and V, bias1 of the columns, center of the rows.
#pragma once

#include "common/preprocess.h"
#include "sm80/backward/score_tile.h"

namespace ds4s {

template <typename Config>
struct RowStatistics {
  using scalar_t = typename Config::scalar_t;
  using Mma = typename Config::Mma;
  using RowTile = Tile<scalar_t, Config::kRows, Config::kHeadDim>;
  using ColTile = Tile<scalar_t, Config::kCols, Config::kHeadDim>;
  using Operand = RowOperand<Mma, RowTile, scalar_t, /*kResident=*/false>;
  template <typename TileT>
  using Loader = TileLoader<scalar_t, TileT, Config::kThreads, Config::kIsAligned, Config::kAsync>;
  using Exponent = Probabilities<Config, ColTile, 4, /*kLseInColumns=*/false>;
  static_assert(Config::kExact, "for float in full precision");
  static_assert(Config::kThreads == Config::kRows && Config::kThreads >= Config::kCols, "a thread for each statistic");

  static constexpr int kCols = Config::kCols;
  static constexpr int kSlots = Mma::kSlots;
  static constexpr int kRowElements = RowTile::kBytes / sizeof(scalar_t);
  static constexpr int kColElements = ColTile::kBytes / sizeof(scalar_t);
  static constexpr int kSharedBytes =
      2 * RowTile::kBytes + 2 * ColTile::kBytes + kCols * kColumnBytes + Config::kRows * int(sizeof(float));

  CUTLASS_DEVICE static void run(const BackwardArgs& args, float2* softmax, float2* negative_delta, char* shared) {
    const BwdParams& p = args.p;
    int thread = int(threadIdx.x), lane = thread & 31, warp_row = thread / 32 * 32;
    uint32_t row_blocks = uint32_t(p.Lq + Config::kRows - 1) / Config::kRows;
    uint32_t bnh = blockIdx.x / row_blocks, bn = bnh / uint32_t(p.H);
    int row0 = int(blockIdx.x - bnh * row_blocks) * Config::kRows;
    int64_t h = bnh - bn * uint32_t(p.H), b = bn / uint32_t(p.N), n = bn - b * p.N;
    int rows_left = int(p.Lq) - row0;
    if (args.mask.sees_nothing(bn)) {  // P = 0, and nothing is read
      if (thread >= rows_left) return;
      softmax[bnh * p.Lq + row0 + thread] = make_float2(-infinity(), 0.f);
      negative_delta[bnh * p.Lq + row0 + thread] = make_float2(0.f, 0.f);
      return;
    }

    // Rows.
    scalar_t* sQ = reinterpret_cast<scalar_t*>(shared);
    scalar_t* sDo = sQ + kRowElements;
    scalar_t* sK = sDo + kRowElements;
    scalar_t* sV = sK + kColElements;
    float* sColumns = reinterpret_cast<float*>(sV + kColElements);
    float* sCenter = sColumns + kCols * kColumnBytes / sizeof(float);
    const scalar_t* gQ = element<const scalar_t>(p.q, p.q_stride, b, n, row0, h);
    const scalar_t* gDo = element<const scalar_t>(p.do_, p.do_stride, b, n, row0, h);
    Loader<RowTile>(gQ, p.q_stride[2], int(p.D), thread).load(sQ, rows_left);
    Loader<RowTile>(gDo, p.do_stride[2], int(p.Dv), thread).load(sDo, rows_left);
    float center = 0.f;
    if (thread < rows_left) {
      const scalar_t* gO = element<const scalar_t>(p.o, p.o_stride, b, n, row0 + thread, h);
      for (int chunk = 0; chunk * 4 < int(p.Dv); ++chunk) {  // each chunk of four is summed first
        center += dot_share<Config>(load_share<Config>(gO, int(p.Dv), chunk),
                                    load_share<Config>(gDo + thread * p.do_stride[2], int(p.Dv), chunk));
      }
    }
    sCenter[thread] = center;

    // Columns.
    Loader<ColTile> k_loader(element<const scalar_t>(p.k, p.k_stride, b, n, 0, h), p.k_stride[2], int(p.D), thread);
    Loader<ColTile> v_loader(element<const scalar_t>(p.v, p.v_stride, b, n, 0, h), p.v_stride[2], int(p.Dv), thread);
    Bias1Row<scalar_t> bias1(args, b, n);
    const scalar_t* gBias =
        static_cast<const scalar_t*>(args.bias2.ptr) + b * args.bias2.stride_b + h * args.bias2.stride_h;
    int bias_row = row0 + warp_row + Mma::row_of_lane(lane);
    int lane_nk = Mma::template lane_b_nk<ColTile>(lane);
    Operand operand_q, operand_do;
    operand_q.attach(sQ, warp_row, lane), operand_do.attach(sDo, warp_row, lane);
    Exponent exponent(p.scale);

    // A lane's share of its rows.
    float max[kSlots], sum[kSlots] = {}, rest[kSlots] = {};
    CUTLASS_PRAGMA_UNROLL
    for (int slot = 0; slot < kSlots; ++slot) max[slot] = -infinity();

    CUTLASS_PRAGMA_NO_UNROLL
    for (int col0 = 0; col0 < int(p.Lk); col0 += kCols) {
      int cols_left = int(p.Lk) - col0;
      if (args.mask.units(bn, col0, kCols / KeyMask::kUnit) == 0) {
        k_loader.advance(), v_loader.advance();
        continue;
      }
      __syncthreads();
      k_loader.load(sK, cols_left), k_loader.advance();
      v_loader.load(sV, cols_left), v_loader.advance();
      if (thread < kCols) {
        store_column(sColumns, thread, thread < cols_left ? bias1.at(col0 + thread) : -infinity());
      }
      if constexpr (Config::kAsync) ptx::cp_async_commit(), ptx::cp_async_wait<0>();
      __syncthreads();

      CUTLASS_PRAGMA_NO_UNROLL
      for (int stripe = 0; stripe < Config::kStripes && 32 * stripe < cols_left; ++stripe) {
        BiasFragment<Mma, scalar_t> bias;
        if constexpr (Config::kHasBias2) {
          bias.load(gBias, int(args.bias2.stride_row), bias_row, int(p.Lq) - 1,
                    col0 + 32 * stripe + Mma::first_column(lane), int(p.Lk - 1) / Mma::kVec * Mma::kVec);
        }
        float s[4][8] = {}, dp[4][8] = {};
        int offset = ColTile::offset(32) * stripe + lane_nk;
        multiply_rows<Mma, ColTile, 2>(s, 0, operand_q, sK + offset);
        multiply_rows<Mma, ColTile, 2>(dp, 0, operand_do, sV + offset);
        add_biases(exponent, s, bias, sColumns + 64 * stripe, lane);
        CUTLASS_PRAGMA_UNROLL
        for (int slot = 0; slot < kSlots; ++slot) {
          float center = sCenter[warp_row + Mma::row_of_lane(lane) + slot * Mma::kRowStep];
          take_in(s, dp, slot, center, max[slot], sum[slot], rest[slot]);
        }
      }
    }

    // The lanes of a row put theirs together.
    CUTLASS_PRAGMA_UNROLL
    for (int slot = 0; slot < kSlots; ++slot) {
      float largest = Mma::reduce_max(max[slot]);
      float keep = expf(max[slot] - reference(largest));
      float total = Mma::reduce_sum(sum[slot] * keep), part = Mma::reduce_sum(rest[slot] * keep);
      int r = warp_row + Mma::row_of_lane(lane) + slot * Mma::kRowStep;
      if (!Mma::leads_row(lane) || r >= rows_left) continue;
      bool nothing = largest == -infinity();
      float inverse = nothing ? 0.f : 1.f / total;
      softmax[bnh * p.Lq + row0 + r] = make_float2(nothing ? largest : -largest, inverse);
      negative_delta[bnh * p.Lq + row0 + r] = make_float2(-sCenter[r], -part * inverse);
    }
  }

 private:
  // What is subtracted in exponents: while nothing is visible 0, as exp(-inf - 0) is the right 0.
  CUTLASS_DEVICE static float reference(float max) { return max == -infinity() ? 0.f : max; }

  CUTLASS_DEVICE static void add_biases(const Exponent& exponent, float (&s)[4][8],
                                        const BiasFragment<Mma, scalar_t>& bias, const float* sColumns, int lane) {
    CUTLASS_PRAGMA_UNROLL
    for (int slot = 0; slot < kSlots; ++slot) {
      CUTLASS_PRAGMA_UNROLL
      for (int x = 0; x < Mma::kGroups * Mma::kVec; x += 2) {
        int group = x / Mma::kVec, e = x % Mma::kVec, j = Mma::tile_of(group, e), i = Mma::value_of(slot, e);
        float4 column = columns_of<Mma>(sColumns, j, i / 4, lane);
        float2 b = make_float2(0.f, 0.f);
        if constexpr (Config::kHasBias2) b = bias.pair(slot, group, e);
        s[j][i] = exponent.exact_score(s[j][i], column.x, b.x);
        s[j][i + 1] = exponent.exact_score(s[j][i + 1], column.y, b.y);
      }
    }
  }

  // Eight scores of a row. Sums of their own first: fewer roundings at the size of the whole.
  CUTLASS_DEVICE static void take_in(const float (&s)[4][8], const float (&dp)[4][8], int slot, float center,
                                     float& max, float& sum, float& rest) {
    float largest = max;
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < 32; ++x) {
      if (Mma::slot_of(x % 8) == slot) largest = fmaxf(largest, s[x / 8][x % 8]);
    }
    float part_sum = 0.f, part_rest = 0.f;
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < 32; ++x) {
      if (Mma::slot_of(x % 8) != slot) continue;
      float e = expf(s[x / 8][x % 8] - reference(largest));
      part_sum += e, part_rest = fmaf(e, dp[x / 8][x % 8] - center, part_rest);
    }
    float keep = expf(max - reference(largest));
    sum = fmaf(sum, keep, part_sum), rest = fmaf(rest, keep, part_rest);
    max = largest;
  }
};

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 8 / Config::kWarps)
    row_statistics(const __grid_constant__ BackwardArgs args, float2* softmax, float2* negative_delta) {
  extern __shared__ __align__(16) char shared[];
  RowStatistics<Config>::run(args, softmax, negative_delta, shared);
}

}  // namespace ds4s
