// One thread's part of the backward: a chunk of queries of one (b, n, h).
#pragma once

#include "../params.h"
#include "backward_scratch.h"
#include "bias.h"
#include "engine.h"
#include "gradient.h"

namespace ds4s::cpu {

// A row's scores are shifted by its lse. Where that is large (a finite mask of -1e9 on every key; huge scores) one
// float cannot say lse closely enough, and exp might overflow: such rows are shifted by their maximum, found anew.
constexpr float kLargeLse = 64.0f;

// In float32 dbias2 is summed over runs of 32 n, those over runs of 32 runs, and so on: one sum over hundreds of rows
// would round more than eager's pairwise one. Each level is an array of dbias2's size, and dbias2 is the last.
constexpr int64_t kDbias2Run = 32;

template <typename scalar_t>
inline int dbias2_levels(const BwdParams& p) {
  if (p.dbias2 == nullptr || sizeof(scalar_t) != 4 || p.N <= 2 * kDbias2Run) return 0;
  int levels = 0;
  for (int64_t length = kDbias2Run; length < p.N; length *= kDbias2Run) ++levels;
  return levels;
}

template <typename scalar_t, typename E>
class BackwardWorker {
 public:
  using V = typename E::V;
  using Vec = typename V::Vec;
  using Elem = typename E::Elem;

  // dbias2_runs: [dbias2_levels, B, H, Lq, Lk].
  BackwardWorker(const BwdParams& p, const BackwardScratch<E>& scratch, float* dbias2_runs)
      : p_(p), s_(scratch), dbias2_runs_(dbias2_runs), dbias2_levels_(dbias2_levels<scalar_t>(p)) {
    wants_dscores_ = p.dq != nullptr || p.dk != nullptr || p.dbias1 != nullptr || p.dbias2 != nullptr;
  }

  // Queries [q0, q1): dq, their rows of dbias2, and what they add to the gradients of the keys, into `sums`.
  void run(int64_t b, int64_t n, int64_t h, int64_t q0, int64_t q1, const KeySums& sums) {
    if (b != b_ || n != n_ || h != h_) pack_keys(b, n, h);
    for (int64_t key = 0; p_.dbias1 != nullptr && key < s_.padded_keys; ++key) *sums.dbias1(key) = 0.0f;
    for (int64_t q = q0; q < q1; q += E::kQueries) {
      query_block(q, int(q1 - q < E::kQueries ? q1 - q : E::kQueries), sums, /*first=*/q == q0);
    }
  }

  // Key block `key` of dk, dv [b, n, h] and of its part of dbias1 from finished sums.
  void store_keys(int64_t b, int64_t n, int64_t h, int64_t key, const KeySums& sums, float* dbias1_part) {
    const int count = int(p_.Lk - key < E::kKeys ? p_.Lk - key : E::kKeys);
    if (p_.dk != nullptr) {
      store_transposed(at(p_.dk, p_.dk_stride, b, n, key, h), p_.dk_stride[2], count, sums.dk_t(key), int(p_.D),
                       p_.scale);
    }
    if (p_.dv != nullptr) {
      store_transposed(at(p_.dv, p_.dv_stride, b, n, key, h), p_.dv_stride[2], count, sums.dv_t(key), int(p_.Dv),
                       1.0f);
    }
    if (p_.dbias1 != nullptr) {
      for (int j = 0; j < count; ++j) dbias1_part[key + j] = *sums.dbias1(key + j);
    }
  }

 private:
  static const scalar_t* at(const void* data, const int64_t* stride, int64_t b, int64_t n, int64_t l, int64_t h) {
    return static_cast<const scalar_t*>(data) + b * stride[0] + n * stride[1] + l * stride[2] + h * stride[3];
  }
  static scalar_t* at(void* data, const int64_t* stride, int64_t b, int64_t n, int64_t l, int64_t h) {
    return static_cast<scalar_t*>(data) + b * stride[0] + n * stride[1] + l * stride[2] + h * stride[3];
  }

  int keys_from(int64_t key) const { return int(p_.Lk - key < E::kKeys ? p_.Lk - key : E::kKeys); }

  void pack_keys(int64_t b, int64_t n, int64_t h) {
    b_ = b;
    n_ = n;
    h_ = h;
    const scalar_t* k = at(p_.k, p_.k_stride, b, n, 0, h);
    const scalar_t* v = at(p_.v, p_.v_stride, b, n, 0, h);
    for (int64_t key = 0; key < p_.Lk; key += E::kKeys) {
      const int count = keys_from(key);
      E::pack_right_transposed(s_.keys_t + key * s_.channels, k + key * p_.k_stride[2], p_.k_stride[2], count,
                               int(p_.D));
      if (!wants_dscores_) continue;
      E::pack_right_transposed(s_.values_t + key * s_.value_channels, v + key * p_.v_stride[2], p_.v_stride[2],
                               count, int(p_.Dv));
    }
    if (p_.dq != nullptr) {
      E::pack_right(s_.keys, s_.channels, k, p_.k_stride[2], int(p_.Lk), round_up(p_.Lk, E::kDepthAlign), int(p_.D));
    }
    load_bias1(s_.bias1, p_, b, n, 0, int(p_.Lk));
  }

  void pack_queries(int64_t q0, int rows) {
    E::pack_left(s_.queries, s_.channels, at(p_.q, p_.q_stride, b_, n_, q0, h_), p_.q_stride[2], rows, E::kQueries,
                 int(p_.D));
    E::pack_left(s_.douts, s_.value_channels, at(p_.do_, p_.do_stride, b_, n_, q0, h_), p_.do_stride[2], rows,
                 E::kQueries, int(p_.Dv));
    if constexpr (E::kPacksTransposedLeft) {
      E::transpose_left(s_.queries_t, s_.queries, s_.channels);
      E::transpose_left(s_.douts_t, s_.douts, s_.value_channels);
    }
  }

  void query_block(int64_t q0, int rows, const KeySums& sums, bool first) {
    pack_queries(q0, rows);
    rows_.reset();
    find_shifts(q0, rows);
    find_centers(q0, rows);
    // Behind the products: the next block's rows come in, and the lines of dq. A few at a time, because the processor
    // stalls when too many are on their way.
    const int64_t q1 = q0 + E::kQueries;
    const int next = int(p_.Lq - q1 < E::kQueries ? p_.Lq - q1 : E::kQueries);
    for (int64_t key = 0; key < p_.Lk; key += E::kKeys) {
      prefetch_share<false>(at(p_.q, p_.q_stride, b_, n_, q1, h_), p_.q_stride[2], next, p_.D, key);
      prefetch_share<false>(at(p_.do_, p_.do_stride, b_, n_, q1, h_), p_.do_stride[2], next, p_.Dv, key);
      first_pass(q0, rows, key);
    }
    rows_.finish(rows);
    for (int64_t key = 0; key < p_.Lk; key += E::kKeys) {
      if (p_.dq != nullptr) {
        prefetch_share<true>(at(p_.dq, p_.dq_stride, b_, n_, q0, h_), p_.dq_stride[2], rows, p_.D, key);
      }
      second_pass(q0, rows, key, sums, first);
    }
    if (p_.dq != nullptr) store_dq(q0, rows);
  }

  // The rows of a block that fall to one key block's turn.
  template <bool kWrite>
  void prefetch_share(const scalar_t* first, int64_t stride, int rows, int64_t cols, int64_t key) const {
    const int share = int((rows * int64_t(E::kKeys) + p_.Lk - 1) / p_.Lk);
    const int done = int(key / E::kKeys) * share;
    const int left = rows - done < share ? rows - done : share;
    prefetch_rows<kWrite>(first + done * stride, stride, left, cols);
  }

  float* strip_tile(float* strip, int64_t key) const { return strip + key * E::kQueries; }

  BiasTile bias2(int64_t q0, int rows, int64_t key, int count) const {
    return bias2_tile(p_, b_, h_, q0, key, rows, count, s_.gather, E::kKeys);
  }

  void multiply_scores(int rows, int64_t key, int count) {
    E::template multiply<false>(rows, count, int(p_.D), Left<Elem>{s_.queries, s_.channels, 1},
                                s_.keys_t + key * s_.channels, E::kKeys, strip_tile(s_.scores, key), E::kKeys);
  }

  void find_shifts(int64_t q0, int rows) {
    const float* lse = p_.lse + ((b_ * p_.N + n_) * p_.H + h_) * p_.Lq + q0;
    bool large = false;
    for (int i = 0; i < rows; ++i) {
      // No visible key: exp(-inf - inf) = 0 everywhere in the row.
      rows_.shift[i] = lse[i] == -kInfinity ? kInfinity : lse[i];
      large |= lse[i] > kLargeLse || (lse[i] < -kLargeLse && lse[i] != -kInfinity);
    }
    if (!large) return;

    float highest[E::kQueries];
    for (int i = 0; i < rows; ++i) highest[i] = -kInfinity;
    for (int64_t key = 0; key < p_.Lk; key += E::kKeys) {
      const int count = keys_from(key);
      multiply_scores(rows, key, count);
      const BiasTile tile = bias2(q0, rows, key, count);
      for (int i = 0; i < rows; ++i) {
        const float* row = strip_tile(s_.scores, key) + i * E::kKeys;
        for (int j = 0; j < count; ++j) {
          float s = p_.scale * row[j] + s_.bias1[key + j];
          if (tile.kind != kNoBias) s += load_element(tile.data, tile.kind, i * tile.row_stride + j);
          highest[i] = s > highest[i] ? s : highest[i];
        }
      }
    }
    // A NaN anywhere in the row is in lse too, and stays.
    for (int i = 0; i < rows; ++i) {
      if (lse[i] == lse[i] && highest[i] != -kInfinity) rows_.shift[i] = highest[i];
    }
  }

  void find_centers(int64_t q0, int rows) {
    if constexpr (kPreciseExp<scalar_t>) {
      for (int i = 0; i < rows; ++i) {
        const scalar_t* out = at(p_.o, p_.o_stride, b_, n_, q0 + i, h_);
        const float center = dot(at(p_.do_, p_.do_stride, b_, n_, q0 + i, h_), out);
        // An infinite center would spread from its own key to the whole row.
        rows_.center[i] = center - center == 0.0f ? center : 0.0f;
      }
    }
  }

  float dot(const scalar_t* x, const scalar_t* y) const {
    const int count = int(p_.Dv);
    Vec sum = V::zero();
    int j = 0;
    for (; j + V::kWidth <= count; j += V::kWidth) sum = V::fma(V::load(x + j), V::load(y + j), sum);
    if (j < count) sum = V::fma(V::load_first(x + j, count - j), V::load_first(y + j, count - j), sum);
    return V::reduce_add(sum);
  }

  void first_pass(int64_t q0, int rows, int64_t key) {
    const int count = keys_from(key);
    float* const dprobs = wants_dscores_ ? strip_tile(s_.dprobs, key) : nullptr;
    multiply_scores(rows, key, count);
    if (wants_dscores_) {
      E::template multiply<false>(rows, count, int(p_.Dv), Left<Elem>{s_.douts, s_.value_channels, 1},
                                  s_.values_t + key * s_.value_channels, E::kKeys, dprobs, E::kKeys);
    }
    probabilities<kPreciseExp<scalar_t>, E>(strip_tile(s_.scores, key), dprobs, rows, count, p_.scale,
                                            s_.bias1 + key, bias2(q0, rows, key, count), rows_);
  }

  void second_pass(int64_t q0, int rows, int64_t key, const KeySums& sums, bool first) {
    const int count = keys_from(key);
    float* const probs = strip_tile(s_.scores, key);
    float* const dprobs = strip_tile(s_.dprobs, key);

    GradientTile<kPreciseExp<scalar_t>, E> tile;
    tile.probs = probs;
    tile.dprobs = wants_dscores_ ? dprobs : nullptr;
    if constexpr (E::kInPlace) {
      tile.probs_right = probs;
      tile.dscores_right = tile.dscores_left = dprobs;
    } else {
      tile.probs_right = s_.probs_right;
      tile.dscores_right = s_.dscores_right;
      tile.dscores_left = s_.dscores_left;
    }
    tile.dbias1 = p_.dbias1 == nullptr ? nullptr : sums.dbias1(key);
    const int64_t dbias2_offset = ((b_ * p_.H + h_) * p_.Lq + q0) * p_.Lk + key;
    tile.dbias2 = p_.dbias2 == nullptr ? nullptr : dbias2_level(0) + dbias2_offset;
    tile.dbias2_stride = p_.Lk;
    tile.dbias2_first = dbias2_levels_ == 0 ? n_ == 0 : n_ % kDbias2Run == 0;
    tile.rows = rows;
    tile.keys = count;
    tile.run(rows_);
    if (dbias2_levels_ != 0) end_dbias2_runs(dbias2_offset, rows, count);

    if (p_.dv != nullptr) {
      accumulate(first, int(p_.Dv), count, rows, transposed(s_.douts_t, s_.value_channels), tile.probs_right,
                 E::kKeys, sums.dv_t(key), E::kKeys);
    }
    if (p_.dk != nullptr) {
      accumulate(first, int(p_.D), count, rows, transposed(s_.queries_t, s_.channels), tile.dscores_right, E::kKeys,
                 sums.dk_t(key), E::kKeys);
    }
    if (p_.dq != nullptr) {
      accumulate(key == 0, rows, int(p_.D), count, Left<Elem>{tile.dscores_left, E::kKeys, 1},
                 s_.keys + key * s_.channels, s_.channels, s_.dq, s_.channels);
    }
  }

  float* dbias2_level(int level) const {
    return level == dbias2_levels_ ? p_.dbias2 : dbias2_runs_ + level * (p_.B * p_.H * p_.Lq * p_.Lk);
  }

  // A tile of every level whose run ends with this n joins the next level.
  void end_dbias2_runs(int64_t offset, int rows, int count) const {
    int64_t length = 1;
    for (int level = 0; level < dbias2_levels_; ++level) {
      length *= kDbias2Run;
      if ((n_ + 1) % length != 0 && n_ != p_.N - 1) return;
      const bool first = n_ / length % kDbias2Run == 0;
      for (int i = 0; i < rows; ++i) {
        const float* from = dbias2_level(level) + offset + i * p_.Lk;
        float* to = dbias2_level(level + 1) + offset + i * p_.Lk;
        for (int j = 0; j < count; ++j) to[j] = first ? from[j] : to[j] + from[j];
      }
    }
  }

  // The block of queries with channels as rows.
  static Left<Elem> transposed(const Elem* packed, int channels) {
    if constexpr (E::kPacksTransposedLeft) return {packed, E::kQueries, 1};
    return {packed, 1, channels};
  }

  static void accumulate(bool first, int m, int n, int k, const Left<Elem>& a, const Elem* b, int ldb, float* c,
                         int ldc) {
    if (first) {
      E::template multiply<false>(m, n, k, a, b, ldb, c, ldc);
    } else {
      E::template multiply<true>(m, n, k, a, b, ldb, c, ldc);
    }
  }

  void store_dq(int64_t q0, int rows) {
    scalar_t* to = at(p_.dq, p_.dq_stride, b_, n_, q0, h_);
    for (int i = 0; i < rows; ++i) store_row(to + i * p_.dq_stride[2], s_.dq + i * s_.channels, int(p_.D), p_.scale);
  }

  static void store_row(scalar_t* to, const float* row, int count, float scale) {
    const Vec scales = V::set1(scale);
    int j = 0;
    for (; j + V::kWidth <= count; j += V::kWidth) V::store(to + j, V::mul(V::load(row + j), scales));
    if (j < count) V::store_first(to + j, V::mul(V::load(row + j), scales), count - j);
  }

  // [channels][kKeys] to `count` rows.
  static void store_transposed(scalar_t* to, int64_t stride, int count, const float* from, int channels,
                               float scale) {
    for (int i = 0; i < count; i += V::kWidth) {
      for (int j = 0; j < channels; j += V::kWidth) {
        Vec square[V::kWidth];
        for (int r = 0; r < V::kWidth; ++r) square[r] = V::load(from + (j + r) * E::kKeys + i);
        V::transpose(square);
        const int left = channels - j < V::kWidth ? channels - j : V::kWidth;
        for (int r = 0; r < V::kWidth && i + r < count; ++r) {
          V::store_first(to + (i + r) * stride + j, V::mul(square[r], V::set1(scale)), left);
        }
      }
    }
  }

  const BwdParams& p_;
  const BackwardScratch<E> s_;
  float* const dbias2_runs_;
  const int dbias2_levels_;
  GradientRows<E> rows_;
  bool wants_dscores_;
  int64_t b_ = -1, n_ = -1, h_ = -1;  // whose keys are packed
};

}  // namespace ds4s::cpu
