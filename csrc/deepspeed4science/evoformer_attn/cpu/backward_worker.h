// One thread's part of the backward: a chunk of queries of one (b, n, h).
#pragma once

#include "../params.h"
#include "backward_scratch.h"
#include "bias.h"
#include "center.h"
#include "engine.h"
#include "gradient.h"
#include "key_tiles.h"

namespace ds4s::cpu {

// A row's scores are shifted by its lse. Where lse is large (a finite mask in bias2 on every key; huge scores), one
// float does not hold it precisely enough and exp might overflow: such rows are shifted by their maximum, which is
// searched again.
constexpr float kLargeLse = 64.0f;

// In float32 dbias2, math.md (16), is summed over runs of 16 n, these sums over runs of 16 runs, and so on, as PyTorch
// sums: one sum over all n rounds more, most of all where rows are equal. Each level is an array of dbias2's size;
// dbias2 itself is the last.
constexpr int64_t kDbias2Run = 16;

template <typename scalar_t>
inline int dbias2_levels(const BwdParams& p) {
  if (p.dbias2 == nullptr || sizeof(scalar_t) != 4 || p.N <= kDbias2Run) return 0;
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
      : p_(p),
        s_(scratch),
        tiles_(scratch.bias1, scratch.tiles),
        dbias2_runs_(dbias2_runs),
        dbias2_levels_(dbias2_levels<scalar_t>(p)) {
    wants_dscores_ = p.dq != nullptr || p.dk != nullptr || p.dbias1 != nullptr || p.dbias2 != nullptr;
  }

  // The tiles of visible keys of one (b, n).
  const KeyTiles<E::kKeys>& tiles(int64_t b, int64_t n) {
    if (b != b_ || n != n_) {
      tiles_.find(p_, b_ = b, n_ = n);
      h_ = -1;
    }
    return tiles_;
  }

  // Queries [q0, q1): dq, their rows of dbias2, and their part of the gradients of the visible keys, in `sums`.
  void run(int64_t b, int64_t n, int64_t h, int64_t q0, int64_t q1, const KeySums& sums) {
    tiles(b, n);
    if (h != h_) pack_keys(h);
    for (int64_t key = 0; p_.dbias1 != nullptr && key < tiles_.num() * E::kKeys; ++key) *sums.dbias1(key) = 0.0f;
    for (int64_t q = q0; q < q1; q += E::kQueries) {
      const int rows = int(q1 - q < E::kQueries ? q1 - q : E::kQueries);
      if (tiles_.num() != 0) {
        query_block(q, rows, sums, /*first=*/q == q0);
      } else if (p_.dq != nullptr) {
        zero_rows(at(p_.dq, p_.dq_stride, b_, n_, q, h_), p_.dq_stride[2], rows, p_.D);
      }
      if (p_.dbias2 != nullptr) finish_dbias2(q, rows);
    }
  }

  // Adds one tile's sums of a later chunk.
  void add_tile(const KeySums& to, const KeySums& from, int tile) const {
    const int64_t key = int64_t(tile) * E::kKeys;
    if (p_.dk != nullptr) add(to.dk_t(key), from.dk_t(key), int64_t(E::kKeys) * to.channels);
    if (p_.dv != nullptr) add(to.dv_t(key), from.dv_t(key), int64_t(E::kKeys) * to.value_channels);
    if (p_.dbias1 != nullptr) add(to.dbias1(key), from.dbias1(key), E::kKeys);
  }

  // Stores one tile of dk, dv [b_, n_, h] and of this head's part of dbias1 from finished sums.
  void store_tile(int64_t h, int tile, const KeySums& sums, float* dbias1_part) const {
    const auto [key, count] = tiles_[tile];
    const int64_t from = int64_t(tile) * E::kKeys;
    if (p_.dk != nullptr) {
      store_transposed(at(p_.dk, p_.dk_stride, b_, n_, key, h), p_.dk_stride[2], count, sums.dk_t(from), int(p_.D),
                       p_.scale);
    }
    if (p_.dv != nullptr) {
      store_transposed(at(p_.dv, p_.dv_stride, b_, n_, key, h), p_.dv_stride[2], count, sums.dv_t(from), int(p_.Dv),
                       1.0f);
    }
    if (p_.dbias1 != nullptr) {
      for (int j = 0; j < count; ++j) dbias1_part[key + j] = *sums.dbias1(from + j);
    }
  }

  // The same for hidden keys: zeros.
  void store_hidden(int64_t h, int64_t first, int64_t last, float* dbias1_part) const {
    if (p_.dk != nullptr) {
      zero_rows(at(p_.dk, p_.dk_stride, b_, n_, first, h), p_.dk_stride[2], last - first, p_.D);
    }
    if (p_.dv != nullptr) {
      zero_rows(at(p_.dv, p_.dv_stride, b_, n_, first, h), p_.dv_stride[2], last - first, p_.Dv);
    }
    for (int64_t key = first; p_.dbias1 != nullptr && key < last; ++key) dbias1_part[key] = 0.0f;
  }

 private:
  static const scalar_t* at(const void* data, const int64_t* stride, int64_t b, int64_t n, int64_t l, int64_t h) {
    return static_cast<const scalar_t*>(data) + b * stride[0] + n * stride[1] + l * stride[2] + h * stride[3];
  }
  static scalar_t* at(void* data, const int64_t* stride, int64_t b, int64_t n, int64_t l, int64_t h) {
    return static_cast<scalar_t*>(data) + b * stride[0] + n * stride[1] + l * stride[2] + h * stride[3];
  }

  static void add(float* to, const float* from, int64_t count) {
    for (int64_t i = 0; i < count; ++i) to[i] += from[i];
  }

  Elem* keys_t(int tile) const { return s_.keys_t + int64_t(tile) * E::kKeys * s_.channels; }
  Elem* values_t(int tile) const { return s_.values_t + int64_t(tile) * E::kKeys * s_.value_channels; }
  Elem* keys(int tile) const { return s_.keys + int64_t(tile) * E::kKeys * s_.channels; }

  void pack_keys(int64_t h) {
    h_ = h;
    auto k = [&](int x) { return at(p_.k, p_.k_stride, b_, n_, tiles_[x].key, h); };
    for (int x = 0; x < tiles_.num(); ++x) {
      E::pack_right_transposed(keys_t(x), k(x), p_.k_stride[2], tiles_[x].count, int(p_.D));
      if (!wants_dscores_) continue;
      E::pack_right_transposed(values_t(x), at(p_.v, p_.v_stride, b_, n_, tiles_[x].key, h), p_.v_stride[2],
                               tiles_[x].count, int(p_.Dv));
    }
    if (p_.dq == nullptr) return;
    tiles_.for_each_run([&](int x, int count) {
      E::pack_right(keys(x), s_.channels, k(x), p_.k_stride[2], count, round_up(count, E::kDepthAlign), int(p_.D));
    });
  }

  void pack_queries(int64_t q0, int rows) {
    E::pack_left(s_.queries, s_.channels, at(p_.q, p_.q_stride, b_, n_, q0, h_), p_.q_stride[2], rows, E::kQueries,
                 int(p_.D));
    E::pack_left(s_.douts, s_.value_channels, at(p_.do_, p_.do_stride, b_, n_, q0, h_), p_.do_stride[2], rows,
                 E::kQueries, int(p_.Dv));
    // Clears q and dO of a query that sees no key: whatever they hold must not enter a product.
    for (int i = 0; i < rows; ++i) {
      if (lse(q0)[i] != -kInfinity) continue;
      zero_rows(s_.queries + int64_t(i) * s_.channels, 0, 1, s_.channels);
      zero_rows(s_.douts + int64_t(i) * s_.value_channels, 0, 1, s_.value_channels);
    }
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
    // Prefetches the next block's rows and the lines of dq during the products. A few at a time: the processor stalls
    // when too many are in flight.
    const int64_t q1 = q0 + E::kQueries;
    const int next = int(p_.Lq - q1 < E::kQueries ? p_.Lq - q1 : E::kQueries);
    for (int x = 0; x < tiles_.num(); ++x) {
      prefetch_share<false>(at(p_.q, p_.q_stride, b_, n_, q1, h_), p_.q_stride[2], next, p_.D, x);
      prefetch_share<false>(at(p_.do_, p_.do_stride, b_, n_, q1, h_), p_.do_stride[2], next, p_.Dv, x);
      first_pass(q0, rows, x);
    }
    clear_unseen(q0, rows);
    rows_.finish(rows);
    if (p_.partial_keys != 0) {
      settle_partial_rows<kPreciseExp<scalar_t>, E>(wants_dscores_ ? s_.dprobs : nullptr, tiles_, rows, lse(q0), rows_);
    } else if (wants_dscores_) {
      settle_rows<kPreciseExp<scalar_t>, E>(s_.scores, s_.dprobs, tiles_, rows, rows_);
    }
    for (int x = 0; x < tiles_.num(); ++x) {
      if (p_.dq != nullptr) {
        prefetch_share<true>(at(p_.dq, p_.dq_stride, b_, n_, q0, h_), p_.dq_stride[2], rows, p_.D, x);
      }
      second_pass(q0, rows, x, sums, first);
    }
    if (p_.dq != nullptr) store_dq(q0, rows);
  }

  // The rows of a block that are prefetched during one tile.
  template <bool kWrite>
  void prefetch_share(const scalar_t* first, int64_t stride, int rows, int64_t cols, int tile) const {
    const int share = (rows + tiles_.num() - 1) / tiles_.num();
    const int done = tile * share;
    const int left = rows - done < share ? rows - done : share;
    prefetch_rows<kWrite>(first + done * stride, stride, left, cols);
  }

  static float* strip_tile(float* strip, int tile) { return strip + int64_t(tile) * E::kKeys * E::kQueries; }

  BiasTile bias2(int64_t q0, int rows, int tile) const {
    return bias2_tile(p_, b_, h_, q0, tiles_[tile].key, rows, tiles_[tile].count, s_.gather, E::kKeys);
  }

  // Q K^T of math.md (1).
  void multiply_scores(int rows, int tile) {
    E::template multiply_scores<kPreciseExp<scalar_t>>(rows, tiles_[tile].count, int(p_.D),
                                                       Left<Elem>{s_.queries, s_.channels, 1}, keys_t(tile), E::kKeys,
                                                       strip_tile(s_.scores, tile), E::kKeys);
  }

  const float* lse(int64_t q0) const { return p_.lse + ((b_ * p_.N + n_) * p_.H + h_) * p_.Lq + q0; }

  void find_shifts(int64_t q0, int rows) {
    const float* const lse = this->lse(q0);
    bool large = false;
    for (int i = 0; i < rows; ++i) {
      // Without a visible key the shift is inf: exp(-inf - inf) = 0 everywhere in the row.
      rows_.shift[i] = lse[i] == -kInfinity ? kInfinity : lse[i];
      large |= lse[i] > kLargeLse || (lse[i] < -kLargeLse && lse[i] != -kInfinity);
    }
    if (!large) return;

    float highest[E::kQueries];
    for (int i = 0; i < rows; ++i) highest[i] = -kInfinity;
    for (int x = 0; x < tiles_.num(); ++x) {
      multiply_scores(rows, x);
      const BiasTile tile = bias2(q0, rows, x);
      for (int i = 0; i < rows; ++i) {
        const float* row = strip_tile(s_.scores, x) + i * E::kKeys;
        for (int j = 0; j < tiles_[x].count; ++j) {
          float s = p_.scale * row[j] + tiles_.bias1(x)[j];
          if (tile.kind != kNoBias) s += load_element(tile.data, tile.kind, i * tile.row_stride + j);
          highest[i] = s > highest[i] ? s : highest[i];
        }
      }
    }
    // A NaN anywhere in the row is in lse too, and is kept.
    for (int i = 0; i < rows; ++i) {
      if (lse[i] == lse[i] && highest[i] != -kInfinity) rows_.shift[i] = highest[i];
    }
  }

  // P of a query that sees no key is 0, although 0 (its q, pack_queries) times an infinite k is NaN.
  void clear_unseen(int64_t q0, int rows) {
    for (int i = 0; i < rows; ++i) {
      if (lse(q0)[i] != -kInfinity) continue;
      StripRow<E>(s_.scores, s_.scores, tiles_, i).clear_dprobs();
      for (int x = i * V::kWidth; x < (i + 1) * V::kWidth; ++x) rows_.sums[x] = rows_.dots[x] = 0.0f;
    }
  }

  // rowsum(dO * O), the first form of math.md (9).
  void find_centers(int64_t q0, int rows) {
    if (!kPreciseExp<scalar_t> && p_.partial_keys == 0) return;
    for (int i = 0; i < rows; ++i) {
      const scalar_t* out = at(p_.o, p_.o_stride, b_, n_, q0 + i, h_);
      const float center = dot(at(p_.do_, p_.do_stride, b_, n_, q0 + i, h_), out);
      // An infinite center would spread from its own key to the whole row.
      rows_.center[i] = center - center == 0.0f ? center : 0.0f;
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

  void first_pass(int64_t q0, int rows, int x) {
    const int count = tiles_[x].count;
    float* const dprobs = wants_dscores_ ? strip_tile(s_.dprobs, x) : nullptr;
    multiply_scores(rows, x);
    if (wants_dscores_) {  // dP, math.md (10)
      E::template multiply<false>(rows, count, int(p_.Dv), Left<Elem>{s_.douts, s_.value_channels, 1}, values_t(x),
                                  E::kKeys, dprobs, E::kKeys);
    }
    probabilities<kPreciseExp<scalar_t>, E>(strip_tile(s_.scores, x), dprobs, rows, count, p_.scale, tiles_.bias1(x),
                                            bias2(q0, rows, x), rows_);
  }

  void second_pass(int64_t q0, int rows, int x, const KeySums& sums, bool first) {
    const int count = tiles_[x].count;
    const int64_t key = int64_t(x) * E::kKeys;  // in the sums
    float* const probs = strip_tile(s_.scores, x);
    float* const dprobs = strip_tile(s_.dprobs, x);

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
    tile.dbias2 = p_.dbias2 == nullptr ? nullptr : dbias2_row(0, q0) + tiles_[x].key;
    tile.dbias2_stride = p_.Lk;
    tile.dbias2_first = begins_dbias2();
    tile.rows = rows;
    tile.keys = count;
    tile.run(rows_);

    if (p_.dv != nullptr) {  // math.md (12)
      accumulate(first, int(p_.Dv), count, rows, transposed(s_.douts_t, s_.value_channels), tile.probs_right, E::kKeys,
                 sums.dv_t(key), E::kKeys);
    }
    if (p_.dk != nullptr) {  // math.md (14)
      accumulate(first, int(p_.D), count, rows, transposed(s_.queries_t, s_.channels), tile.dscores_right, E::kKeys,
                 sums.dk_t(key), E::kKeys);
    }
    if (p_.dq != nullptr) {  // math.md (13)
      accumulate(x == 0, rows, int(p_.D), count, Left<Elem>{tile.dscores_left, E::kKeys, 1}, keys(x), s_.channels,
                 s_.dq, s_.channels);
    }
  }

  // Row q of dbias2[b_, h_] or of one of the levels before it.
  float* dbias2_row(int level, int64_t q) const {
    float* const all = level == dbias2_levels_ ? p_.dbias2 : dbias2_runs_ + level * (p_.B * p_.H * p_.Lq * p_.Lk);
    return all + ((b_ * p_.H + h_) * p_.Lq + q) * p_.Lk;
  }

  // Whether this n is the first of a run of level 0: its tiles are then stored, not added.
  bool begins_dbias2() const { return n_ % (dbias2_levels_ == 0 ? p_.N : kDbias2Run) == 0; }

  // Clears the hidden keys of the first n of a run, which no tile writes. Then adds every level whose run ends with
  // this n to the next one.
  void finish_dbias2(int64_t q0, int rows) const {
    if (begins_dbias2()) {
      tiles_.for_each_gap(
          p_.Lk, [&](int64_t first, int64_t last) { zero_rows(dbias2_row(0, q0) + first, p_.Lk, rows, last - first); });
    }
    int64_t length = 1;
    for (int level = 0; level < dbias2_levels_; ++level) {
      length *= kDbias2Run;
      if ((n_ + 1) % length != 0 && n_ != p_.N - 1) return;
      const bool first = n_ / length % kDbias2Run == 0;
      const float* from = dbias2_row(level, q0);
      float* to = dbias2_row(level + 1, q0);
      for (int64_t j = 0; j < rows * p_.Lk; ++j) to[j] = first ? from[j] : to[j] + from[j];
    }
  }

  // The block of queries, transposed: channels are its rows.
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
  static void store_transposed(scalar_t* to, int64_t stride, int count, const float* from, int channels, float scale) {
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
  KeyTiles<E::kKeys> tiles_;  // of b_, n_
  float* const dbias2_runs_;
  const int dbias2_levels_;
  GradientRows<E> rows_;
  bool wants_dscores_;
  int64_t b_ = -1, n_ = -1, h_ = -1;  // the keys of this (b, n, h) are packed; h_ = -1: none
};

}  // namespace ds4s::cpu
