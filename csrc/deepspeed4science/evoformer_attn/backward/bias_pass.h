// dbias2 = sum over n of P * (dP - delta). A block owns kRows queries x kCols keys of one (b, h), keeps that tile of
// bias2 and of dbias2 in registers and walks over the rows n (or a slice of them): S and dP are computed again, bias2 is
// read once for all n, and nothing is added through memory until the end.
//
// Warp w owns queries 32 w .. 32 w + 31 and all kCols keys. Shared memory, kStages times: tiles of Q, dO, K, V and the
// row of bias1 for one n.
#pragma once

#include "backward/scores.h"
#include "epilogue/atomic_add.h"

namespace ds4s {

template <typename Config>
struct BiasPass {
  using scalar_t = typename Config::scalar_t;
  using Mma = typename Config::Mma;
  using RowTile = Tile<scalar_t, Config::kRows, Config::kHeadDim>;
  using ColTile = Tile<scalar_t, Config::kCols, Config::kHeadDim>;
  using Operand = RowOperand<Mma, RowTile, scalar_t, Config::kResident>;
  template <typename TileT>
  using Loader = TileLoader<scalar_t, TileT, Config::kThreads, Config::kIsAligned, Config::kAsync>;

  static constexpr int kCols = Config::kCols;
  static constexpr int kStripes = Config::kStripes;
  static constexpr int kSlots = Mma::kSlots;
  static constexpr int kChunkTiles = Config::kResident ? 2 : 4;
  using Exponent = Probabilities<Config, ColTile, kChunkTiles, /*kLseInColumns=*/false>;
  static constexpr int kStageBytes = 2 * RowTile::kBytes + 2 * ColTile::kBytes + kCols * 4;
  static constexpr int shared_bytes(int stages) { return stages * kStageBytes; }

  // What a query contributes to one n.
  struct RowValues {
    float exponent[kSlots], dp[kSlots];
    CUTLASS_DEVICE void load(const BackwardArgs& args, int64_t base, int rows) {
      CUTLASS_PRAGMA_UNROLL
      for (int slot = 0; slot < kSlots; ++slot) {
        bool exists = slot * Mma::kRowStep < rows;
        exponent[slot] = exists ? args.negative_lse[base + slot * Mma::kRowStep] * Exponent::row_unit : negative_infinity();
        dp[slot] = exists ? args.negative_delta[base + slot * Mma::kRowStep] : 0.f;
      }
    }
  };

  CUTLASS_DEVICE static void run(const BackwardArgs& args, int stages, char* shared) {
    const BwdParams& p = args.p;
    int thread = int(threadIdx.x), lane = thread & 31, warp_row = thread / 32 * 32;

    // Which tile and which n.
    uint32_t row_blocks = uint32_t(p.Lq + Config::kRows - 1) / Config::kRows;
    uint32_t col_blocks = uint32_t(p.Lk + kCols - 1) / kCols;
    uint32_t rest = uniform(blockIdx.x / col_blocks);
    int col0 = int(blockIdx.x - rest * col_blocks) * kCols;
    uint32_t next = uniform(rest / row_blocks);
    int row0 = int(rest - next * row_blocks) * Config::kRows;
    rest = uniform(next / uint32_t(p.H));
    int64_t h = next - rest * uint32_t(p.H);
    int64_t slice = uniform(rest / uint32_t(p.B)), b = rest - uint32_t(slice) * uint32_t(p.B);
    int n_begin = int(p.N * slice / args.dbias2_slices), n_end = int(p.N * (slice + 1) / args.dbias2_slices);
    int rows_left = int(p.Lq) - row0, cols_left = int(p.Lk) - col0;
    int lane_row = warp_row + Mma::row_of_lane(lane);

    // One n arrives in one stage.
    const scalar_t* gQ = element<const scalar_t>(p.q, p.q_stride, b, 0, row0, h);
    const scalar_t* gDo = element<const scalar_t>(p.do_, p.do_stride, b, 0, row0, h);
    const scalar_t* gK = element<const scalar_t>(p.k, p.k_stride, b, 0, col0, h);
    const scalar_t* gV = element<const scalar_t>(p.v, p.v_stride, b, 0, col0, h);
    auto stage_begin = [&](int stage) { return reinterpret_cast<scalar_t*>(shared + stage * kStageBytes); };
    constexpr int kRowElements = RowTile::kBytes / sizeof(scalar_t), kColElements = ColTile::kBytes / sizeof(scalar_t);
    auto stage_columns = [&](int stage) {
      return reinterpret_cast<float*>(stage_begin(stage) + 2 * kRowElements + 2 * kColElements);
    };
    auto load = [&](int n, int stage) {
      scalar_t* s = stage_begin(stage);
      int t = thread, d = int(p.D), dv = int(p.Dv);
      ptx::keep(t);  // the loaders' registers are needed here only
      Loader<RowTile>(gQ + n * p.q_stride[1], p.q_stride[2], d, t).load(s, rows_left);
      Loader<RowTile>(gDo + n * p.do_stride[1], p.do_stride[2], dv, t).load(s + kRowElements, rows_left);
      Loader<ColTile>(gK + n * p.k_stride[1], p.k_stride[2], d, t).load(s + 2 * kRowElements, cols_left);
      Loader<ColTile>(gV + n * p.v_stride[1], p.v_stride[2], dv, t)
          .load(s + 2 * kRowElements + kColElements, cols_left);
      if constexpr (Config::kAsync) ptx::cp_async_commit();
    };
    Exponent probabilities(p.scale);
    float unit = probabilities.column_unit();
    auto load_column = [&](int n) {
      if (thread >= kCols || thread >= cols_left) return negative_infinity();
      return args.bias1 ? args.bias1[(b * p.N + n) * p.Lk + col0 + thread] * unit : 0.f;
    };
    auto row_base = [&](int n) { return ((b * p.N + n) * p.H + h) * p.Lq + row0 + lane_row; };

    // The tile of bias2, and of its gradient.
    BiasFragment<Mma, scalar_t> bias[kStripes];
    float dbias[kStripes][4][8] = {};
    const scalar_t* gBias = static_cast<const scalar_t*>(args.bias2.ptr) + b * args.bias2.stride_b +
                            h * args.bias2.stride_h + (row0 + lane_row) * args.bias2.stride_row + col0 +
                            Mma::first_column(lane);
    CUTLASS_PRAGMA_UNROLL
    for (int stripe = 0; stripe < kStripes; ++stripe) {
      bias[stripe].load(gBias + 32 * stripe, args.bias2.stride_row, rows_left - lane_row,
                        cols_left - Mma::first_column(lane) - 32 * stripe);
    }

    int lane_nk = Mma::template lane_b_nk<ColTile>(lane), stage = 0;
    RowValues rows, next_rows;
    if (n_begin < n_end) {
      load(n_begin, 0);
      float x = load_column(n_begin);
      if (thread < kCols) stage_columns(0)[thread] = x;
      rows.load(args, row_base(n_begin), rows_left - lane_row);
    }
    CUTLASS_PRAGMA_NO_UNROLL
    for (int n = n_begin; n < n_end; ++n) {
      // This n arrives; the next one sets out.
      if constexpr (Config::kAsync) ptx::cp_async_wait<0>();
      __syncthreads();
      bool more = n + 1 < n_end;
      int next_stage = stages == 2 ? stage ^ 1 : 0;
      float next_column = 0.f;
      if (Config::kMaxStages == 2 && stages == 2 && more) load(n + 1, next_stage);
      if (more) {
        next_column = load_column(n + 1);
        next_rows.load(args, row_base(n + 1), rows_left - lane_row);
      }

      const scalar_t* s = stage_begin(stage);
      const float* sColumns = stage_columns(stage);
      Operand operand_q, operand_do;
      operand_q.attach(s, warp_row, lane);
      operand_do.attach(s + kRowElements, warp_row, lane);
      operand_q.fetch(), operand_do.fetch();
      const scalar_t* sK = s + 2 * kRowElements + lane_nk;
      const scalar_t* sV = sK + kColElements;
      CUTLASS_PRAGMA_UNROLL
      for (int stripe = 0; stripe < kStripes; ++stripe) {
        float score[4][8], dp[4][8];
        CUTLASS_PRAGMA_UNROLL
        for (int first = 0; first < 4; first += kChunkTiles) {
          if (stripe + first > 0) __syncwarp();  // keeps the chunks apart: interleaved, they need too many registers
          CUTLASS_PRAGMA_UNROLL
          for (int j = first; j < first + kChunkTiles; ++j) begin_with_rows<Mma>(dp[j], rows.dp);
          probabilities(score, first, operand_q, sK + ColTile::offset(32 * stripe), sColumns + 32 * stripe,
                        rows.exponent, bias[stripe], lane);
          multiply_rows<Mma, ColTile, kChunkTiles / 2>(dp, first / 2, operand_do, sV + ColTile::offset(32 * stripe));
          CUTLASS_PRAGMA_UNROLL
          for (int j = first; j < first + kChunkTiles; ++j) {
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < 8; ++i) dbias[stripe][j][i] = fmaf(score[j][i], dp[j][i], dbias[stripe][j][i]);
          }
        }
      }

      if (stages == 1 && more) {
        __syncthreads();
        load(n + 1, 0);
      }
      if (more && thread < kCols) stage_columns(next_stage)[thread] = next_column;
      rows = next_rows;
      stage = next_stage;
    }

    // One slice stores; several add, or leave their parts.
    float* out = args.dbias2_parts ? args.dbias2_parts + slice * (p.B * p.H * p.Lq * p.Lk) : p.dbias2;
    bool adds = args.dbias2_slices > 1 && !args.dbias2_parts;
    out += ((b * p.H + h) * p.Lq + row0 + lane_row) * p.Lk + col0 + Mma::first_column(lane);
    CUTLASS_PRAGMA_UNROLL
    for (int stripe = 0; stripe < kStripes; ++stripe) {
      CUTLASS_PRAGMA_UNROLL
      for (int slot = 0; slot < kSlots; ++slot) {
        CUTLASS_PRAGMA_UNROLL
        for (int x = 0; x < Mma::kGroups * Mma::kVec; x += 4) {
          int group = x / Mma::kVec, e = x % Mma::kVec;
          int row = slot * Mma::kRowStep, col = 32 * stripe + group * Mma::kGroupStep + e;
          float v[4];
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < 4; ++i) v[i] = dbias[stripe][Mma::tile_of(group, e + i)][Mma::value_of(slot, e + i)];
          int valid = row < rows_left - lane_row ? cols_left - Mma::first_column(lane) - col : 0;
          put(out + row * p.Lk + col, v, valid, p.Lk % 4 == 0, adds);
        }
      }
    }
  }

 private:
  // Four neighbours, of which `valid` exist. vectors: rows begin at 16 bytes.
  CUTLASS_DEVICE static void put(float* dst, const float (&v)[4], int valid, bool vectors, bool adds) {
    if (valid >= 4 && adds) {
      atomic_add<4>(dst, v);
    } else if (valid >= 4 && vectors) {
      *reinterpret_cast<float4*>(dst) = make_float4(v[0], v[1], v[2], v[3]);
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4; ++i) {
        if (i >= valid) break;
        if (adds) {
          atomic_add<1>(dst + i, v + i);
        } else {
          dst[i] = v[i];
        }
      }
    }
  }
};

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    backward_bias_pass(const __grid_constant__ BackwardArgs args, int stages) {
  extern __shared__ __align__(16) char shared[];
  BiasPass<Config>::run(args, stages, shared);
}

}  // namespace ds4s
