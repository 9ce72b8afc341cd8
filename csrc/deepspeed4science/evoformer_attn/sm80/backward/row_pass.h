// A pass of the backward over rows: a block owns kRows queries and gives their dq, or kRows keys and gives their dk, dv
// and dbias1; it walks over the other side in tiles of kCols. But for dbias1 nothing is added across blocks.
//
//                    rows: queries (kDq)                  rows: keys (kDk, kDv, kDkDv)
//   score tile       S  = Q K^T + bias1 / scale           S^T = K Q^T - lse / scale          raw units
//   probabilities    P  = 2^(c S + log2e (bias2 - lse))   P^T = 2^(c S^T + log2e (bias2^T + bias1))
//   dP - delta       dO V^T - delta                       V dO^T - delta
//   dS               P * (dP - delta)                     the same, transposed
//   out              dq = scale dS K                      dk = scale dS^T Q,  dv = P^T dO,  dbias1 = row sums
//
// What depends on the column is the accumulator's first value, so it costs nothing; what depends on the row joins the
// exponent. Warp w owns rows 32 w .. 32 w + 31 and all columns. Shared memory: for each stage two column tiles and two
// values for each column; two row tiles, in the second stage's place if the loop does not read them there.
//
// Hidden keys (common/key_mask.h): the pass over queries loads no tile of columns without a visible one, and computes
// no stripe behind a tile's last one; in the pass over keys a block of them stores zeros, and (kSkipsWarps) a warp of
// them computes nothing.
//
// With kFusesDq the pass over keys gives dq and dbias2 too (dq_accumulator.h). dS of a column tile then lies in shared
// memory after its turn of the loop, and the next turn multiplies it by K: one barrier a tile serves both. Shared
// memory: the stages; K, and V unless it is in registers (then it comes in where dS will be); two tiles of dS; bias2
// where it comes by query (bias_tile.h); where to add.
#pragma once

#include "sm80/backward/bias_tile.h"
#include "sm80/backward/dq_accumulator.h"
#include "sm80/visible_keys.h"

namespace ds4s {

template <typename Config>
struct RowPass {
  using scalar_t = typename Config::scalar_t;
  using Mma = typename Config::Mma;
  using RowTile = Tile<scalar_t, Config::kRows, Config::kHeadDim>;
  using ColTile = Tile<scalar_t, Config::kCols, Config::kHeadDim>;
  using Operand = RowOperand<Mma, RowTile, scalar_t, Config::kResident>;
  using Exponent = Probabilities<Config, ColTile, Config::kChunkTiles, /*kLseInColumns=*/Config::kKeyRows>;
  using QueryValue = typename Config::QueryValue;
  using RowLoader = TileLoader<scalar_t, RowTile, Config::kThreads, Config::kIsAligned, Config::kAsync>;
  using ColLoader = TileLoader<scalar_t, ColTile, Config::kLoadThreads, Config::kIsAligned, Config::kAsync>;

  // Each half of the threads brings one of the two column tiles; a small block brings both with all of them.
  static constexpr int kSources = 2 * Config::kLoadThreads / Config::kThreads;

  static constexpr bool kKeyRows = Config::kKeyRows;
  static constexpr bool kWantsDs = Config::kWantsDs;
  static constexpr bool kWantsDv = Config::kWantsDv;
  static constexpr bool kFusesDq = Config::kFusesDq;
  static constexpr int kCols = Config::kCols;
  static constexpr int kTiles = Config::kHeadDim / 8;
  static constexpr int kChunkTiles = Config::kChunkTiles;
  static constexpr int kRowBytes = (1 + kWantsDs) * RowTile::kBytes;
  static constexpr int kStageBytes = 2 * ColTile::kBytes + 2 * kCols * kColumnBytes;
  CUTLASS_HOST_DEVICE static constexpr int rows_begin(int stages) {
    return (Config::kResident && !kFusesDq ? 1 : stages) * kStageBytes;
  }
  static constexpr int shared_bytes(int stages) {
    if constexpr (kFusesDq) return outputs_begin(stages) + int(sizeof(DqOutputs));
    return rows_begin(stages) + (stages == 2 && Config::kResident && kStageBytes > kRowBytes ? kStageBytes : kRowBytes);
  }

  CUTLASS_HOST_DEVICE static constexpr int ds_begin(int stages) {
    return rows_begin(stages) + (Config::kResident ? 1 : 2) * RowTile::kBytes;
  }
  CUTLASS_HOST_DEVICE static constexpr int bias_begin(int stages) {
    return ds_begin(stages) + 2 * DsTile<Config>::kBytes;
  }
  CUTLASS_HOST_DEVICE static constexpr int outputs_begin(int stages) {
    return bias_begin(stages) + (Config::kTransposesBias2 ? BiasTile<Config>::kBytes : 0);
  }

  // Wider ones spill outside of the fused pass: 24 to 80 bytes more at D = 64.
  static constexpr bool kSkipsWarps = kKeyRows && (Config::kRowBytes <= 64 || kFusesDq);
  using Keys = VisibleKeys<kCols, 32, /*kSkips=*/!kKeyRows>;

  // What a row and a column contribute, on their way from global memory.
  using RowValue = typename cutlass::platform::conditional<kKeyRows, uint32_t, QueryValue>::type;
  struct ColumnValues {
    typename cutlass::platform::conditional<kKeyRows, QueryValue, uint32_t>::type score;
    QueryValue dp;
  };

  struct Columns {
    NegativeLse<QueryValue> negative_lse;
    Bias1Row<scalar_t> bias1;
    const QueryValue* negative_delta;
    float unit;
    int count, delta_stride;
    CUTLASS_DEVICE ColumnValues load(int column) const {
      ColumnValues x{};
      column += int(threadIdx.x);
      if (int(threadIdx.x) >= kCols || column >= count) return x;
      if constexpr (kKeyRows) {
        x.score = negative_lse.load(column);
        if constexpr (kWantsDs) x.dp = negative_delta[kFusesDq ? int64_t(column) * delta_stride : column];
      } else {
        x.score = bias1.load(column);
      }
      return x;
    }
    // column: the same.
    CUTLASS_DEVICE void store(float* sColumns, const ColumnValues& x, int column) const {
      if (int(threadIdx.x) >= kCols) return;
      typename Exponent::Column score;
      if constexpr (kKeyRows) {
        score = negative_lse.value(x.score);
      } else {
        score = bias1.value(x.score);
      }
      if constexpr (!Config::kExact) score *= unit;
      if (column + int(threadIdx.x) >= count) score = one_part<typename Exponent::Column>(-infinity());
      store_column(sColumns, int(threadIdx.x), score);
      if constexpr (kKeyRows && kWantsDs) store_column(sColumns + 2 * kCols, int(threadIdx.x), x.dp);
    }
  };

  // Which rows a block owns. Among kSideBySide neighbouring n the n runs fastest, then row blocks, then heads: those
  // blocks read the same rows of bias2, and what they walk over stays in L2.
  struct Place {
    int64_t bn, b, n, h;
    int row0, row_blocks;
    uint32_t pair;  // (b, n, h), in the order of the blocks
    CUTLASS_DEVICE Place(const BwdParams& p, uint32_t number) {
      uint32_t blocks = uint32_t(int(kKeyRows ? p.Lk : p.Lq) + Config::kRows - 1) / Config::kRows;
      uint32_t batches = uint32_t(p.B * p.N), per_batch = blocks * uint32_t(p.H);
      uint32_t group = min(batches, uint32_t(kSideBySide));
      uint32_t first = number / (per_batch * group) * group, id = number - first * per_batch;
      group = min(batches - first, group);
      uint32_t rest = uniform(id / group);
      bn = uniform(first + id - rest * group), h = uniform(rest / blocks);
      row0 = int(rest - uint32_t(h) * blocks) * Config::kRows, row_blocks = int(blocks);
      b = uniform(uint32_t(bn) / uint32_t(p.N)), n = bn - b * p.N;
      pair = first * uint32_t(p.H) + uint32_t(h) * group + uint32_t(bn) - first;
    }
  };

  CUTLASS_DEVICE static void run(const BackwardArgs& args, int stages, char* shared,
                                 const DqAccumulatorPool& pool = {}) {
    const BwdParams& p = args.p;
    int thread = int(threadIdx.x), lane = thread & 31, warp_row = thread / 32 * 32;

    uint32_t number = blockIdx.x;
    if constexpr (kFusesDq) number = OrderedDqAdd<Config>::draw(pool, shared);
    if (Config::kExact && args.mask.range != nullptr) {
      int opaque = int(number);  // computed again below: held till then, full precision would spill 48 bytes
      ptx::keep(opaque);
      const Place hidden(p, uint32_t(opaque));
      if (is_hidden(args.mask, hidden)) return store_hidden(args, hidden, pool, shared);
    }
    const Place place(p, number);
    if constexpr (!Config::kExact) {  // these would spill by that: 104 bytes for keys at D = 32 on 8.0
      if (is_hidden(args.mask, place)) return store_hidden(args, place, pool, shared);
    }
    const int64_t bn = place.bn, b = place.b, n = place.n, h = place.h;
    const int row0 = place.row0, num_rows = int(kKeyRows ? p.Lk : p.Lq), num_cols = int(kKeyRows ? p.Lq : p.Lk);
    int rows_left = num_rows - row0 - warp_row;
    OrderedDqAdd<Config> dq_add{pool, place.pair};
    const bool hidden =
        kSkipsWarps && args.mask.units(bn, row0 + warp_row, 32 / KeyMask::kUnit) == 0;  // this warp's keys

    // Operands: rows (q, do) or (k, v); columns the other two.
    int d = int(p.D), dv = int(p.Dv);
    const scalar_t* gQ = element<const scalar_t>(p.q, p.q_stride, b, n, kKeyRows ? 0 : row0, h);
    const scalar_t* gDo = element<const scalar_t>(p.do_, p.do_stride, b, n, kKeyRows ? 0 : row0, h);
    const scalar_t* gK = element<const scalar_t>(p.k, p.k_stride, b, n, kKeyRows ? row0 : 0, h);
    const scalar_t* gV = element<const scalar_t>(p.v, p.v_stride, b, n, kKeyRows ? row0 : 0, h);
    RowLoader rows1(kKeyRows ? gK : gQ, kKeyRows ? p.k_stride[2] : p.q_stride[2], d, thread);
    RowLoader rows2(kKeyRows ? gV : gDo, kKeyRows ? p.v_stride[2] : p.do_stride[2], dv, thread);
    int64_t cols1_stride = kKeyRows ? p.q_stride[2] : p.k_stride[2];
    int64_t cols2_stride = kKeyRows ? p.do_stride[2] : p.v_stride[2];
    int half = int(uniform(uint32_t(thread / Config::kLoadThreads)));
    const scalar_t* g_cols[kSources];
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < kSources; ++x) g_cols[x] = x + half == 1 ? (kKeyRows ? gDo : gV) : (kKeyRows ? gQ : gK);
    const Keys keys{args.mask, bn, num_cols};
    auto seek = [&](int tile) {
      return keys.seek(tile, [&] {
        CUTLASS_PRAGMA_UNROLL
        for (int x = 0; x < kSources; ++x) g_cols[x] += kCols * (x + half == 1 ? cols2_stride : cols1_stride);
      });
    };
    int tile = seek(0), stage = 0;

    // Statistics of the rows and of the columns: they set out before the tiles and are used after them.
    Exponent probabilities(p.scale);
    Columns columns{{args, b, n, h},
                    {args, b, n},
                    static_cast<const QueryValue*>(args.negative_delta) + (bn * p.H + h) * p.Lq,
                    probabilities.column_unit(),
                    num_cols,
                    1};
    if constexpr (kFusesDq) {
      DeltaInDq<scalar_t> delta(p, b, n, h);
      columns.negative_delta = delta.ptr, columns.delta_stride = delta.stride;
    }
    ColumnValues first_columns;
    RowValue row_values[Mma::kSlots] = {};
    QueryValue row_dp[Mma::kSlots] = {};
    auto load_rows = [&](auto load) {
      CUTLASS_PRAGMA_UNROLL
      for (int slot = 0; slot < Mma::kSlots; ++slot) {
        int r = Mma::row_of_lane(lane) + slot * Mma::kRowStep;
        if (r < rows_left) load(slot, row0 + warp_row + r);
      }
    };
    first_columns = columns.load(tile * kCols);
    if constexpr (kKeyRows) {
      load_rows([&](int slot, int r) { row_values[slot] = columns.bias1.load(r); });
    } else {
      load_rows([&](int slot, int r) { row_values[slot] = columns.negative_lse.load(r); });
      load_rows([&](int slot, int r) { row_dp[slot] = columns.negative_delta[r]; });
    }
    const BiasMatrix& bias2 = kKeyRows && !Config::kTransposesBias2 ? args.bias2_t : args.bias2;
    const scalar_t* gBias = static_cast<const scalar_t*>(bias2.ptr) + b * bias2.stride_b + h * bias2.stride_h;
    int bias_row = row0 + warp_row + Mma::row_of_lane(lane), last_col = (num_cols - 1) / Mma::kVec * Mma::kVec;
    BiasFragment<Mma, scalar_t> bias;
    auto load_bias = [&](int col) {
      bias.load(gBias, int(bias2.stride_row), bias_row, num_rows - 1, col + Mma::first_column(lane), last_col);
    };
    BiasTile<Config> bias_tile(
        gBias + row0 + warp_row, bias2.stride_row, num_cols, rows_left,
        reinterpret_cast<scalar_t*>(shared + bias_begin(stages)) + warp_row / 32 * BiasTile<Config>::kWarpElements,
        lane);

    // Shared memory, and this lane's place in it.
    scalar_t* sRows1 = reinterpret_cast<scalar_t*>(shared + rows_begin(stages));
    scalar_t* sRows2 = sRows1 + RowTile::kBytes / sizeof(scalar_t);
    int lane_nk = Mma::template lane_b_nk<ColTile>(lane), lane_kn = Mma::template lane_b_kn<ColTile>(lane);
    // Called once for each tile that is not passed over, in order.
    auto load_columns = [&](int tile, int stage) {
      scalar_t* s = reinterpret_cast<scalar_t*>(shared + stage * kStageBytes);
      int t = thread - half * Config::kLoadThreads;
      ptx::keep(t);  // the loaders' registers are needed here only, not all through the loop
      CUTLASS_PRAGMA_UNROLL
      for (int x = 0; x < kSources; ++x) {
        bool second = x + half == 1;
        int64_t stride = second ? cols2_stride : cols1_stride;
        ColLoader(g_cols[x], stride, second ? dv : d, t)
            .load(s + (second ? ColTile::kBytes / sizeof(scalar_t) : 0), num_cols - tile * kCols);
        g_cols[x] += kCols * stride;
      }
      if constexpr (Config::kAsync) ptx::cp_async_commit();
    };
    auto stage_columns = [&](int stage) {
      return reinterpret_cast<float*>(shared + stage * kStageBytes + 2 * ColTile::kBytes);
    };

    // dq and dbias2 of a tile whose dS is complete. Where they go is in shared memory: in registers it would be kept
    // all through the loop.
    auto stage_ds = [&](int tile) {
      return reinterpret_cast<scalar_t*>(shared + ds_begin(stages) + (tile & 1) * DsTile<Config>::kBytes);
    };
    auto add_dq = [&](int tile) {
      if constexpr (kFusesDq) {
        DqProduct<Config>::run(stage_ds(tile), sRows1, *reinterpret_cast<DqOutputs*>(shared + outputs_begin(stages)),
                               tile * kCols);
      }
    };
    if constexpr (kFusesDq) {
      if (thread == 0) {
        int64_t bh_rows = (b * p.H + h) * pool.padded_queries;
        *reinterpret_cast<DqOutputs*>(shared + outputs_begin(stages)) = {
            dq_add.accumulator(), pool.dbias2 ? pool.dbias2 + bh_rows * pool.padded_keys + row0 : nullptr,
            pool.padded_keys,
            Config::kRows - __clz(int(args.mask.units(bn, row0, Config::kRows / KeyMask::kUnit))
                                  << (32 - Config::kRows / KeyMask::kUnit)) *
                                KeyMask::kUnit};
      }
    }

    // First tiles.
    rows1.load(sRows1, num_rows - row0);
    if constexpr (kWantsDs) rows2.load(sRows2, num_rows - row0);
    load_columns(tile, 0);
    if constexpr (Config::kTransposesBias2) {
      CUTLASS_PRAGMA_UNROLL
      for (int stripe = 0; stripe < Config::kStripes; ++stripe) bias_tile.load(stripe, lane);
    }

    // Statistics, on their arrival.
    columns.bias1.shift = uniform(columns.bias1.shift);
    typename Exponent::Row row_exponent[Mma::kSlots];
    CUTLASS_PRAGMA_UNROLL
    for (int slot = 0; slot < Mma::kSlots; ++slot) {
      if constexpr (kKeyRows) {
        row_exponent[slot] = columns.bias1.value(row_values[slot]);
      } else {
        row_exponent[slot] = columns.negative_lse.value(row_values[slot]);
      }
      if constexpr (!Config::kExact) row_exponent[slot] *= probabilities.row_unit;
      bool exists = Mma::row_of_lane(lane) + slot * Mma::kRowStep < rows_left;
      if (!exists || hidden) row_exponent[slot] = one_part<typename Exponent::Row>(-infinity());
    }
    RowBegin<Mma> dp_begin;
    if constexpr (!kKeyRows && !Config::kExact) dp_begin.set(row_dp);
    columns.store(stage_columns(0), first_columns, tile * kCols);
    if constexpr (Config::kHasBias2 && !Config::kTransposesBias2) load_bias(tile * kCols);
    Operand operand1, operand2;
    operand1.attach(sRows1, warp_row, lane);
    operand2.attach(sRows2, warp_row, lane);
    if constexpr (Config::kResident) {
      arrive();
      operand1.fetch();
      if constexpr (kWantsDs) operand2.fetch();
    }

    float out_dv[kWantsDv ? kTiles : 2][8] = {}, out_ds[kWantsDs ? kTiles : 2][8] = {};
    float row_sum[Mma::kSlots] = {};

    int num_tiles = (num_cols + kCols - 1) / kCols;
    const bool skips = uniform(uint32_t(hidden)) != 0;
    CUTLASS_PRAGMA_NO_UNROLL
    while (tile < num_tiles) {
      // This tile arrives; the next one sets out.
      int next_tile = seek(tile + 1);
      if (kFusesDq && tile == 1 && thread == 0) dq_add.wait();
      arrive();
      bool more = next_tile < num_tiles;
      int next_stage = stages == 2 ? stage ^ 1 : 0;
      ColumnValues next;
      if (Config::kMaxStages == 2 && stages == 2 && more) load_columns(next_tile, next_stage);
      if (more) next = columns.load(next_tile * kCols);
      if (kFusesDq && tile > 0) add_dq(tile - 1);

      const scalar_t* s1 = reinterpret_cast<const scalar_t*>(shared + stage * kStageBytes);
      const scalar_t* s2 = s1 + ColTile::kBytes / sizeof(scalar_t);
      const float* sColumns = stage_columns(stage);
      // One stripe is no loop: ptxas would keep room for the accumulators of D = 128 twice (456 bytes spilled, not 16).
      int stripes = Config::kStripes;
      if (Config::kStripes > 1 && !kFusesDq) stripes = min(stripes, (num_cols - tile * kCols + 31) / 32);
      if (Config::kStripes > 1 && Keys::kSkips) stripes = min(stripes, Keys::groups_in_use(keys.units_of(tile)));
      constexpr int kUnrolledStripes = Config::kUnrolledStripes;
#pragma unroll(kUnrolledStripes)
      for (int stripe = skips ? stripes : 0; stripe < stripes; ++stripe) {
        const scalar_t* s1_nk = s1 + ColTile::offset(32) * stripe + lane_nk;
        const scalar_t* s2_nk = s2 + ColTile::offset(32) * stripe + lane_nk;
        const scalar_t* s1_kn = s1 + ColTile::offset(32) * stripe + lane_kn;
        const scalar_t* s2_kn = s2 + ColTile::offset(32) * stripe + lane_kn;
        const float* column = sColumns + 64 * stripe;
        int next_col = tile * kCols + 32 * (stripe + 1);
        if (Keys::kSkips && stripe + 1 == stripes) next_col = next_tile * kCols;
        float s[4][8], dp[4][8];
        CUTLASS_PRAGMA_UNROLL
        for (int first = 0; first < 4; first += kChunkTiles) {
          if (first > 0) __syncwarp();  // keeps the chunks apart: interleaved, they need more registers than there are
          // Scores, dP - delta.
          if constexpr (Config::kTransposesBias2) bias_tile.fetch(bias, stripe, lane);
          probabilities(s, first, operand1, s1_nk, column, row_exponent, bias, lane);
          if constexpr (Config::kTransposesBias2) {
            __syncwarp();
            if (more) bias_tile.load(stripe, lane);
          } else if (Config::kHasBias2 && first + kChunkTiles == 4) {
            load_bias(next_col);
          }
          if constexpr (kWantsDv) {
            CUTLASS_PRAGMA_UNROLL
            for (int step = first * 8 / Mma::kStepK; step < (first + kChunkTiles) * 8 / Mma::kStepK; ++step) {
              multiply_scores<Mma, ColTile>(out_dv, s, step, s2_kn, lane);
            }
          }
          if constexpr (kWantsDs) {
            CUTLASS_PRAGMA_UNROLL
            for (int j = first; j < first + kChunkTiles; ++j) {
              if constexpr (Config::kExact) {
                CUTLASS_PRAGMA_UNROLL
                for (int i = 0; i < 8; ++i) dp[j][i] = 0.f;
              } else if constexpr (kKeyRows) {
                begin_with_columns<Mma>(dp[j], j, column + 2 * kCols, lane);
              } else {
                dp_begin.begin(dp[j]);
              }
            }
            multiply_rows<Mma, ColTile, kChunkTiles / 2>(dp, first / 2, operand2, s2_nk);
            CUTLASS_PRAGMA_UNROLL
            for (int j = first; j < first + kChunkTiles; ++j) {
              CUTLASS_PRAGMA_UNROLL
              for (int i = 0; i < 8; ++i) {
                if constexpr (Config::kExact && kKeyRows) {
                  float4 delta = columns_of<Mma>(column + 2 * kCols, j, i / 4, lane);
                  dp[j][i] = subtract_delta(dp[j][i], column_of_pair(delta, i));
                } else if constexpr (Config::kExact) {
                  dp[j][i] = subtract_delta(dp[j][i], row_dp[Mma::slot_of(i)]);
                }
                dp[j][i] *= s[j][i];
              }
            }
            if constexpr (Config::kWantsDbias1) {
              // Sums of their own for each step: fewer roundings at the size of the whole.
              CUTLASS_PRAGMA_UNROLL
              for (int slot = 0; slot < Mma::kSlots; ++slot) row_sum[slot] += sum_of_slot(dp, first, slot);
            }
            if constexpr (kFusesDq) {
              typename Mma::FragA a[2];
              Mma::from_scores(a[0], dp, 0, lane), Mma::from_scores(a[1], dp, 1, lane);
              DsTile<Config>::store(stage_ds(tile), a, warp_row, stripe, lane);
              multiply_operand<Mma, ColTile>(out_ds, a[0], 0, s1_kn);
              multiply_operand<Mma, ColTile>(out_ds, a[1], 1, s1_kn);
            } else {
              CUTLASS_PRAGMA_UNROLL
              for (int step = first * 8 / Mma::kStepK; step < (first + kChunkTiles) * 8 / Mma::kStepK; ++step) {
                multiply_scores<Mma, ColTile>(out_ds, dp, step, s1_kn, lane);
              }
            }
          }
        }
      }

      if constexpr (kFusesDq && kSkipsWarps) {
        if (skips && tile < 2) DsTile<Config>::clear(stage_ds(tile), warp_row, lane);
      }

      if (stages == 1 && more) {
        __syncthreads();
        load_columns(next_tile, 0);
      }
      if (more) columns.store(stage_columns(next_stage), next, next_tile * kCols);
      tile = next_tile, stage = next_stage;
    }

    if constexpr (kFusesDq) {
      if (num_tiles == 1 && thread == 0) dq_add.wait();
      __syncthreads();
      add_dq(num_tiles - 1);
      dq_add.wait_for_lent();
    }

    // Results.
    auto store = [&](void* ptr, const int64_t (&stride)[4], const auto& acc, float factor, int cols) {
      scalar_t* g = element<scalar_t>(ptr, stride, b, n, row0 + warp_row, h);
      store_rows<Mma, Config::kIsAligned>(g, stride[2], acc, factor, rows_left, cols, lane);
    };
    if constexpr (!kKeyRows) {
      store(p.dq, p.dq_stride, out_ds, p.scale, d);
    } else {
      if constexpr (kWantsDs) {
        if (p.dk) store(p.dk, p.dk_stride, out_ds, p.scale, d);
        if constexpr (Config::kWantsDbias1) store_row_sums(args, row_sum, bn, h, row0 + warp_row, rows_left, lane);
      }
      if constexpr (kWantsDv) {
        if (p.dv) store(p.dv, p.dv_stride, out_dv, 1.f, dv);
      }
    }
    if constexpr (kFusesDq) {
      dq_add.finish(p, element<scalar_t>(p.dq, p.dq_stride, b, n, 0, h), shared,
                    [&] { return args.mask.template num_visible<Config::kRows>(bn, num_rows); });
    }
  }

 private:
  CUTLASS_DEVICE static void arrive() {
    if constexpr (Config::kAsync) ptx::cp_async_wait<0>();
    __syncthreads();
  }

  // Rows of a block that nobody sees, or that see nothing.
  CUTLASS_DEVICE static bool is_hidden(const KeyMask& mask, const Place& place) {
    if constexpr (kKeyRows) return mask.units(place.bn, place.row0, Config::kRows / KeyMask::kUnit) == 0;
    return mask.sees_nothing(place.bn);
  }
  CUTLASS_DEVICE static void store_hidden(const BackwardArgs& args, const Place& place, const DqAccumulatorPool& pool,
                                          char* shared) {
    const BwdParams& p = args.p;
    int thread = int(threadIdx.x), rows = min(Config::kRows, int(kKeyRows ? p.Lk : p.Lq) - place.row0);
    auto store = [&](void* ptr, const int64_t (&stride)[4], int row0, int rows, int64_t cols) {
      if (ptr == nullptr) return;
      scalar_t* g = element<scalar_t>(ptr, stride, place.b, place.n, row0, place.h);
      store_zeros<scalar_t, Config::kThreads, Config::kIsAligned>(g, stride[2], thread, rows, int(cols));
    };
    if constexpr (!kKeyRows) return store(p.dq, p.dq_stride, place.row0, rows, p.D);
    if constexpr (kFusesDq) {
      OrderedDqAdd<Config> dq_add{pool, place.pair};
      if (args.mask.sees_nothing(place.bn)) {  // each block of the pair stores a part of dq
        if (place.row0 == 0) dq_add.announce_nothing();
        int part = (int(p.Lq) + place.row_blocks - 1) / place.row_blocks, first = place.row0 / Config::kRows * part;
        store(p.dq, p.dq_stride, first, min(part, int(p.Lq) - first), p.D);
      }
      dq_add.wait_for_lent();
    }
    if constexpr (kWantsDs) store(p.dk, p.dk_stride, place.row0, rows, p.D);
    if constexpr (kWantsDv) store(p.dv, p.dv_stride, place.row0, rows, p.Dv);
    if constexpr (Config::kWantsDbias1) {
      float* parts = args.dbias1_parts + (place.bn * p.H + place.h) * p.Lk + place.row0;
      if (args.dbias1_parts && thread < rows) parts[thread] = 0.f;
    }
  }

  CUTLASS_DEVICE static float sum_of_slot(const float (&x)[4][8], int first, int slot) {
    float sum = 0.f;
    bool is_first = true;
    CUTLASS_PRAGMA_UNROLL
    for (int y = 8 * first; y < 8 * (first + kChunkTiles); y += 2) {
      const float* pair = &x[y / 8][y % 8];
      if (Mma::slot_of(y % 8) != slot) continue;
      sum = is_first ? pair[0] + pair[1] : sum + (pair[0] + pair[1]);
      is_first = false;
    }
    return sum;
  }

  // dbias1 is also summed over heads: each head's part, or atomically.
  CUTLASS_DEVICE static void store_row_sums(const BackwardArgs& args, const float (&row_sum)[Mma::kSlots], int64_t bn,
                                            int64_t h, int row0, int rows_left, int lane) {
    CUTLASS_PRAGMA_UNROLL
    for (int slot = 0; slot < Mma::kSlots; ++slot) {
      float sum = Mma::reduce_sum(row_sum[slot]);
      int r = Mma::row_of_lane(lane) + slot * Mma::kRowStep;
      if (!Mma::leads_row(lane) || r >= rows_left) continue;
      if (args.dbias1_parts) {
        args.dbias1_parts[(bn * args.p.H + h) * args.p.Lk + row0 + r] = sum;
      } else {
        atomicAdd(args.p.dbias1 + bn * args.p.Lk + row0 + r, sum);
      }
    }
  }
};

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    backward_row_pass(const __grid_constant__ BackwardArgs args, int stages) {
  extern __shared__ __align__(16) char shared[];
  RowPass<Config>::run(args, stages, shared);
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    backward_fused_pass(const __grid_constant__ BackwardArgs args, const __grid_constant__ DqAccumulatorPool pool) {
  extern __shared__ __align__(16) char shared[];
  RowPass<Config>::run(args, /*stages=*/2, shared, pool);
}

}  // namespace ds4s
