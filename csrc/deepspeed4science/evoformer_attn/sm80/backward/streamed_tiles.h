// The streamed side of a block of kernel_dq_dkdv.h, kStreamed queries or keys at a time, through stages in shared
// memory.
//
//   StreamedTiles    Q and dO, or K and V
//   StreamedVectors  -lse and -delta of a query, or bias1 of a key, in the form of score_tile.h
#pragma once

#include "sm80/backward/score_tile.h"
#include "sm80/backward/tile_position.h"
#include "sm80/mma/tile_loader.h"
#include "sm80/visible_keys.h"

namespace ds4s {

template <typename Config>
struct StreamedTiles {
  using scalar_t = typename Config::scalar_t;
  using TileT = PermutedTile<scalar_t, Config::kStreamed, Config::kHeadDim, Config::kAsync>;
  using Loader = TileLoader<scalar_t, TileT, Config::kLoadThreads, Config::kAligned, Config::kAsync>;
  using Keys = VisibleKeys<Config::kStreamed, 32, /*kSkips=*/!Config::kOwnsKeys>;

  static constexpr int kElements = TileT::kBytes / int(sizeof(scalar_t));
  static constexpr int kVectorBytes = 2 * Config::kStreamed * kColumnBytes;
  static constexpr int kStageBytes = 2 * TileT::kBytes + kVectorBytes;
  // Each half of the threads loads one of the two tiles; in a small block all threads load both.
  static constexpr int kSources = 2 * Config::kLoadThreads / Config::kThreads;

  static constexpr bool kKeepsAddress =
      Config::kKeepsAddresses && kSources == 1 && Loader::kEven && Loader::kRowsPerPass % 8 == 0;

  Keys keys;
  int64_t qk_stride, dov_stride;
  int qk_channels, dov_channels;
  int num, thread, half;
  const scalar_t* g[kSources];  // kKeepsAddress: this thread's chunk of the next tile
  char* shared;

  CUTLASS_DEVICE StreamedTiles(const TileOperands<Config>& operands, const KeyMask& mask, int64_t bn, int num_,
                               char* shared_, int thread_)
      : keys{mask, bn, num_},
        qk_stride(operands.streamed_qk.stride),
        dov_stride(operands.streamed_dov.stride),
        qk_channels(operands.streamed_qk.channels),
        dov_channels(operands.streamed_dov.channels),
        num(num_),
        thread(thread_),
        half(int(uniform(uint32_t(thread_ / Config::kLoadThreads)))),
        shared(shared_) {
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < kSources; ++x) g[x] = is_dov(x) ? operands.streamed_dov.g : operands.streamed_qk.g;
    if constexpr (kKeepsAddress) {
      g[0] = Loader(g[0], stride_of(0), channels_of(0), thread - half * Config::kLoadThreads).g;
    }
  }

  CUTLASS_DEVICE bool is_dov(int source) const { return source + half == 1; }
  CUTLASS_DEVICE int64_t stride_of(int source) const { return is_dov(source) ? dov_stride : qk_stride; }
  CUTLASS_DEVICE int channels_of(int source) const { return is_dov(source) ? dov_channels : qk_channels; }
  CUTLASS_DEVICE const scalar_t* qk(int stage) const {
    return reinterpret_cast<const scalar_t*>(shared + stage * kStageBytes);
  }
  CUTLASS_DEVICE const scalar_t* dov(int stage) const { return qk(stage) + kElements; }
  CUTLASS_DEVICE float* vectors(int stage) const {
    return reinterpret_cast<float*>(shared + stage * kStageBytes + 2 * TileT::kBytes);
  }

  // The first tile from `tile` on that has a visible key, or the end; load() then reads that tile.
  CUTLASS_DEVICE int seek(int tile) {
    return keys.seek(tile, [&] {
      CUTLASS_PRAGMA_UNROLL
      for (int x = 0; x < kSources; ++x) g[x] += Config::kStreamed * stride_of(x);
    });
  }
  // Called once for each tile that is not skipped, in order.
  CUTLASS_DEVICE void load(int tile, int stage) {
    scalar_t* s = reinterpret_cast<scalar_t*>(shared + stage * kStageBytes);
    if constexpr (kKeepsAddress) {
      // Its offset and stride are found again for each tile. Kept through the loop, they would be in local memory,
      // whose loads wait for the additions to dq.
      int64_t stride = stride_of(0);
      ptx::keep(stride);
      const int t = int(ptx::thread_x()) % Config::kLoadThreads;
      Loader::at(g[0], stride, channels_of(0), t).load(s + half * kElements, num - tile * Config::kStreamed);
      g[0] += Config::kStreamed * stride;
      ptx::cp_async_commit();
      return;
    }
    int t = Config::kKeepsThread ? thread - half * Config::kLoadThreads : int(ptx::thread_x()) % Config::kLoadThreads;
    ptx::keep(t);  // the loaders need registers here only, not through the whole loop
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < kSources; ++x) {
      Loader(g[x], stride_of(x), channels_of(x), t)
          .load(s + (is_dov(x) ? kElements : 0), num - tile * Config::kStreamed);
      g[x] += Config::kStreamed * stride_of(x);
    }
    if constexpr (Config::kAsync) ptx::cp_async_commit();
  }
};

template <typename Config>
struct StreamedVectors {
  using scalar_t = typename Config::scalar_t;
  using QueryValue = typename Config::QueryValue;
  static constexpr bool kOwnsKeys = Config::kOwnsKeys;
  using Score = typename cutlass::platform::conditional<kOwnsKeys, QueryValue, float>::type;

  // The values that a thread is loading from global memory.
  struct Loaded {
    typename cutlass::platform::conditional<kOwnsKeys, QueryValue, uint32_t>::type score;
    QueryValue dp;
  };

  NegativeLse<QueryValue> negative_lse;
  Bias1Row<scalar_t> bias1;
  const QueryValue* negative_delta;
  float unit = 0.f;  // the factor of terms of scores (Probabilities::column_unit), to be set before store()
  int count;

  CUTLASS_DEVICE StreamedVectors(const BackwardInputs& args, const TilePosition<Config>& at)
      : negative_lse(args, at.b, at.n, at.h),
        bias1(args, at.b, at.n),
        negative_delta(static_cast<const QueryValue*>(args.negative_delta) + (at.bn * args.p.H + at.h) * args.p.Lq),
        count(at.num_streamed(args.p)) {}

  // first: of the tile.
  CUTLASS_DEVICE Loaded load(int first) const {
    Loaded x{};
    const int mine = first + int(threadIdx.x);
    if (int(threadIdx.x) >= Config::kStreamed || mine >= count) return x;
    if constexpr (kOwnsKeys) {
      x.score = negative_lse.load(mine);
      if constexpr (Config::kWantsDs) {
        x.dp = negative_delta[mine];
      }
    } else {
      x.score = bias1.load(mine);
    }
    return x;
  }
  CUTLASS_DEVICE void store(float* s, const Loaded& x, int first) const {
    if (int(threadIdx.x) >= Config::kStreamed) return;
    Score score;
    if constexpr (kOwnsKeys) {
      score = negative_lse.value(x.score);
    } else {
      score = bias1.value(x.score);
    }
    if constexpr (!Config::kExact) score *= unit;
    if (first + int(threadIdx.x) >= count) score = one_part<Score>(-infinity());
    store_column<typename Config::Mma>(s, int(threadIdx.x), score);
    if constexpr (kOwnsKeys && Config::kWantsDs)
      store_column<typename Config::Mma>(s + 2 * Config::kStreamed, int(threadIdx.x), x.dp);
  }
};

// The same for the fused kernel, one value for each thread: -lse of a query, or its -delta, which lies in dq.
template <typename Config>
struct QueryVectors {
  using scalar_t = typename Config::scalar_t;
  using Loaded = float;
  static constexpr int kStreamed = Config::kStreamed;

  Bias1Row<scalar_t> bias1;
  const float* ptr;  // of the next tile
  int64_t step;
  float unit = 0.f;       // likewise
  int kept_query, count;  // kept_query: used if kKeepsThread
  bool is_delta;

  CUTLASS_DEVICE QueryVectors(const BackwardInputs& args, const TilePosition<Config>& at)
      : bias1(args, at.b, at.n),
        kept_query(int(threadIdx.x) % kStreamed),
        count(at.num_streamed(args.p)),
        is_delta(uniform(uint32_t(threadIdx.x / kStreamed)) != 0) {
    static_assert(Config::kThreads == 2 * kStreamed, "a thread for each value");
    const DeltaInDq<scalar_t> delta(args.p, at.b, at.n, at.h);
    ptr = is_delta ? delta.at(query()) : NegativeLse<float>(args, at.b, at.n, at.h).ptr + query();
    step = int64_t(kStreamed) * (is_delta ? delta.stride : 1);
  }

  CUTLASS_DEVICE int query() const { return Config::kKeepsThread ? kept_query : int(ptx::thread_x()) % kStreamed; }
  // first: of the tile; called for one tile after the other.
  CUTLASS_DEVICE Loaded load(int first) {
    float x = 0.f;
    if (first + query() < count) x = *ptr;
    ptr += step;
    return x;
  }
  CUTLASS_DEVICE void store(float* s, float x, int first) const {
    if (!is_delta) x = first + query() < count ? NegativeLse<float>::value(x) * unit : -infinity();
    store_column<typename Config::Mma>(s + (is_delta ? 2 * kStreamed : 0), query(), x);
  }
};

}  // namespace ds4s
