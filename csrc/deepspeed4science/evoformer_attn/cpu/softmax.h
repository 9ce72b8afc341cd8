// The online softmax of one tile of scores, math.md (1) and (7): the element-wise half of the forward.
#pragma once

#include "bias.h"
#include "exp.h"
#include "scalar.h"

namespace ds4s::cpu {

// The state of each row of a block of kQueries rows.
template <int kQueries>
struct RowState {
  alignas(64) float max[kQueries];    // running maximum m of the scores, -inf before the first visible key
  alignas(64) float sum[kQueries];    // running sum l of exp(s - m)
  alignas(64) float alpha[kQueries];  // c = exp(m before this tile - m), by which the accumulator is rescaled

  void reset() {
    for (int i = 0; i < kQueries; ++i) {
      max[i] = -kInfinity;
      sum[i] = alpha[i] = 0.0f;
    }
  }
};

// Writes exp(row - base) as one row of a left operand and returns its sum, lane by lane. Reads and writes whole groups
// of kProbVecs vectors; `to` may be the same memory as `row`.
template <bool kPrecise, typename E>
inline typename E::V::Vec exp_row(const float* row, typename E::Elem* to, int keys, float base) {
  using V = typename E::V;
  using Vec = typename V::Vec;
  constexpr int kWidth = V::kWidth;
  Vec total = V::zero();
  if constexpr (E::kProbVecs == 2) {
    if (base > -kCoarseExpLimit && base < kCoarseExpLimit) {
      // The rounding error of base log2 e is common to the row and cancels in P.
      const Vec log2e = V::set1(kLog2e);
      const Vec shift = V::set1(-base * kLog2e);
      for (int j = 0; j < keys; j += 2 * kWidth) {
        const Vec x = coarse_exp2<V>(V::fma(V::load(row + j), log2e, shift));
        const Vec y = coarse_exp2<V>(V::fma(V::load(row + j + kWidth), log2e, shift));
        total = V::add(total, V::add(x, y));
        E::store_left(to + j, x, y);
      }
      return total;
    }
  }
  const Vec bases = V::set1(base);
  for (int j = 0; j < keys; j += kWidth) {
    const Vec p = exp<kPrecise, V>(V::sub(V::load(row + j), bases));
    total = V::add(total, p);
    E::store_left(to + j, p);
  }
  return total;
}

// In: scores [rows][kKeys] = Q K^T. Out, in the same memory: P = exp(s - m) as left operand. Columns past `keys` become
// 0 as far as a product reads them. A vector of rows is processed together: the maximum and sum of a single row would
// be a long dependency chain.
template <bool kPrecise, int kKind, typename E>
inline void softmax_tile_kind(float* scores, int rows, int keys, float scale, const float* bias1, const BiasTile& bias2,
                              RowState<E::kQueries>& state) {
  using V = typename E::V;
  using Vec = typename V::Vec;
  constexpr int kWidth = V::kWidth;
  static_assert(E::kProbVecs * kWidth % E::kDepthAlign == 0);
  const int whole = keys / kWidth * kWidth;
  const int tail = keys - whole;
  const int padded = round_up(keys, E::kProbVecs * kWidth);
  const Vec scales = V::set1(scale);

  for (int first = 0; first < rows; first += kWidth) {
    const int count = rows - first < kWidth ? rows - first : kWidth;

    Vec highest[kWidth];
    for (int i = 0; i < count; ++i) {
      float* row = scores + (first + i) * E::kKeys;
      const int64_t bias_row = (first + i) * bias2.row_stride;
      Vec most = V::set1(-kInfinity);
      for (int j = 0; j < whole; j += kWidth) {
        const Vec biases = add_bias2<V, kKind>(V::load(bias1 + j), bias2, bias_row + j);
        const Vec s = V::fma(V::load(row + j), scales, biases);
        V::store(row + j, s);
        most = V::max(most, s);
      }
      if (tail != 0) {
        const Vec biases = add_bias2_first<V, kKind>(V::load(bias1 + whole), bias2, bias_row + whole, tail);
        Vec s = V::fma(V::load(row + whole), scales, biases);
        s = V::select(V::first(tail), s, V::set1(-kInfinity));
        V::store(row + whole, s);
        most = V::max(most, s);
      }
      for (int j = round_up(keys, kWidth); j < padded; j += kWidth) V::store(row + j, V::set1(-kInfinity));
      highest[i] = most;
    }
    for (int i = count; i < kWidth; ++i) highest[i] = V::zero();

    V::transpose(highest);
    const Vec before = V::load(state.max + first);
    Vec now = before;
    for (int i = 0; i < kWidth; ++i) now = V::max(now, highest[i]);
    V::store(state.max + first, now);
    // With no visible key yet any finite base makes exp(-inf - base) = 0.
    const Vec base = V::max(V::set1(-0x1.fffffep127f), now);
    alignas(64) float bases[kWidth];
    V::store(bases, base);

    Vec totals[kWidth];
    for (int i = 0; i < count; ++i) {
      float* const row = scores + (first + i) * E::kKeys;
      totals[i] = exp_row<kPrecise, E>(row, reinterpret_cast<typename E::Elem*>(row), padded, bases[i]);
    }
    for (int i = count; i < kWidth; ++i) totals[i] = V::zero();

    V::transpose(totals);
    Vec total = totals[0];
    for (int i = 1; i < kWidth; ++i) total = V::add(total, totals[i]);
    const Vec alpha = exp<kPrecise, V>(V::sub(before, base));
    V::store(state.alpha + first, alpha);
    V::store(state.sum + first, V::fma(V::load(state.sum + first), alpha, total));
  }
}

template <bool kPrecise, typename E>
inline void softmax_tile(float* scores, int rows, int keys, float scale, const float* bias1, const BiasTile& bias2,
                         RowState<E::kQueries>& state) {
  switch (bias2.kind) {
    case kFloat32:
      return softmax_tile_kind<kPrecise, kFloat32, E>(scores, rows, keys, scale, bias1, bias2, state);
    case kFloat16:
      return softmax_tile_kind<kPrecise, kFloat16, E>(scores, rows, keys, scale, bias1, bias2, state);
    case kBFloat16:
      return softmax_tile_kind<kPrecise, kBFloat16, E>(scores, rows, keys, scale, bias1, bias2, state);
    default:
      return softmax_tile_kind<kPrecise, kNoBias, E>(scores, rows, keys, scale, bias1, bias2, state);
  }
}

}  // namespace ds4s::cpu
