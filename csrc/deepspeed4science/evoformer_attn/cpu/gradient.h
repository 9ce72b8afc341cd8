// The gradient of the softmax, math.md (8), (9), (11): the element-wise half of the backward, in two passes.
//
// Row sums need whole rows, so a block of queries keeps a strip of tiles. Pass 1, tile by tile:
//   p = exp(s - shift),  sum += p,  dot += p (dP - center)            (shift: lse, or the row's maximum)
// When a row is complete, inverse = 1 / sum and delta = dot / sum. Pass 2:
//   P = p inverse,  dS = P ((dP - center) - delta).
// Computing sum and delta from p itself costs three operations and makes the rows of dS sum to zero as exactly as
// eager's do, so dbias2 does without math.md (16a): delta = rowsum(dO * O) would inherit the rounding error of O, and
// lse that of half its last place.
// Any center gives the same dS. In float32 the center is rowsum(dO * O): where one key holds nearly all of P, dP -
// center is a difference of two nearly equal numbers, and exact. For other types the center is 0. Between the two
// passes, center.h handles rows in which one key holds nearly all of P, and rows without a visible key.
#pragma once

#include "bias.h"
#include "exp.h"
#include "scalar.h"

namespace ds4s::cpu {

// The state of each row of a block of queries.
template <typename E>
struct GradientRows {
  static constexpr int kRows = E::kQueries;
  static constexpr int kWidth = E::V::kWidth;

  alignas(64) float shift[kRows];
  alignas(64) float inverse[kRows];
  alignas(64) float center[kRows];
  alignas(64) float delta[kRows];
  alignas(64) float sums[kRows * kWidth];  // one vector a row
  alignas(64) float dots[kRows * kWidth];

  void reset() {
    for (int i = 0; i < kRows * kWidth; ++i) sums[i] = dots[i] = 0.0f;
    for (int i = 0; i < kRows; ++i) center[i] = 0.0f;
  }

  float sum(int i) const { return E::V::reduce_add(E::V::load(sums + i * kWidth)); }

  // Whether one key may hold more than half of the row's sum: if it does, so does its lane.
  bool may_be_led(int i, float sum) const { return E::V::reduce_max(E::V::load(sums + i * kWidth)) > 0.5f * sum; }

  void finish(int rows) {
    using V = typename E::V;
    for (int i = 0; i < rows; ++i) {
      const float sum = this->sum(i);
      inverse[i] = sum == 0.0f ? 0.0f : 1.0f / sum;  // 0: no visible key
      delta[i] = V::reduce_add(V::load(dots + i * kWidth)) * inverse[i];
    }
  }
};

template <bool kPrecise, typename V>
inline typename V::Vec centered(const float* dprobs, typename V::Vec center) {
  return kPrecise ? V::sub(V::load(dprobs), center) : V::load(dprobs);
}

// Pass 1 on one tile, in place: scores [rows][kKeys] in, p of math.md (8) out. `dprobs` null: only P is wanted.
template <bool kPrecise, int kKind, typename E>
inline void probabilities_kind(float* scores, const float* dprobs, int rows, int keys, float scale, const float* bias1,
                               const BiasTile& bias2, GradientRows<E>& state) {
  using V = typename E::V;
  using Vec = typename V::Vec;
  constexpr int kWidth = V::kWidth;
  const int whole = keys / kWidth * kWidth;
  const int tail = keys - whole;
  const Vec scales = V::set1(scale);

  for (int i = 0; i < rows; ++i) {
    float* row = scores + i * E::kKeys;
    const float* dprobs_row = dprobs + i * E::kKeys;
    const int64_t bias_row = i * bias2.row_stride;
    const Vec shift = V::set1(state.shift[i]);
    const Vec center = V::set1(state.center[i]);
    Vec sum = V::zero();  // of this tile: many short sums round less than a long one
    Vec lost = V::zero();
    auto add_to_sum = [&](Vec p) {
      // Kahan's summation: additions of equal weights round alike, and fewer lanes have more of them each.
      if constexpr (kPrecise && kWidth < 16) {
        const Vec y = V::sub(p, lost), t = V::add(sum, y);
        lost = V::sub(V::sub(t, sum), y), sum = t;
      } else {
        sum = V::add(sum, p);
      }
    };
    Vec dot = V::load(state.dots + i * kWidth);
    for (int j = 0; j < whole; j += kWidth) {
      const Vec biases = add_bias2<V, kKind>(V::load(bias1 + j), bias2, bias_row + j);
      const Vec s = V::fma(V::load(row + j), scales, biases);
      const Vec p = exp<kPrecise, V>(V::sub(s, shift));
      V::store(row + j, p);
      add_to_sum(p);
      if (dprobs != nullptr) dot = V::fma(p, centered<kPrecise, V>(dprobs_row + j, center), dot);
    }
    if (tail != 0) {
      const Vec biases = add_bias2_first<V, kKind>(V::load(bias1 + whole), bias2, bias_row + whole, tail);
      const Vec s = V::fma(V::load(row + whole), scales, biases);
      const Vec p = V::select(V::first(tail), exp<kPrecise, V>(V::sub(s, shift)), V::zero());
      V::store(row + whole, p);
      add_to_sum(p);
      if (dprobs != nullptr) {
        // Past the last key dP may be 0 * inf.
        const Vec dprob = centered<kPrecise, V>(dprobs_row + whole, center);
        dot = V::fma(p, V::select(V::first(tail), dprob, V::zero()), dot);
      }
    }
    V::store(state.sums + i * kWidth, V::add(V::load(state.sums + i * kWidth), sum));
    V::store(state.dots + i * kWidth, dot);
  }
}

template <bool kPrecise, typename E>
inline void probabilities(float* scores, const float* dprobs, int rows, int keys, float scale, const float* bias1,
                          const BiasTile& bias2, GradientRows<E>& state) {
  switch (bias2.kind) {
    case kFloat32:
      return probabilities_kind<kPrecise, kFloat32, E>(scores, dprobs, rows, keys, scale, bias1, bias2, state);
    case kFloat16:
      return probabilities_kind<kPrecise, kFloat16, E>(scores, dprobs, rows, keys, scale, bias1, bias2, state);
    case kBFloat16:
      return probabilities_kind<kPrecise, kBFloat16, E>(scores, dprobs, rows, keys, scale, bias1, bias2, state);
    default:
      return probabilities_kind<kPrecise, kNoBias, E>(scores, dprobs, rows, keys, scale, bias1, bias2, state);
  }
}

// Pass 2 on one tile: P and dS, math.md (11); adds to dbias1 and dbias2, (15) and (16).
template <bool kPrecise, typename E>
class GradientTile {
  using V = typename E::V;
  using Vec = typename V::Vec;
  using Elem = typename E::Elem;
  static constexpr int kWidth = V::kWidth;

 public:
  const float* probs;   // p of pass 1
  const float* dprobs;  // dP, or null where only P is wanted
  Elem* probs_right;    // out: P as right operand
  Elem* dscores_right;  // out: dS as right operand
  Elem* dscores_left;   // out: dS as left operand (the same memory as dscores_right where kInPlace)
  float* dbias1;        // [kKeys] column sums of dS are added here, or null
  float* dbias2;        // dS is added here (or stored, where first), or null
  int64_t dbias2_stride;
  bool dbias2_first;
  int rows;
  int keys;

  // A local copy of the pointers: stores through them then cannot change the pointers themselves.
  void run(const GradientRows<E>& state) const {
    const GradientTile tile = *this;
    tile.run_all(state);
  }

 private:
  __attribute__((always_inline)) void run_all(const GradientRows<E>& state) const {
    const int padded_keys = round_up(keys, E::kDepthAlign > kWidth ? E::kDepthAlign : kWidth);
    alignas(64) float columns[E::kKeys];  // sums of this tile alone: many short sums round less than a long one
    for (int j = 0; j < padded_keys; j += kWidth) V::store(columns + j, V::zero());

    for (int i = 0; i < rows; i += 2) {
      int j = 0;
      for (; j + kWidth <= keys; j += kWidth) column<false>(state, columns, i, j, kWidth);
      if (j < keys) {
        column<true>(state, columns, i, j, keys - j);
        j += kWidth;
      }
      for (; j < padded_keys; j += kWidth) put(i, j, V::zero(), V::zero(), V::zero(), V::zero());
    }
    for (int i = round_up(rows, 2); i < round_up(rows, E::kDepthAlign); i += 2) {
      for (int j = 0; j < padded_keys; j += kWidth) put(i, j, V::zero(), V::zero(), V::zero(), V::zero());
    }
    if (dbias1 == nullptr) return;
    for (int j = 0; j < padded_keys; j += kWidth) {
      V::store(dbias1 + j, V::add(V::load(dbias1 + j), V::load(columns + j)));
    }
  }

  // One vector of rows i and i + 1. kTail: only its first `count` lanes are keys.
  template <bool kTail>
  __attribute__((always_inline)) void column(const GradientRows<E>& state, float* columns, int i, int j,
                                             int count) const {
    const bool both = i + 1 < rows;
    const Vec p0 = prob(state, i, j);
    const Vec p1 = both ? prob(state, i + 1, j) : V::zero();
    if (dprobs == nullptr) {
      E::store_right(probs_right, i, j, p0, p1);
      return;
    }
    const Vec ds0 = dscore<kTail>(state, i, j, count, p0);
    const Vec ds1 = both ? dscore<kTail>(state, i + 1, j, count, p1) : V::zero();
    put(i, j, p0, p1, ds0, ds1);
    if (dbias1 != nullptr) V::store(columns + j, V::add(V::load(columns + j), V::add(ds0, ds1)));
    if (dbias2 != nullptr) {
      add_dbias2<kTail>(i, j, count, ds0);
      if (both) add_dbias2<kTail>(i + 1, j, count, ds1);
    }
  }

  Vec prob(const GradientRows<E>& state, int i, int j) const {
    return V::mul(V::load(probs + i * E::kKeys + j), V::set1(state.inverse[i]));
  }

  template <bool kTail>
  Vec dscore(const GradientRows<E>& state, int i, int j, int count, Vec p) const {
    const Vec dprob = centered<kPrecise, V>(dprobs + i * E::kKeys + j, V::set1(state.center[i]));
    const Vec ds = V::mul(p, V::sub(dprob, V::set1(state.delta[i])));
    return kTail ? V::select(V::first(count), ds, V::zero()) : ds;
  }

  void put(int i, int j, Vec p0, Vec p1, Vec ds0, Vec ds1) const {
    E::store_right(probs_right, i, j, p0, p1);
    if (dprobs == nullptr) return;
    E::store_right(dscores_right, i, j, ds0, ds1);
    if constexpr (!E::kInPlace) {
      E::store_left(dscores_left + i * E::kKeys + j, ds0);
      E::store_left(dscores_left + (i + 1) * E::kKeys + j, ds1);
    }
  }

  template <bool kTail>
  void add_dbias2(int i, int j, int count, Vec ds) const {
    float* to = dbias2 + i * dbias2_stride + j;
    if constexpr (kTail) {
      V::store_first(to, dbias2_first ? ds : V::add(V::load_first(to, count), ds), count);
    } else {
      V::store(to, dbias2_first ? ds : V::add(V::load(to), ds));
    }
  }
};

}  // namespace ds4s::cpu
