// One thread's part of the backward: a chunk of keys of one (b, n, h).
#pragma once

#include "../params.h"
#include "backward_scratch.h"
#include "bias.h"
#include "engine.h"
#include "gradient.h"
#include "softmax.h"

namespace ds4s::cpu {

// Half a unit in the last place of an lse of this size is 1e-6, which P inherits. Rows above it (finite masks of
// -1e9 on all keys; huge scores) get m and log l anew.
constexpr float kLargeLse = 16.0f;

template <typename scalar_t, typename E>
class BackwardWorker {
 public:
  using V = typename E::V;
  using Vec = typename V::Vec;
  using Elem = typename E::Elem;

  // dbias1_parts: [B, N, H, Lk], or null.
  BackwardWorker(const BwdParams& p, const BackwardScratch<E>& scratch, float* dbias1_parts)
      : p_(p), s_(scratch), dbias1_parts_(dbias1_parts) {}

  // Keys [k0, k1): dk, dv, the part of dbias1 and of dbias2 that are theirs, and their share of dq into `dq`
  // [Lq][channels].
  void run(int64_t b, int64_t n, int64_t h, int64_t k0, int64_t k1, float* dq) {
    if (b != b_ || n != n_ || h != h_) prepare(b, n, h);
    for (int64_t key = k0; key < k1; key += E::kKeys) {
      key_block(key, int(k1 - key < E::kKeys ? k1 - key : E::kKeys), p_.dq == nullptr ? nullptr : dq, key == k0);
    }
  }

  // Rows [q0, q0 + rows) of dq[b, n, h] from `chunks` parts of `part_size` floats, added in order.
  void store_dq(int64_t b, int64_t n, int64_t h, int64_t q0, int rows, const float* parts, int64_t part_size,
                int64_t chunks) {
    scalar_t* to = const_cast<scalar_t*>(at(p_.dq, p_.dq_stride, b, n, q0, h));
    const Vec scale = V::set1(p_.scale);
    for (int i = 0; i < rows; ++i) {
      const float* row = parts + (q0 + i) * s_.channels;
      for (int j = 0; j < s_.channels; j += V::kWidth) {
        Vec sum = V::load(row + j);
        for (int64_t c = 1; c < chunks; ++c) sum = V::add(sum, V::load(row + c * part_size + j));
        V::store(s_.row + j, V::mul(sum, scale));
      }
      store_row(to + i * p_.dq_stride[2], s_.row, int(p_.D));
    }
  }

 private:
  static const scalar_t* at(const void* data, const int64_t* stride, int64_t b, int64_t n, int64_t l, int64_t h) {
    return static_cast<const scalar_t*>(data) + b * stride[0] + n * stride[1] + l * stride[2] + h * stride[3];
  }

  static void store_row(scalar_t* to, const float* row, int count) {
    int j = 0;
    for (; j + V::kWidth <= count; j += V::kWidth) V::store(to + j, V::load(row + j));
    if (j < count) V::store_first(to + j, V::load(row + j), count - j);
  }

  // Everything that belongs to the queries of one (b, n, h).
  void prepare(int64_t b, int64_t n, int64_t h) {
    b_ = b, n_ = n, h_ = h;
    const scalar_t* q = at(p_.q, p_.q_stride, b, n, 0, h);
    const scalar_t* dout = at(p_.do_, p_.do_stride, b, n, 0, h);
    const scalar_t* out = at(p_.o, p_.o_stride, b, n, 0, h);
    const int rows = int(p_.Lq);
    const int padded = int(s_.padded_queries);
    E::pack_left(s_.queries, s_.channels, q, p_.q_stride[2], rows, padded, int(p_.D));
    E::pack_left(s_.douts, s_.value_channels, dout, p_.do_stride[2], rows, padded, int(p_.Dv));
    if constexpr (E::kPacksTransposedLeft) {
      E::pack_left_transposed(s_.queries_t, s_.channels, s_.queries, padded);
      E::pack_left_transposed(s_.douts_t, s_.value_channels, s_.douts, padded);
    }

    const float* lse = p_.lse + ((b * p_.N + n) * p_.H + h) * p_.Lq;
    for (int i = 0; i < rows; ++i) {
      s_.delta[i] = dot(dout + i * p_.do_stride[2], out + i * p_.o_stride[2], int(p_.Dv));
      // No visible key: exp(-inf - inf) = 0 everywhere in the row.
      s_.max[i] = lse[i] == -kInfinity ? kInfinity : lse[i];
      s_.log_sum[i] = 0.0f;
    }
    for (int i = rows; i < padded; ++i) s_.delta[i] = s_.max[i] = s_.log_sum[i] = 0.0f;

    for (int64_t q0 = 0; q0 < p_.Lq; q0 += E::kQueries) {
      const int count = int(p_.Lq - q0 < E::kQueries ? p_.Lq - q0 : E::kQueries);
      bool large = false;
      for (int i = 0; i < count; ++i) large |= is_large(s_.max[q0 + i]);
      if (large) refine(q0, count);
    }
  }

  static bool is_large(float lse) { return (lse > kLargeLse || lse < -kLargeLse) && lse != kInfinity; }

  static float dot(const scalar_t* x, const scalar_t* y, int count) {
    Vec sum = V::zero();
    int j = 0;
    for (; j + V::kWidth <= count; j += V::kWidth) sum = V::fma(V::load(x + j), V::load(y + j), sum);
    if (j < count) sum = V::fma(V::load_first(x + j, count - j), V::load_first(y + j, count - j), sum);
    return V::reduce_add(sum);
  }

  void load_keys(int64_t key, int count) {
    E::pack_right_transposed(s_.keys_t, at(p_.k, p_.k_stride, b_, n_, key, h_), p_.k_stride[2], count, int(p_.D));
    load_bias1(s_.bias1, p_, b_, n_, key, count);
  }

  void multiply_scores(int64_t q0, int rows, int count) {
    const Left<Elem> queries{s_.queries + q0 * s_.channels, s_.channels, 1};
    E::template multiply<false>(rows, count, int(p_.D), queries, s_.keys_t, E::kKeys, s_.scores, E::kKeys);
  }

  // m and log l of rows whose lse is too large to say both in one float, as the forward found them.
  void refine(int64_t q0, int rows) {
    state_.reset();
    for (int64_t key = 0; key < p_.Lk; key += E::kKeys) {
      const int count = int(p_.Lk - key < E::kKeys ? p_.Lk - key : E::kKeys);
      load_keys(key, count);
      multiply_scores(q0, rows, count);
      const BiasTile bias2 = bias2_tile(p_, b_, h_, q0, key, rows, count, s_.gather, E::kKeys);
      softmax_tile<kPreciseExp<scalar_t>, E>(s_.scores, s_.probs_right, rows, count, p_.scale, s_.bias1, bias2,
                                             state_);
    }
    for (int i = 0; i < rows; ++i) {
      if (!is_large(s_.max[q0 + i]) || state_.sum[i] == 0.0f) continue;
      s_.max[q0 + i] = state_.max[i];
      s_.log_sum[q0 + i] = __builtin_logf(state_.sum[i]);
    }
  }

  void key_block(int64_t key, int count, float* dq, bool first_of_chunk) {
    const bool wants_dscores = dq != nullptr || p_.dk != nullptr || p_.dbias1 != nullptr || p_.dbias2 != nullptr;
    load_keys(key, count);
    if (wants_dscores) {
      E::pack_right_transposed(s_.values_t, at(p_.v, p_.v_stride, b_, n_, key, h_), p_.v_stride[2], count,
                               int(p_.Dv));
    }
    if (dq != nullptr) {
      E::pack_right(s_.keys, s_.channels, at(p_.k, p_.k_stride, b_, n_, key, h_), p_.k_stride[2], count,
                    round_up(count, E::kDepthAlign), int(p_.D));
    }
    for (int j = 0; j < E::kKeys; ++j) s_.dbias1_sum[j] = 0.0f;

    for (int64_t q0 = 0; q0 < p_.Lq; q0 += E::kQueries) {
      const int rows = int(p_.Lq - q0 < E::kQueries ? p_.Lq - q0 : E::kQueries);
      multiply_scores(q0, rows, count);
      if (wants_dscores) {
        const Left<Elem> douts{s_.douts + q0 * s_.value_channels, s_.value_channels, 1};
        E::template multiply<false>(rows, count, int(p_.Dv), douts, s_.values_t, E::kKeys, s_.dprobs, E::kKeys);
      }
      gradient_tile<kPreciseExp<scalar_t>, E>(describe(q0, rows, key, count, wants_dscores));
      if (p_.dbias1 != nullptr) {
        for (int j = 0; j < count; ++j) s_.dbias1_sum[j] += s_.dbias1[j];
      }

      const bool first = q0 == 0;
      if (p_.dv != nullptr) {
        accumulate(first, int(p_.Dv), count, rows, transposed(s_.douts_t, s_.value_channels, q0), s_.probs_right,
                   E::kKeys, s_.dvalues_t, E::kKeys);
      }
      if (p_.dk != nullptr) {
        accumulate(first, int(p_.D), count, rows, transposed(s_.queries_t, s_.channels, q0), s_.dscores_right,
                   E::kKeys, s_.dkeys_t, E::kKeys);
      }
      if (dq != nullptr) {
        const Left<Elem> dscores{s_.dscores_left, E::kKeys, 1};
        accumulate(first_of_chunk, rows, int(p_.D), count, dscores, s_.keys, s_.channels, dq + q0 * s_.channels,
                   s_.channels);
      }
    }

    if (p_.dk != nullptr) store_transposed(p_.dk, p_.dk_stride, key, count, s_.dkeys_t, int(p_.D), p_.scale);
    if (p_.dv != nullptr) store_transposed(p_.dv, p_.dv_stride, key, count, s_.dvalues_t, int(p_.Dv), 1.0f);
    if (p_.dbias1 != nullptr) {
      float* to = dbias1_parts_ + ((b_ * p_.N + n_) * p_.H + h_) * p_.Lk + key;
      for (int j = 0; j < count; ++j) to[j] = s_.dbias1_sum[j];
    }
  }

  GradientTile<E> describe(int64_t q0, int rows, int64_t key, int count, bool wants_dscores) {
    GradientTile<E> tile;
    tile.scores = s_.scores;
    tile.dprobs = wants_dscores ? s_.dprobs : nullptr;
    tile.probs_right = s_.probs_right;
    tile.dscores_right = s_.dscores_right;
    tile.dscores_left = s_.dscores_left;
    tile.bias1 = s_.bias1;
    tile.bias2 = bias2_tile(p_, b_, h_, q0, key, rows, count, s_.gather, E::kKeys);
    tile.max = s_.max + q0;
    tile.log_sum = s_.log_sum + q0;
    tile.delta = s_.delta + q0;
    tile.dbias1 = p_.dbias1 == nullptr ? nullptr : s_.dbias1;
    tile.dbias2 = p_.dbias2 == nullptr ? nullptr : p_.dbias2 + ((b_ * p_.H + h_) * p_.Lq + q0) * p_.Lk + key;
    tile.dbias2_stride = p_.Lk;
    tile.dbias2_first = n_ == 0;
    tile.rows = rows;
    tile.keys = count;
    tile.scale = p_.scale;
    return tile;
  }

  // The block of queries from q0 on, channels as rows.
  static Left<Elem> transposed(const Elem* packed, int channels, int64_t q0) {
    if constexpr (E::kPacksTransposedLeft) return {packed + q0 * channels, E::kQueries, 1};
    return {packed + q0 * channels, 1, channels};
  }

  static void accumulate(bool first, int m, int n, int k, const Left<Elem>& a, const Elem* b, int ldb, float* c,
                         int ldc) {
    if (first) {
      E::template multiply<false>(m, n, k, a, b, ldb, c, ldc);
    } else {
      E::template multiply<true>(m, n, k, a, b, ldb, c, ldc);
    }
  }

  void store_transposed(void* data, const int64_t* stride, int64_t key, int count, const float* from, int channels,
                        float scale) {
    scalar_t* to = const_cast<scalar_t*>(at(data, stride, b_, n_, key, h_));
    for (int i = 0; i < count; ++i) {
      for (int j = 0; j < channels; ++j) s_.row[j] = scale * from[j * E::kKeys + i];
      store_row(to + i * stride[2], s_.row, channels);
    }
  }

  const BwdParams& p_;
  const BackwardScratch<E> s_;
  float* const dbias1_parts_;
  RowState<E::kQueries> state_;
  int64_t b_ = -1, n_ = -1, h_ = -1;  // whose queries are packed
};

}  // namespace ds4s::cpu
