// dbias2 = sum over n of P * (dP - delta). A block owns kRows queries x kCols keys of one (b, h), keeps that tile of
// bias2 and of dbias2 in registers and walks over the rows n (or a slice of them): S and dP are computed again, bias2
// is read once for all n, and nothing is added through memory until the end.
//
// Rows n that see none of the keys are left out (visible_rows.h).
//
// A warp owns 32 queries x 32 kStripes keys. Shared memory, for each stage: tiles of Q, dO, K, V and the statistics of
// their rows for one n.
#pragma once

#include "common/atomic_add.h"
#include "sm80/backward/score_tile.h"
#include "sm80/backward/visible_rows.h"

namespace ds4s {

template <typename Config>
struct BiasPass {
  using scalar_t = typename Config::scalar_t;
  using Mma = typename Config::Mma;
  using RowTile = Tile<scalar_t, Config::kRows, Config::kHeadDim>;
  using ColTile = Tile<scalar_t, Config::kCols, Config::kHeadDim>;
  using Operand = RowOperand<Mma, RowTile, scalar_t, Config::kResident>;
  template <typename TileT>
  using Loader = TileLoader<scalar_t, TileT, Config::kLoadThreads, Config::kIsAligned, Config::kAsync>;

  // One half of the threads brings Q and K, the other dO and V; a small block brings both with all of them.
  static constexpr int kSources = 2 * Config::kLoadThreads / Config::kThreads;

  static constexpr int kCols = Config::kCols;
  static constexpr int kStripes = Config::kStripes;  // of a warp
  static constexpr int kRowWarps = Config::kRows / 32;
  static constexpr int kSlots = Mma::kSlots;
  static constexpr int kChunkTiles = Config::kChunkTiles;
  using Exponent = Probabilities<Config, ColTile, kChunkTiles, /*kLseInColumns=*/false>;
  using QueryValue = typename Config::QueryValue;
  static constexpr int kRowValuesBytes =
      Config::kRows * (8 + int(sizeof(QueryValue)));  // dp (one part: twice), exponent
  static constexpr int kStageBytes = 2 * RowTile::kBytes + 2 * ColTile::kBytes + kCols * kColumnBytes + kRowValuesBytes;
  static_assert(Config::kRows <= Config::kThreads && kCols <= Config::kThreads, "a thread brings at most one of each");
  static constexpr int shared_bytes(int stages) { return stages * kStageBytes; }

  // What a thread brings for one n: bias1 of a key, lse and -delta of a query.
  struct Statistics {
    uint32_t column;  // bits, as they lie in memory
    float shift;
    QueryValue lse, dp;
  };

  CUTLASS_DEVICE static void run(const BackwardArgs& args, int stages, char* shared) {
    const BwdParams& p = args.p;
    int thread = int(threadIdx.x), lane = thread & 31;
    int warp_row = thread / 32 % kRowWarps * 32, warp_col = thread / 32 / kRowWarps * (32 * kStripes);

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

    // One n arrives in one stage; load() is called once for each, in order.
    int half = int(uniform(uint32_t(thread / Config::kLoadThreads)));
    const scalar_t *g_rows[kSources], *g_cols[kSources];
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < kSources; ++x) {
      bool second = x + half == 1;
      g_rows[x] = second ? element<const scalar_t>(p.do_, p.do_stride, b, n_begin, row0, h)
                         : element<const scalar_t>(p.q, p.q_stride, b, n_begin, row0, h);
      g_cols[x] = second ? element<const scalar_t>(p.v, p.v_stride, b, n_begin, col0, h)
                         : element<const scalar_t>(p.k, p.k_stride, b, n_begin, col0, h);
    }
    auto stage_begin = [&](int stage) { return reinterpret_cast<scalar_t*>(shared + stage * kStageBytes); };
    constexpr int kRowElements = RowTile::kBytes / sizeof(scalar_t), kColElements = ColTile::kBytes / sizeof(scalar_t);
    auto stage_columns = [&](int stage) {
      return reinterpret_cast<float*>(stage_begin(stage) + 2 * kRowElements + 2 * kColElements);
    };
    auto load = [&](int stage) {
      int t = thread - half * Config::kLoadThreads;
      ptx::keep(t);  // the loaders' registers are needed here only
      CUTLASS_PRAGMA_UNROLL
      for (int x = 0; x < kSources; ++x) {
        bool second = x + half == 1;
        scalar_t* s = stage_begin(stage);
        int cols = second ? int(p.Dv) : int(p.D);
        Loader<RowTile>(g_rows[x], second ? p.do_stride[2] : p.q_stride[2], cols, t)
            .load(s + (second ? kRowElements : 0), rows_left);
        Loader<ColTile>(g_cols[x], second ? p.v_stride[2] : p.k_stride[2], cols, t)
            .load(s + 2 * kRowElements + (second ? kColElements : 0), cols_left);
      }
      if constexpr (Config::kAsync) ptx::cp_async_commit();
    };
    Exponent probabilities(p.scale);
    float unit = probabilities.column_unit();
    bool has_row = thread < Config::kRows && thread < rows_left, has_column = thread < kCols && thread < cols_left;
    int64_t row_index = ((b * p.N + n_begin) * p.H + h) * p.Lq + row0 + thread;
    const scalar_t* g_bias1 = static_cast<const scalar_t*>(args.bias1) + b * args.bias1_stride[0] +
                              n_begin * args.bias1_stride[1] + col0 + thread;
    auto load_statistics = [&](int n) {
      Statistics x{};
      if (args.bias1) {
        x.shift = args.mask.shift_of(b * p.N + n);
        if (has_column) x.column = ptx::load_bits(g_bias1);
      }
      if (has_row) {
        if constexpr (Config::kExact) {
          x.lse = args.softmax[row_index];
        } else {
          x.lse = p.lse[row_index];
        }
        x.dp = static_cast<const QueryValue*>(args.negative_delta)[row_index];
      }
      return x;
    };
    // From one n to a later one; what load() and load_statistics() read.
    auto advance = [&](int num_rows) {
      CUTLASS_PRAGMA_NO_UNROLL
      for (; num_rows > 0; --num_rows) {
        CUTLASS_PRAGMA_UNROLL
        for (int x = 0; x < kSources; ++x) {
          bool second = x + half == 1;
          g_rows[x] += second ? p.do_stride[1] : p.q_stride[1];
          g_cols[x] += second ? p.v_stride[1] : p.k_stride[1];
        }
        g_bias1 += args.bias1_stride[1], row_index += p.H * p.Lq;
      }
    };
    auto store_statistics = [&](int stage, const Statistics& x) {
      float* sColumns = stage_columns(stage);
      if (thread < kCols) {
        float bias1 = Bias1Row<scalar_t>::value(x.column, x.shift) * unit;
        store_column(sColumns, thread, has_column ? bias1 : -infinity());
      }
      if (thread < Config::kRows) {
        float* sRows = sColumns + 2 * kCols;
        QueryValue exponent = x.lse;
        if constexpr (!Config::kExact) {
          exponent = NegativeLse<QueryValue>::value(exponent) * Exponent::row_unit;
        }
        if (!has_row) exponent = one_part<QueryValue>(-infinity());
        float2 dp;
        if constexpr (Config::kExact) {
          dp = x.dp;
        } else {
          dp = make_float2(x.dp, x.dp);
        }
        *reinterpret_cast<float2*>(sRows + 2 * thread) = dp;
        reinterpret_cast<QueryValue*>(sRows + 2 * Config::kRows)[thread] = exponent;
      }
    };

    // The tile of bias2, and of its gradient.
    BiasFragment<Mma, scalar_t> bias[kStripes];
    float dbias[kStripes][4][8] = {};
    const scalar_t* gBias =
        static_cast<const scalar_t*>(args.bias2.ptr) + b * args.bias2.stride_b + h * args.bias2.stride_h;
    int lane_col = col0 + warp_col + Mma::first_column(lane);
    CUTLASS_PRAGMA_UNROLL
    for (int stripe = 0; stripe < kStripes; ++stripe) {
      bias[stripe].load(gBias, int(args.bias2.stride_row), row0 + lane_row, int(p.Lq) - 1, lane_col + 32 * stripe,
                        int(p.Lk - 1) / Mma::kVec * Mma::kVec);
    }

    int lane_nk = Mma::template lane_b_nk<ColTile>(lane) + ColTile::offset(warp_col), stage = 0;
    // 16 bytes spilled in wide tiles, with 32 bits 228; elsewhere it is the other way round (0, 16).
    using Index = typename cutlass::platform::conditional<Config::kIsWide, int64_t, int>::type;
    VisibleRows<kCols, Index> rows(args.mask, Index(b * p.N), col0, n_begin, n_end);
    int n = rows.next(n_begin);
    if (n < n_end) {
      advance(n - n_begin);
      load(0);
      store_statistics(0, load_statistics(n));
    }
    CUTLASS_PRAGMA_NO_UNROLL
    while (n < n_end) {
      // This n arrives; the next one sets out.
      if constexpr (Config::kAsync) ptx::cp_async_wait<0>();
      __syncthreads();
      const int next_n = rows.next(n + 1);
      bool more = next_n < n_end;
      if (more) advance(next_n - n);
      int next_stage = stages == 2 ? stage ^ 1 : 0;
      Statistics next;
      if (Config::kMaxStages == 2 && stages == 2 && more) load(next_stage);
      if (more) next = load_statistics(next_n);

      const scalar_t* s = stage_begin(stage);
      const float* sColumns = stage_columns(stage) + 2 * warp_col;
      const float* sRows = stage_columns(stage) + 2 * kCols;
      QueryValue exponent[kSlots];
      float dp_begin[8];
      CUTLASS_PRAGMA_UNROLL
      for (int slot = 0; slot < kSlots; ++slot) {
        int row = lane_row + slot * Mma::kRowStep;
        exponent[slot] = reinterpret_cast<const QueryValue*>(sRows + 2 * Config::kRows)[row];
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 8; i += 2) {
        float2 x = *reinterpret_cast<const float2*>(sRows + 2 * (lane_row + Mma::slot_of(i) * Mma::kRowStep));
        dp_begin[i] = x.x, dp_begin[i + 1] = x.y;
      }
      Operand operand_q, operand_do;
      operand_q.attach(s, warp_row, lane);
      operand_do.attach(s + kRowElements, warp_row, lane);
      operand_q.fetch(), operand_do.fetch();
      const scalar_t* sK = s + 2 * kRowElements + lane_nk;
      const scalar_t* sV = sK + kColElements;
      CUTLASS_PRAGMA_UNROLL
      for (int stripe = 0; stripe < kStripes; ++stripe) {
        bias[stripe].keep_packed();
        float score[4][8], dp[4][8];
        CUTLASS_PRAGMA_UNROLL
        for (int first = 0; first < 4; first += kChunkTiles) {
          if (stripe + first > 0) __syncwarp();  // keeps the chunks apart: interleaved, they need too many registers
          CUTLASS_PRAGMA_UNROLL
          for (int j = first; j < first + kChunkTiles; ++j) {
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < 8; ++i) dp[j][i] = Config::kExact ? 0.f : dp_begin[i];
          }
          probabilities(score, first, operand_q, sK + ColTile::offset(32 * stripe), sColumns + 64 * stripe, exponent,
                        bias[stripe], lane);
          multiply_rows<Mma, ColTile, kChunkTiles / 2>(dp, first / 2, operand_do, sV + ColTile::offset(32 * stripe));
          CUTLASS_PRAGMA_UNROLL
          for (int j = first; j < first + kChunkTiles; ++j) {
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < 8; ++i) {
              float x = dp[j][i];
              if constexpr (Config::kExact) x = subtract_delta(x, make_float2(dp_begin[i & ~1], dp_begin[i | 1]));
              dbias[stripe][j][i] = fmaf(score[j][i], x, dbias[stripe][j][i]);
            }
          }
        }
      }

      if (stages == 1 && more) {
        __syncthreads();
        load(0);
      }
      if (more) store_statistics(next_stage, next);
      n = next_n, stage = next_stage;
    }

    // One slice stores; several add, or leave their parts.
    float* out = args.dbias2_parts ? args.dbias2_parts + slice * (p.B * p.H * p.Lq * p.Lk) : p.dbias2;
    bool adds = args.dbias2_slices > 1 && !args.dbias2_parts;
    out += ((b * p.H + h) * p.Lq + row0 + lane_row) * p.Lk + lane_col;
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
          int valid = row < rows_left - lane_row ? int(p.Lk) - lane_col - col : 0;
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
