// The operands of kernel_dbias2.h for each row n, in a stage of shared memory: tiles of Q, dO, K and V, and the
// statistics of their queries and keys.
#pragma once

#include "sm80/backward/score_tile.h"
#include "sm80/mma/tile_loader.h"

namespace ds4s {

// A block's tile of dbias2, and the rows n that it sums over.
template <typename Config>
struct Dbias2Position {
  int64_t b, h, slice;
  int query, key;  // the tile's first query and key
  int n_begin, n_end;

  CUTLASS_DEVICE explicit Dbias2Position(const BackwardInputs& args) {
    const BwdParams& p = args.p;
    uint32_t query_tiles = uint32_t(p.Lq + Config::kQueries - 1) / Config::kQueries;
    uint32_t key_tiles = uint32_t(p.Lk + Config::kKeys - 1) / Config::kKeys;
    const uint32_t number = ptx::block_x();
    uint32_t rest = uniform(number / key_tiles);
    key = int(number - rest * key_tiles) * Config::kKeys;
    uint32_t next = uniform(rest / query_tiles);
    query = int(rest - next * query_tiles) * Config::kQueries;
    rest = uniform(next / uint32_t(p.H));
    h = next - rest * uint32_t(p.H);
    slice = uniform(rest / uint32_t(p.B)), b = rest - uint32_t(slice) * uint32_t(p.B);
    n_begin = int(p.N * slice / args.dbias2_slices), n_end = int(p.N * (slice + 1) / args.dbias2_slices);
  }
};

template <typename Config>
struct Dbias2Operands {
  using scalar_t = typename Config::scalar_t;
  using QueryValue = typename Config::QueryValue;
  using QueryTile = Tile<scalar_t, Config::kQueries, Config::kHeadDim>;
  using KeyTile = PermutedTile<scalar_t, Config::kKeys, Config::kHeadDim, Config::kAsync>;
  using Exponent = Probabilities<Config, KeyTile, Config::kChunkTiles, /*kLseInColumns=*/false>;
  template <typename TileT>
  using Loader = TileLoader<scalar_t, TileT, Config::kLoadThreads, Config::kAligned, Config::kAsync>;

  // One half of the threads loads Q and K, the other dO and V; in a small block all threads load both.
  static constexpr int kSources = 2 * Config::kLoadThreads / Config::kThreads;
  static constexpr int kQueryElements = QueryTile::kBytes / int(sizeof(scalar_t));
  static constexpr int kKeyElements = KeyTile::kBytes / int(sizeof(scalar_t));
  static constexpr int kQueryVectorBytes =
      Config::kQueries * (8 + int(sizeof(QueryValue)));  // dP (one part: twice), lse
  static constexpr int kStageBytes =
      2 * QueryTile::kBytes + 2 * KeyTile::kBytes + Config::kKeys * kColumnBytes + kQueryVectorBytes;
  static_assert(Config::kQueries <= Config::kThreads && Config::kKeys <= Config::kThreads,
                "a thread brings at most one value of each vector");

  // The statistics that a thread loads for one n: bias1 of a key, lse and -delta of a query.
  struct Vectors {
    uint32_t bias1;  // the bits in memory, not converted
    float shift;
    QueryValue lse, dp;
  };

  const BackwardInputs& args;
  char* shared;
  const int thread, half, queries_left, keys_left;
  const bool has_query, has_key;
  const float column_unit;
  const int64_t first_bn;  // index of row n = 0 among all B N
  // Of the next n; kKeepsAddresses: this thread's chunks of its tiles.
  const scalar_t *g_queries[kSources], *g_keys[kSources], *g_bias1;
  int64_t query_index;

  CUTLASS_DEVICE Dbias2Operands(const BackwardInputs& args_, const Dbias2Position<Config>& at, char* shared_,
                                int thread_, float column_unit_)
      : args(args_),
        shared(shared_),
        thread(thread_),
        half(int(uniform(uint32_t(thread_ / Config::kLoadThreads)))),
        queries_left(int(args_.p.Lq) - at.query),
        keys_left(int(args_.p.Lk) - at.key),
        has_query(thread_ < Config::kQueries && thread_ < queries_left),
        has_key(thread_ < Config::kKeys && thread_ < keys_left),
        column_unit(column_unit_),
        first_bn(at.b * args_.p.N) {
    const BwdParams& p = args.p;
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < kSources; ++x) {
      const bool second = is_dov(x);
      g_queries[x] = second ? element<const scalar_t>(p.do_, p.do_stride, at.b, at.n_begin, at.query, at.h)
                            : element<const scalar_t>(p.q, p.q_stride, at.b, at.n_begin, at.query, at.h);
      g_keys[x] = second ? element<const scalar_t>(p.v, p.v_stride, at.b, at.n_begin, at.key, at.h)
                         : element<const scalar_t>(p.k, p.k_stride, at.b, at.n_begin, at.key, at.h);
      if constexpr (Config::kKeepsAddresses) {
        const int t = thread - half * Config::kLoadThreads, channels = second ? int(p.Dv) : int(p.D);
        g_queries[x] = Loader<QueryTile>(g_queries[x], query_stride(second), channels, t).g;
        g_keys[x] = Loader<KeyTile>(g_keys[x], key_stride(second), channels, t).g;
      }
    }
    query_index = ((at.b * p.N + at.n_begin) * p.H + at.h) * p.Lq + at.query + thread;
    g_bias1 = static_cast<const scalar_t*>(args.bias1) + at.b * args.bias1_stride[0] +
              at.n_begin * args.bias1_stride[1] + at.key + thread;
  }

  CUTLASS_DEVICE int64_t query_stride(bool is_dov) const { return is_dov ? args.p.do_stride[2] : args.p.q_stride[2]; }
  CUTLASS_DEVICE int64_t key_stride(bool is_dov) const { return is_dov ? args.p.v_stride[2] : args.p.k_stride[2]; }
  template <typename TileT>
  CUTLASS_DEVICE static Loader<TileT> loader(const scalar_t* g, int64_t stride, int channels, int t) {
    if constexpr (Config::kKeepsAddresses) return Loader<TileT>::at(g, stride, channels, t);
    return Loader<TileT>(g, stride, channels, t);
  }
  CUTLASS_DEVICE bool is_dov(int source) const { return source + half == 1; }
  CUTLASS_DEVICE scalar_t* tiles(int stage) const { return reinterpret_cast<scalar_t*>(shared + stage * kStageBytes); }
  CUTLASS_DEVICE float* key_vector(int stage) const {
    return reinterpret_cast<float*>(tiles(stage) + 2 * kQueryElements + 2 * kKeyElements);
  }
  // First the initial values of dP, in pairs; then the terms of exponents.
  CUTLASS_DEVICE float* query_vectors(int stage) const { return key_vector(stage) + 2 * Config::kKeys; }

  // Called once for each n, in order.
  CUTLASS_DEVICE void load(int stage) const {
    const BwdParams& p = args.p;
    int t = thread - half * Config::kLoadThreads;
    ptx::keep(t);  // the loaders need registers here only
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < kSources; ++x) {
      const bool second = is_dov(x);
      scalar_t* s = tiles(stage);
      const int channels = second ? int(p.Dv) : int(p.D);
      loader<QueryTile>(g_queries[x], query_stride(second), channels, t)
          .load(s + (second ? kQueryElements : 0), queries_left);
      loader<KeyTile>(g_keys[x], key_stride(second), channels, t)
          .load(s + 2 * kQueryElements + (second ? kKeyElements : 0), keys_left);
    }
    if constexpr (Config::kAsync) ptx::cp_async_commit();
  }
  CUTLASS_DEVICE Vectors load_vectors(int n) const {
    Vectors x{};
    if (args.bias1) {
      x.shift = args.mask.shift_of(first_bn + n);
      if (has_key) x.bias1 = ptx::load_bits(g_bias1);
    }
    if (has_query) {
      if constexpr (Config::kExact) {
        x.lse = args.softmax[query_index];
      } else {
        x.lse = args.p.lse[query_index];
      }
      x.dp = static_cast<const QueryValue*>(args.negative_delta)[query_index];
    }
    return x;
  }
  // Advances the addresses of load() and load_vectors() to a later n.
  CUTLASS_DEVICE void advance(int num_rows) {
    const BwdParams& p = args.p;
    CUTLASS_PRAGMA_NO_UNROLL
    for (; num_rows > 0; --num_rows) {
      CUTLASS_PRAGMA_UNROLL
      for (int x = 0; x < kSources; ++x) {
        const bool second = is_dov(x);
        g_queries[x] += second ? p.do_stride[1] : p.q_stride[1];
        g_keys[x] += second ? p.v_stride[1] : p.k_stride[1];
      }
      g_bias1 += args.bias1_stride[1], query_index += p.H * p.Lq;
    }
  }
  CUTLASS_DEVICE void store_vectors(int stage, const Vectors& x) const {
    if (thread < Config::kKeys) {
      const float bias1 = Bias1Row<scalar_t>::value(x.bias1, x.shift) * column_unit;
      store_column<typename Config::Mma>(key_vector(stage), thread, has_key ? bias1 : -infinity());
    }
    if (thread >= Config::kQueries) return;
    QueryValue exponent = x.lse;
    float2 dp;
    if constexpr (Config::kExact) {
      dp = x.dp;
    } else {
      exponent = NegativeLse<QueryValue>::value(exponent) * Exponent::row_unit;
      dp = make_float2(x.dp, x.dp);
    }
    if (!has_query) exponent = one_part<QueryValue>(-infinity());
    float* sQueries = query_vectors(stage);
    *reinterpret_cast<float2*>(sQueries + 2 * thread) = dp;
    reinterpret_cast<QueryValue*>(sQueries + 2 * Config::kQueries)[thread] = exponent;
  }
};

}  // namespace ds4s
