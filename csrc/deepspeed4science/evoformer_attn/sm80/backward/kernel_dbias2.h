// dbias2, math.md (16): the sum over n of dS = P (dP - delta), math.md (11). A block owns kQueries x kKeys of one (b,
// h), keeps that tile of bias2 and of dbias2 in registers and iterates over the rows n (or a slice of them). S, math.md
// (1), and dP, math.md (10), are computed again, and bias2 is read once for all n. Nothing is added to memory before
// the end, except in full precision: there each run of kRun rows n is summed by itself (add_run).
//
// Rows n that see none of the keys are skipped (visible_rows.h).
//
// A warp owns 32 queries x 32 kStripes keys. Shared memory, for each stage: dbias2_operands.h.
#pragma once

#include "epilogue/atomic_tile.h"
#include "sm80/backward/dbias2_operands.h"
#include "sm80/backward/visible_rows.h"

namespace ds4s {

// A lane's accumulators of 32 x 32 scores as an output tile of four neighbours at a time (epilogue/atomic_tile.h), in
// kParts parts whose columns are evenly spaced.
template <typename Mma>
struct ScoreStripeMap {
  static constexpr bool kWide = Mma::kVec > 4;  // several accesses to a vector
  static constexpr int kParts = kWide ? Mma::kGroups : 1;
  static constexpr int kElementsPerAccess = 4;
  struct Iterations {
    static constexpr int kCluster = 1, kGroup = 1, kRow = Mma::kLaneRows,
                         kColumn = kWide ? Mma::kVec / 4 : Mma::kGroups;
  };
  struct Delta {
    static constexpr int kCluster = 0, kGroup = 0, kRow = Mma::kRowStep, kColumn = kWide ? 4 : Mma::kGroupStep;
  };
  // Element i of an access of a part.
  CUTLASS_DEVICE static float& at(float (&stripe)[4][8], int part, int access, int i) {
    const int lane_row = access / Iterations::kColumn, column = access % Iterations::kColumn;
    const int group = kWide ? part : column, e = kWide ? 4 * column + i : i;
    return stripe[Mma::tile_of(group, e)][Mma::value_of(lane_row, e)];
  }
};

template <typename Config>
struct KernelDbias2 {
  using scalar_t = typename Config::scalar_t;
  using Mma = typename Config::Mma;
  using Position = Dbias2Position<Config>;
  using Operands = Dbias2Operands<Config>;
  using KeyTile = typename Operands::KeyTile;
  using Left = LeftOperand<Mma, typename Operands::QueryTile, scalar_t, Config::kResident>;
  using Exponent = typename Operands::Exponent;
  using QueryValue = typename Config::QueryValue;
  using Map = ScoreStripeMap<Mma>;
  // In wide tiles 64-bit indices spill 16 bytes, 32-bit ones 228; in the others 64-bit ones 16, 32-bit ones none.
  using Index = typename cutlass::platform::conditional<Config::kIsWide, int64_t, int>::type;

  static constexpr int kStripes = Config::kStripes;  // of a warp
  static constexpr int kQueryWarps = Config::kQueries / 32;
  static constexpr int kLaneRows = Mma::kLaneRows;
  static constexpr int kChunkTiles = Config::kChunkTiles;
  static constexpr int kRun = 16;  // as PyTorch sums
  static constexpr int shared_bytes(int stages) { return stages * Operands::kStageBytes; }

  const int lane, warp_query, warp_key;  // the warp's first query and key in the tile
  const int lane_query, lane_key;        // the lane's offsets in the tiles of queries and of keys
  Exponent probabilities;
  BiasFragment<Mma, scalar_t> bias2[kStripes];
  float dbias2[kStripes][4][8] = {};

  // Whether blocks add to dbias2 or to their parts of it, which therefore begin with zeros.
  CUTLASS_HOST_DEVICE static bool adds(const BackwardInputs& args) {
    return (args.dbias2_slices > 1 && !args.dbias2_parts) || (Config::kExact && args.p.N > kRun);
  }

  CUTLASS_DEVICE static void run(const BackwardInputs& args, int stages, char* shared) {
    const int thread = int(threadIdx.x);
    const Position at(args);
    KernelDbias2 kernel(args.p.scale, thread);
    Operands operands(args, at, shared, thread, kernel.probabilities.column_unit());
    kernel.load_bias2(args, at);
    kernel.add_rows(operands, args, at, stages);
    kernel.store(args, Position(args));  // computed again: kept through the loop, it would take registers
  }

 private:
  CUTLASS_DEVICE KernelDbias2(float scale, int thread)
      : lane(thread & 31),
        warp_query(thread / 32 % kQueryWarps * 32),
        warp_key(thread / 32 / kQueryWarps * (32 * kStripes)),
        lane_query(warp_query + Mma::row_of_lane(lane)),
        lane_key(Mma::template lane_b_nk<KeyTile>(lane) + KeyTile::offset(warp_key)),
        probabilities(scale) {}

  CUTLASS_DEVICE void load_bias2(const BackwardInputs& args, const Position& at) {
    const BiasMatrix& matrix = args.bias2;
    const scalar_t* g = static_cast<const scalar_t*>(matrix.ptr) + at.b * matrix.stride_b + at.h * matrix.stride_h;
    CUTLASS_PRAGMA_UNROLL
    for (int stripe = 0; stripe < kStripes; ++stripe) {
      bias2[stripe].load(g, int(matrix.stride_row), at.query + lane_query, int(args.p.Lq) - 1,
                         at.key + warp_key + Mma::first_column(lane) + 32 * stripe,
                         int(args.p.Lk - 1) / Mma::kVec * Mma::kVec);
    }
  }

  // Main loop: while one n is computed from one stage, the next one arrives in the other.
  CUTLASS_DEVICE void add_rows(Operands& operands, const BackwardInputs& args, const Position& at, int stages) {
    VisibleRows<Config::kKeys, Index> rows(args.mask, Index(at.b * args.p.N), at.key, at.n_begin, at.n_end);
    int stage = 0, n = rows.next(at.n_begin), num_in_run = 0;
    if (n < at.n_end) {
      operands.advance(n - at.n_begin);
      operands.load(0);
      operands.store_vectors(0, operands.load_vectors(n));
    }
    CUTLASS_PRAGMA_NO_UNROLL
    while (n < at.n_end) {
      if constexpr (Config::kAsync) ptx::cp_async_wait<0>();
      __syncthreads();
      const int next_n = rows.next(n + 1);
      const bool more = next_n < at.n_end;
      if (more) operands.advance(next_n - n);
      const int next_stage = stages == 2 ? stage ^ 1 : 0;
      typename Operands::Vectors next;
      if (Config::kMaxStages == 2 && stages == 2 && more) operands.load(next_stage);
      if (more) next = operands.load_vectors(next_n);

      if constexpr (Config::kExact) {
        if (num_in_run == kRun) add_run(args), num_in_run = 0;
        ++num_in_run;
      }
      add_row(operands, stage);

      if (stages == 1 && more) {
        __syncthreads();
        operands.load(0);
      }
      if (more) operands.store_vectors(next_stage, next);
      n = next_n, stage = next_stage;
    }
  }

  // Adds dS of one row n.
  CUTLASS_DEVICE void add_row(const Operands& operands, int stage) {
    const scalar_t* s = operands.tiles(stage);
    const float* sKeys = operands.key_vector(stage) + 2 * warp_key;
    const float* sQueries = operands.query_vectors(stage);
    QueryValue exponent[kLaneRows];
    float dp_begin[8];
    CUTLASS_PRAGMA_UNROLL
    for (int lane_row = 0; lane_row < kLaneRows; ++lane_row) {
      const int query = lane_query + lane_row * Mma::kRowStep;
      exponent[lane_row] = reinterpret_cast<const QueryValue*>(sQueries + 2 * Config::kQueries)[query];
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 8; i += 2) {
      float2 x = *reinterpret_cast<const float2*>(sQueries + 2 * (lane_query + Mma::lane_row_of(i) * Mma::kRowStep));
      dp_begin[i] = x.x, dp_begin[i + 1] = x.y;
    }
    Left left_q, left_do;
    left_q.attach(s, warp_query, lane);
    left_do.attach(s + Operands::kQueryElements, warp_query, lane);
    left_q.fetch(), left_do.fetch();
    const scalar_t* sK = s + 2 * Operands::kQueryElements + lane_key;
    const scalar_t* sV = sK + Operands::kKeyElements;
    CUTLASS_PRAGMA_UNROLL
    for (int stripe = 0; stripe < kStripes; ++stripe) {
      bias2[stripe].keep_packed();
      float score[4][8], dp[4][8];
      CUTLASS_PRAGMA_UNROLL
      for (int first = 0; first < 4; first += kChunkTiles) {
        if (stripe + first > 0) __syncwarp();  // keeps the chunks apart: interleaved, they need too many registers
        CUTLASS_PRAGMA_UNROLL
        for (int j = first; j < first + kChunkTiles; ++j) {
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < 8; ++i) dp[j][i] = Config::kExact ? 0.f : dp_begin[i];
        }
        probabilities(score, first, left_q, sK + KeyTile::offset(32 * stripe), sKeys + 64 * stripe, exponent,
                      bias2[stripe], lane);
        multiply_rows<Mma, KeyTile, kChunkTiles / 2>(dp, first / 2, left_do, sV + KeyTile::offset(32 * stripe));
        CUTLASS_PRAGMA_UNROLL
        for (int j = first; j < first + kChunkTiles; ++j) {
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < 8; ++i) {
            float x = dp[j][i];
            if constexpr (Config::kExact) x = subtract_delta(x, make_float2(dp_begin[i & ~1], dp_begin[i | 1]));
            dbias2[stripe][j][i] = fmaf(score[j][i], x, dbias2[stripe][j][i]);
          }
        }
      }
    }
  }

  // Adds the sums of a run of rows n to memory. What rounding takes from these additions begins the next run (Kahan),
  // so that errors do not grow with the number of runs. In deterministic mode one lane alone adds to an element, in
  // order.
  CUTLASS_DEVICE void add_run(const BackwardInputs& args) {
    for_each_vector(args, Position(args), [&](float* dst, int valid, auto value) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Map::kElementsPerAccess; ++i) {
        if (i < valid) value(i) = atomic_add_and_keep_rest(dst + i, value(i));
      }
    });
  }

  // Epilogue. A single slice stores dbias2, several slices add to it atomically or store a part each; after runs, all
  // add.
  CUTLASS_DEVICE void store(const BackwardInputs& args, const Position& at) {
    const bool adds_to_zeros = adds(args);
    for_each_vector(args, at, [&](float* dst, int valid, auto value) {
      float v[Map::kElementsPerAccess];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Map::kElementsPerAccess; ++i) v[i] = value(i);
      put(dst, v, valid, args.p.Lk % 4 == 0, adds_to_zeros);
    });
  }

  // Calls f(address, how many exist, reference to the sum of the i-th) for each four neighbours of a lane.
  template <typename F>
  CUTLASS_DEVICE void for_each_vector(const BackwardInputs& args, const Position& at, F&& f) {
    const BwdParams& p = args.p;
    const int query = at.query + lane_query, key = at.key + warp_key + Mma::first_column(lane);
    float* out = args.dbias2_parts ? args.dbias2_parts + at.slice * (p.B * p.H * p.Lq * p.Lk) : p.dbias2;
    out += ((at.b * p.H + at.h) * p.Lq + query) * p.Lk + key;
    CUTLASS_PRAGMA_UNROLL
    for (int stripe = 0; stripe < kStripes; ++stripe) {
      CUTLASS_PRAGMA_UNROLL
      for (int part = 0; part < Map::kParts; ++part) {
        for_each_access<Map>(0, 32 * stripe + part * Mma::kGroupStep, [&](int row, int col, int access) {
          const int valid = row < int(p.Lq) - query ? int(p.Lk) - key - col : 0;
          f(out + row * p.Lk + col, valid, [&](int i) -> float& { return Map::at(dbias2[stripe], part, access, i); });
        });
      }
    }
  }

  // Stores the first `valid` of four neighbours. vectors: rows are aligned to 16 bytes.
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

}  // namespace ds4s
