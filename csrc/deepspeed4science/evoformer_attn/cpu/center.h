// Between the two passes of the backward (gradient.h): queries in which one key holds nearly all of P, and queries that
// see no key.
#pragma once

#include <cmath>
#include <cstring>

#include "gradient.h"
#include "key_tiles.h"

namespace ds4s::cpu {

// One row of a block, through all tiles of the strips of p and dP.
template <typename E>
class StripRow {
  using V = typename E::V;
  using Vec = typename V::Vec;

 public:
  StripRow(const float* probs, float* dprobs, const KeyTiles<E::kKeys>& tiles, int row)
      : probs_(probs + row * E::kKeys), dprobs_(dprobs + row * E::kKeys), tiles_(tiles) {}

  // dP of the key whose p is above `least`; 0 where there is none.
  float dprob_of_key_above(float least) const {
    for (int x = 0; x < tiles_.num(); ++x) {
      const int64_t tile = at(x);
      for (int j = 0; j < tiles_[x].count; ++j) {
        if (probs_[tile + j] > least) return dprobs_[tile + j];
      }
    }
    return 0.0f;
  }

  // sum of p (dP - center).
  float dot(float center) const {
    const Vec centers = V::set1(center);
    Vec total = V::zero();
    for (int x = 0; x < tiles_.num(); ++x) {
      const int64_t tile = at(x);
      int j = 0;
      for (; j + V::kWidth <= tiles_[x].count; j += V::kWidth) {
        total = V::fma(V::load(probs_ + tile + j), V::sub(V::load(dprobs_ + tile + j), centers), total);
      }
      if (const int left = tiles_[x].count - j; left > 0) {
        const Vec difference = V::sub(V::load_first(dprobs_ + tile + j, left), centers);
        total = V::fma(V::load_first(probs_ + tile + j, left), difference, total);
      }
    }
    return V::reduce_add(total);
  }

  // Clears dP: 0 times NaN or infinity would not be 0.
  void clear_dprobs() {
    for (int x = 0; x < tiles_.num(); ++x) std::memset(dprobs_ + at(x), 0, sizeof(float) * size_t(tiles_[x].count));
  }

 private:
  static int64_t at(int tile) { return int64_t(tile) * E::kKeys * E::kQueries; }

  const float* const probs_;
  float* const dprobs_;
  const KeyTiles<E::kKeys>& tiles_;
};

// Where one key holds more than half of a row's P, dP of that key becomes the center, so that its dP - center is
// exactly 0. If it is the only visible key, all of dS is 0. A query that sees no key gets dS = 0.
template <bool kPrecise, typename E>
inline void settle_rows(const float* probs, float* dprobs, const KeyTiles<E::kKeys>& tiles, int rows,
                        GradientRows<E>& state) {
  for (int i = 0; i < rows; ++i) {
    StripRow<E> row(probs, dprobs, tiles, i);
    const float sum = state.sum(i);
    if (sum == 0.0f) {
      row.clear_dprobs();
      state.center[i] = state.delta[i] = 0.0f;
      continue;
    }
    if (!state.may_be_led(i, sum)) continue;
    const float center = row.dprob_of_key_above(0.5f * sum);
    if (center == 0.0f || !(center - center == 0.0f)) continue;  // an infinity would spread to the whole row
    const float delta = row.dot(center) * state.inverse[i];
    if constexpr (kPrecise) {
      state.center[i] = center;
      state.delta[i] = delta;
    } else {
      state.delta[i] = center + delta;  // in one number: 16 bits need no center in the second pass
    }
  }
}

// The same if k and v are only some of the keys of O and lse (partial_keys): P follows from lse and not from the sum
// over these keys, and delta, which find_centers computed from O, is that of all keys. dprobs null: only P is wanted.
template <bool kPrecise, typename E>
inline void settle_partial_rows(float* dprobs, const KeyTiles<E::kKeys>& tiles, int rows, const float* lse,
                                GradientRows<E>& state) {
  for (int i = 0; i < rows; ++i) {
    if (state.sum(i) == 0.0f) {
      if (dprobs != nullptr) StripRow<E>(dprobs, dprobs, tiles, i).clear_dprobs();
      state.center[i] = state.delta[i] = 0.0f;
      continue;
    }
    state.inverse[i] = std::exp(state.shift[i] - lse[i]);  // 1 but for a large lse
    state.delta[i] = kPrecise ? 0.0f : state.center[i];
  }
}

}  // namespace ds4s::cpu
