// One tile of scores through the online softmax: the element-wise half of the forward.
#pragma once

#include "bias.h"
#include "exp.h"
#include "scalar.h"

namespace ds4s::cpu {

// Per-row state of a block of kQueries rows.
template <int kQueries>
struct RowState {
  alignas(64) float max[kQueries];    // running maximum m of the scores, -inf before the first visible key
  alignas(64) float sum[kQueries];    // running sum l of exp(s - m)
  alignas(64) float total[kQueries];  // sum of exp(s - m) over the last tile alone
  alignas(64) float alpha[kQueries];  // exp(m before this tile - m): what the accumulator must be multiplied by

  void reset() {
    for (int i = 0; i < kQueries; ++i) {
      max[i] = -kInfinity;
      sum[i] = total[i] = alpha[i] = 0.0f;
    }
  }
};

// scores [rows][kKeys] = Q K^T in, P = exp(s - m) out as left operand `probs` (the same memory where kInPlace).
// Columns past `keys` become 0 as far as a product reads.
template <bool kPrecise, int kKind, typename E>
inline void softmax_tile_kind(float* scores, typename E::Elem* probs, int rows, int keys, float scale,
                              const float* bias1, const BiasTile& bias2, RowState<E::kQueries>& state) {
  using V = typename E::V;
  using Vec = typename V::Vec;
  constexpr int kWidth = V::kWidth;
  const int whole = keys / kWidth * kWidth;
  const int tail = keys - whole;
  const int padded = round_up(keys, E::kDepthAlign);
  const Vec scales = V::set1(scale);

  for (int i = 0; i < rows; ++i) {
    float* row = scores + i * E::kKeys;
    const int64_t bias_row = i * bias2.row_stride;

    Vec highest = V::set1(-kInfinity);
    for (int j = 0; j < whole; j += kWidth) {
      Vec s = V::fma(V::load(row + j), scales, V::load(bias1 + j));
      s = add_bias2<V, kKind>(s, bias2, bias_row + j);
      V::store(row + j, s);
      highest = V::max(highest, s);
    }
    if (tail != 0) {
      Vec s = V::fma(V::load(row + whole), scales, V::load(bias1 + whole));
      s = add_bias2_first<V, kKind>(s, bias2, bias_row + whole, tail);
      s = V::select(V::first(tail), s, V::set1(-kInfinity));
      V::store(row + whole, s);
      highest = V::max(highest, s);
    }

    const float before = state.max[i];
    const float tile_max = V::reduce_max(highest);
    const float now = before > tile_max ? before : tile_max;
    // With no visible key yet any finite base makes exp(-inf - base) = 0.
    const float base = now == -kInfinity ? 0.0f : now;
    state.max[i] = now;
    state.alpha[i] = before - base;

    const Vec bases = V::set1(base);
    Vec total = V::zero();
    for (int j = 0; j < keys; j += kWidth) {
      const Vec p = exp<kPrecise, V>(V::sub(V::load(row + j), bases));
      total = V::add(total, p);
      E::store_left(probs + i * E::kKeys + j, p);
    }
    for (int j = round_up(keys, kWidth); j < padded; j += kWidth) E::store_left(probs + i * E::kKeys + j, V::zero());
    state.total[i] = V::reduce_add(total);
  }

  for (int i = 0; i < rows; i += kWidth) {
    const Vec alpha = exp<kPrecise, V>(V::load(state.alpha + i));
    V::store(state.alpha + i, alpha);
    V::store(state.sum + i, V::fma(V::load(state.sum + i), alpha, V::load(state.total + i)));
  }
}

template <bool kPrecise, typename E>
inline void softmax_tile(float* scores, typename E::Elem* probs, int rows, int keys, float scale, const float* bias1,
                         const BiasTile& bias2, RowState<E::kQueries>& state) {
  switch (bias2.kind) {
    case kFloat32:
      return softmax_tile_kind<kPrecise, kFloat32, E>(scores, probs, rows, keys, scale, bias1, bias2, state);
    case kFloat16:
      return softmax_tile_kind<kPrecise, kFloat16, E>(scores, probs, rows, keys, scale, bias1, bias2, state);
    case kBFloat16:
      return softmax_tile_kind<kPrecise, kBFloat16, E>(scores, probs, rows, keys, scale, bias1, bias2, state);
    default:
      return softmax_tile_kind<kPrecise, kNoBias, E>(scores, probs, rows, keys, scale, bias1, bias2, state);
  }
}

}  // namespace ds4s::cpu
