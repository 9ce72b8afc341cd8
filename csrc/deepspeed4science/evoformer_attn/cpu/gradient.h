// One tile of scores through the gradient of the softmax: the element-wise half of the backward.
#pragma once

#include "bias.h"
#include "exp.h"
#include "scalar.h"

namespace ds4s::cpu {

// A tile of kQueries x kKeys scores on its way to P and dS.
template <typename E>
struct GradientTile {
  const float* scores;              // Q K^T
  const float* dprobs;              // dP = dO V^T, or null where only P is wanted
  typename E::Elem* probs_right;    // out: P as right operand
  typename E::Elem* dscores_right;  // out: dS as right operand
  typename E::Elem* dscores_left;   // out: dS as left operand (the same memory as dscores_right where kInPlace)
  const float* bias1;               // [kKeys]
  BiasTile bias2;
  const float* max;      // [kQueries] what is subtracted from the scores first: lse, or m
  const float* log_sum;  // [kQueries] and second: 0, or log l
  const float* delta;    // [kQueries] rowsum(dO * O)
  float* dbias1;         // [kKeys] column sums of dS, or null
  float* dbias2;         // dS is added here (or stored, where first), or null
  int64_t dbias2_stride;
  bool dbias2_first;
  int rows;
  int keys;
  float scale;
};

template <bool kPrecise, int kKind, typename E>
class GradientRows {
  using V = typename E::V;
  using Vec = typename V::Vec;
  static constexpr int kWidth = V::kWidth;

 public:
  explicit GradientRows(const GradientTile<E>& tile) : t_(tile), scale_(V::set1(tile.scale)) {}

  void run() {
    const int padded_keys = round_up(t_.keys, E::kDepthAlign > kWidth ? E::kDepthAlign : kWidth);
    if (t_.dbias1 != nullptr) {
      for (int j = 0; j < padded_keys; j += kWidth) V::store(t_.dbias1 + j, V::zero());
    }
    for (int i = 0; i < t_.rows; i += 2) {
      int j = 0;
      for (; j + kWidth <= t_.keys; j += kWidth) column<false>(i, j, kWidth);
      if (j < t_.keys) {
        column<true>(i, j, t_.keys - j);
        j += kWidth;
      }
      for (; j < padded_keys; j += kWidth) put(i, j, V::zero(), V::zero(), V::zero(), V::zero());
    }
    for (int i = round_up(t_.rows, 2); i < round_up(t_.rows, E::kDepthAlign); i += 2) {
      for (int j = 0; j < padded_keys; j += kWidth) put(i, j, V::zero(), V::zero(), V::zero(), V::zero());
    }
  }

 private:
  // One vector of rows i and i + 1; kTail: only its first `count` lanes are keys.
  template <bool kTail>
  void column(int i, int j, int count) {
    const bool both = i + 1 < t_.rows;
    const Vec p0 = prob<kTail>(i, j, count);
    const Vec p1 = both ? prob<kTail>(i + 1, j, count) : V::zero();
    if (t_.dprobs == nullptr) {
      E::store_right(t_.probs_right, i, j, p0, p1);
      return;
    }
    const Vec ds0 = dscore<kTail>(i, j, count, p0);
    const Vec ds1 = both ? dscore<kTail>(i + 1, j, count, p1) : V::zero();
    put(i, j, p0, p1, ds0, ds1);
    if (t_.dbias1 != nullptr) V::store(t_.dbias1 + j, V::add(V::load(t_.dbias1 + j), V::add(ds0, ds1)));
    if (t_.dbias2 != nullptr) {
      add_dbias2<kTail>(i, j, count, ds0);
      if (both) add_dbias2<kTail>(i + 1, j, count, ds1);
    }
  }

  template <bool kTail>
  Vec prob(int i, int j, int count) const {
    const int64_t index = i * t_.bias2.row_stride + j;
    Vec s = V::fma(V::load(t_.scores + i * E::kKeys + j), scale_, V::load(t_.bias1 + j));
    if constexpr (kTail) {
      s = add_bias2_first<V, kKind>(s, t_.bias2, index, count);
      s = V::select(V::first(count), s, V::set1(-kInfinity));
    } else {
      s = add_bias2<V, kKind>(s, t_.bias2, index);
    }
    return exp<kPrecise, V>(V::sub(V::sub(s, V::set1(t_.max[i])), V::set1(t_.log_sum[i])));
  }

  template <bool kTail>
  Vec dscore(int i, int j, int count, Vec p) const {
    const Vec ds = V::mul(p, V::sub(V::load(t_.dprobs + i * E::kKeys + j), V::set1(t_.delta[i])));
    // Past the last key dP may be 0 * inf.
    return kTail ? V::select(V::first(count), ds, V::zero()) : ds;
  }

  void put(int i, int j, Vec p0, Vec p1, Vec ds0, Vec ds1) const {
    E::store_right(t_.probs_right, i, j, p0, p1);
    if (t_.dprobs == nullptr) return;
    E::store_right(t_.dscores_right, i, j, ds0, ds1);
    if constexpr (!E::kInPlace) {
      E::store_left(t_.dscores_left + i * E::kKeys + j, ds0);
      E::store_left(t_.dscores_left + (i + 1) * E::kKeys + j, ds1);
    }
  }

  template <bool kTail>
  void add_dbias2(int i, int j, int count, Vec ds) const {
    float* to = t_.dbias2 + i * t_.dbias2_stride + j;
    if constexpr (kTail) {
      V::store_first(to, t_.dbias2_first ? ds : V::add(V::load_first(to, count), ds), count);
    } else {
      V::store(to, t_.dbias2_first ? ds : V::add(V::load(to), ds));
    }
  }

  const GradientTile<E> t_;
  const Vec scale_;
};

template <bool kPrecise, typename E>
inline void gradient_tile(const GradientTile<E>& tile) {
  switch (tile.bias2.kind) {
    case kFloat32:
      return GradientRows<kPrecise, kFloat32, E>(tile).run();
    case kFloat16:
      return GradientRows<kPrecise, kFloat16, E>(tile).run();
    case kBFloat16:
      return GradientRows<kPrecise, kBFloat16, E>(tile).run();
    default:
      return GradientRows<kPrecise, kNoBias, E>(tile).run();
  }
}

}  // namespace ds4s::cpu
