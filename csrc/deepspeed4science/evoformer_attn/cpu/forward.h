// The forward, math.md (1) to (7): O = softmax(scale Q K^T + bias1 - shift + bias2) V and lse, tiled, with an online
// softmax.
//
// One task is (b, h, n) and a range of queries. A thread packs K and V once; then, for each block of kQueries queries,
// it iterates over the tiles of visible keys (key_tiles.h): scores -> softmax_tile -> accumulator. Tasks have h
// innermost: the heads of a row share pages and often cache lines. Where bias2[b] of all heads is too large for a
// core's cache, n is innermost, and bias2[b, h] stays in the cache. Scratch per thread: K and V packed, 4 Lk (D + Dv)
// bytes, and tiles of kQueries rows.
#pragma once

#include <cerrno>

#include "../params.h"
#include "bias.h"
#include "engine.h"
#include "few_scores.h"
#include "key_tiles.h"
#include "parallel.h"
#include "softmax.h"

namespace ds4s::cpu {

template <typename E>
struct ForwardScratch {
  using Elem = typename E::Elem;

  Elem* keys;    // [tiles][channels][kKeys], each tile transposed
  Elem* values;  // [tiles][kKeys][value channels]
  float* bias1;  // [tiles][kKeys]
  KeyTile* tiles;
  Elem* queries;  // [kQueries][channels]
  float* scores;  // [kQueries][kKeys]: scores, then P
  float* out;     // [kQueries][value channels]
  float* gather;  // [kQueries][kKeys] for a bias2 whose columns are not contiguous

  int channels;  // D and Dv padded
  int value_channels;
  int64_t bytes;

  ForwardScratch(void* base, const FwdParams& p) {
    Carver carver(base);
    channels = round_up(p.D, E::kChannelAlign);
    value_channels = round_up(p.Dv, E::kChannelAlign);
    const int64_t padded_keys = round_up(p.Lk, E::kKeys);
    keys = carver.take<Elem>(padded_keys * channels);
    values = carver.take<Elem>(padded_keys * value_channels);
    bias1 = carver.take<float>(padded_keys);
    tiles = carver.take<KeyTile>(padded_keys / E::kKeys);
    queries = carver.take<Elem>(int64_t(E::kQueries) * channels);
    scores = carver.take<float>(E::kQueries * E::kKeys);
    out = carver.take<float>(int64_t(E::kQueries) * value_channels);
    gather = carver.take<float>(gathers_bias2(p) ? E::kQueries * E::kKeys : 0);
    bytes = carver.bytes();
  }
};

template <typename scalar_t, typename E>
class ForwardWorker {
 public:
  using V = typename E::V;

  ForwardWorker(const FwdParams& p, void* memory) : p_(p), s_(memory, p), tiles_(s_.bias1, s_.tiles) {}

  // Queries [q0, q1) of one (b, h, n).
  void run(int64_t b, int64_t h, int64_t n, int64_t q0, int64_t q1) {
    if (b != b_ || n != n_) tiles_.find(p_, b_ = b, n_ = n);
    if (tiles_.num() == 0) return store_nothing(b, h, n, q0, q1);
    pack(b, h, n);
    for (int64_t q = q0; q < q1; q += E::kQueries) block(b, h, n, q, int(q1 - q < E::kQueries ? q1 - q : E::kQueries));
  }

 private:
  static constexpr int kProbStride = E::kKeys * int(sizeof(float) / sizeof(typename E::Elem));

  static const scalar_t* at(const void* data, const int64_t* stride, int64_t b, int64_t n, int64_t l, int64_t h) {
    return static_cast<const scalar_t*>(data) + b * stride[0] + n * stride[1] + l * stride[2] + h * stride[3];
  }

  void pack(int64_t b, int64_t h, int64_t n) {
    for (int x = 0; x < tiles_.num(); ++x) {
      E::pack_right_transposed(keys(x), at(p_.k, p_.k_stride, b, n, tiles_[x].key, h), p_.k_stride[2], tiles_[x].count,
                               int(p_.D));
    }
    tiles_.for_each_run([&](int x, int count) {
      E::pack_right(values(x), s_.value_channels, at(p_.v, p_.v_stride, b, n, tiles_[x].key, h), p_.v_stride[2], count,
                    round_up(count, E::kDepthAlign), int(p_.Dv));
    });
  }

  typename E::Elem* keys(int tile) const { return s_.keys + int64_t(tile) * E::kKeys * s_.channels; }
  typename E::Elem* values(int tile) const { return s_.values + int64_t(tile) * E::kKeys * s_.value_channels; }

  void block(int64_t b, int64_t h, int64_t n, int64_t q, int rows) {
    E::pack_left(s_.queries, s_.channels, at(p_.q, p_.q_stride, b, n, q, h), p_.q_stride[2], rows, E::kQueries,
                 int(p_.D));
    state_.reset();
    // Prefetched during this block's products: the next block's queries, and the lines that this block will write.
    const int64_t next = p_.Lq - q - E::kQueries;
    prefetch_rows<false>(at(p_.q, p_.q_stride, b, n, q + E::kQueries, h), p_.q_stride[2],
                         next < E::kQueries ? next : E::kQueries, p_.D);
    prefetch_rows<true>(at(p_.o, p_.o_stride, b, n, q, h), p_.o_stride[2], rows, p_.Dv);

    for (int x = 0; x < tiles_.num(); ++x) {
      const int count = tiles_[x].count;
      const Left<typename E::Elem> queries{s_.queries, s_.channels, 1};
      // Q K^T of math.md (1); softmax_tile adds the biases.
      E::template multiply_scores<kPreciseExp<scalar_t>>(rows, count, int(p_.D), queries, keys(x), E::kKeys, s_.scores,
                                                         E::kKeys);

      const BiasTile bias2 = bias2_tile(p_, b, h, q, tiles_[x].key, rows, count, s_.gather, E::kKeys);
      softmax_tile<kPreciseExp<scalar_t>, E>(s_.scores, rows, count, p_.scale, tiles_.bias1(x), bias2, state_);

      const Left<typename E::Elem> probs{reinterpret_cast<const typename E::Elem*>(s_.scores), kProbStride, 1};
      if (x == 0) {  // A of math.md (7)
        E::template multiply<false>(rows, int(p_.Dv), count, probs, values(x), s_.value_channels, s_.out,
                                    s_.value_channels);
      } else {
        rescale(rows);
        E::template multiply<true>(rows, int(p_.Dv), count, probs, values(x), s_.value_channels, s_.out,
                                   s_.value_channels);
      }
    }
    store(b, h, n, q, rows);
  }

  // A of math.md (7), times c.
  void rescale(int rows) {
    for (int i = 0; i < rows; ++i) {
      if (state_.alpha[i] == 1.0f) continue;
      const typename V::Vec alpha = V::set1(state_.alpha[i]);
      float* row = s_.out + int64_t(i) * s_.value_channels;
      for (int j = 0; j < s_.value_channels; j += V::kWidth) V::store(row + j, V::mul(V::load(row + j), alpha));
    }
  }

  // math.md (5) and (6).
  void store(int64_t b, int64_t h, int64_t n, int64_t q, int rows) {
    scalar_t* o = const_cast<scalar_t*>(at(p_.o, p_.o_stride, b, n, q, h));
    for (int i = 0; i < rows; ++i) {
      const float sum = state_.sum[i];
      const typename V::Vec inverse = V::set1(1.0f / sum);
      const float* row = s_.out + int64_t(i) * s_.value_channels;
      for (int64_t j = 0; j < p_.Dv; j += V::kWidth) {
        // sum is 0 only where no key is visible. A NaN in V must not reach the O of such a query.
        const typename V::Vec x = sum == 0.0f ? V::zero() : V::mul(V::load(row + j), inverse);
        scalar_t* to = o + i * p_.o_stride[2] + j;
        const int64_t left = p_.Dv - j;
        if (left >= V::kWidth) {
          V::store(to, x);
        } else {
          V::store_first(to, x, int(left));
        }
      }
    }
    if (p_.lse == nullptr) return;
    float* lse = p_.lse + ((b * p_.N + n) * p_.H + h) * p_.Lq + q;
    for (int i = 0; i < rows; ++i) {
      lse[i] = state_.sum[i] == 0.0f ? -kInfinity : state_.max[i] + __builtin_logf(state_.sum[i]);
    }
  }

  // A row n without a visible key: queries [q0, q1).
  void store_nothing(int64_t b, int64_t h, int64_t n, int64_t q0, int64_t q1) {
    zero_rows(const_cast<scalar_t*>(at(p_.o, p_.o_stride, b, n, q0, h)), p_.o_stride[2], q1 - q0, p_.Dv);
    float* const lse = p_.lse == nullptr ? nullptr : p_.lse + ((b * p_.N + n) * p_.H + h) * p_.Lq;
    for (int64_t q = q0; lse != nullptr && q < q1; ++q) lse[q] = -kInfinity;
  }

  const FwdParams& p_;
  ForwardScratch<E> s_;
  KeyTiles<E::kKeys> tiles_;
  int64_t b_ = -1, n_ = -1;  // tiles_ are of this row n
  RowState<E::kQueries> state_;
};

// Largest size of bias2[b] for which heads are innermost: less than the second-level cache of a server's core.
constexpr int64_t kHeadsInnermostBytes = 1536 * 1024;

inline bool heads_innermost(const FwdParams& p) {
  if (p.bias2 == nullptr) return true;
  return p.H * p.Lq * p.Lk * (p.bias2_dtype == kFloat32 ? 4 : 2) <= kHeadsInnermostBytes;
}

template <typename scalar_t, typename Isa>
int forward(const FwdParams& p) {
  using E = typename EngineFor<scalar_t, Isa, kForwardKeys>::type;
  if (const int status = E::prepare(); status != 0) return status;

  if (p.B * p.N * p.H == 0) return 0;
  if (has_few_scores<scalar_t>(p)) return run_few_scores<FewScoresForward>(p);

  // Tasks are short enough that each thread has four, but not shorter than two blocks: K and V would be packed too
  // often.
  const int64_t heads = p.B * p.H * p.N;
  const int64_t blocks = (p.Lq + E::kQueries - 1) / E::kQueries;
  int64_t parts = 1;
  if (heads < 4 * int64_t(p.num_threads)) parts = (4 * int64_t(p.num_threads) + heads - 1) / heads;
  if (parts > (blocks + 1) / 2) parts = (blocks + 1) / 2;
  const int64_t part_rows = (blocks + parts - 1) / parts * E::kQueries;
  parts = (p.Lq + part_rows - 1) / part_rows;

  const double flops = 2.0 * double(heads) * double(p.Lq) * double(p.Lk) * double(p.D + p.Dv);
  const int threads = useful_threads(p.num_threads, flops, heads * parts);
  const int64_t bytes = ForwardScratch<E>(nullptr, p).bytes;
  const Memory memory(bytes * threads);
  if (memory.data() == nullptr) return ENOMEM;

  const bool by_head = heads_innermost(p);
  Queue queue(heads * parts, threads);
  in_parallel(threads, [&](int thread, int) {
    [[maybe_unused]] typename E::Session session;
    ForwardWorker<scalar_t, E> worker(p, memory.data() + bytes * thread);
    for (int64_t first, last; queue.take(first, last);) {
      for (int64_t task = first; task < last; ++task) {
        const int64_t part = task % parts;
        const int64_t head = task / parts;
        const int64_t b = head / (p.N * p.H);
        const int64_t q0 = part * part_rows;
        const int64_t q1 = q0 + part_rows < p.Lq ? q0 + part_rows : p.Lq;
        if (by_head) {
          worker.run(b, head % p.H, head / p.H % p.N, q0, q1);
        } else {
          worker.run(b, head / p.N % p.H, head % p.N, q0, q1);
        }
      }
    }
  });
  return 0;
}

}  // namespace ds4s::cpu
