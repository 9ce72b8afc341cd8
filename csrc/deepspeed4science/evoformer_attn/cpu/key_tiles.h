// The visible keys of a row n, math.md (6a), as tiles. Neither direction reads or computes the keys between them.
//
// A tile begins with the unit of the first visible key after the previous tile and spans at most kKeys keys. It begins
// on a multiple of kUnit and ends with a unit that has a visible key (or with the last key), so that all vectors but
// the last key's are whole. Without a hidden key, tiles are the blocks of kKeys keys.
#pragma once

#include <cstring>

#include "../params.h"
#include "bias.h"
#include "gemm_fma.h"

namespace ds4s::cpu {

struct KeyTile {
  int64_t key;  // the first one
  int count;
};

constexpr int kUnit = 16;

// Zeros, for a hidden key or a row n without a visible one. All number types represent 0 by zero bits.
template <typename T>
inline void zero_rows(T* first, int64_t stride, int64_t rows, int64_t cols) {
  for (int64_t i = 0; i < rows; ++i) std::memset(first + i * stride, 0, size_t(cols) * sizeof(T));
}

template <typename Params>
inline bool is_row_read(const Params& p, int64_t b, int64_t n) {
  if (p.row_mask == nullptr) return true;
  return static_cast<const uint8_t*>(p.row_mask)[b * p.row_mask_stride[0] + n * p.row_mask_stride[1]] != 0;
}

// The largest finite number of whole units, math.md (1a); -inf where there is none.
inline float largest_finite(const float* x, int64_t count) {
  float lanes[kUnit];
  for (int i = 0; i < kUnit; ++i) lanes[i] = -kInfinity;
  for (int64_t k = 0; k < count; k += kUnit) {
    for (int i = 0; i < kUnit; ++i) lanes[i] = (x[k + i] < kInfinity) & (x[k + i] > lanes[i]) ? x[k + i] : lanes[i];
  }
  float largest = lanes[0];
  for (int i = 1; i < kUnit; ++i) largest = lanes[i] > largest ? lanes[i] : largest;
  return largest;
}

// Hidden, math.md (6a): -inf, or far below the largest finite one. NaN and +inf are visible.
class Visibility {
 public:
  Visibility(float largest, int32_t dtype) : largest_(largest), limit_(largest - kMaskThreshold[dtype]) {}

  bool of_unit(const float* x) const {
    const float largest = largest_ == -kInfinity ? kInfinity : largest_;  // -inf is never visible
    int visible = 0;
    for (int i = 0; i < kUnit; ++i) visible |= !(x[i] <= limit_) | (x[i] == largest);
    return visible != 0;
  }

 private:
  float largest_, limit_;  // where largest_ is huge, limit_ is the same number
};

// Tiles of at most kKeys keys of one (b, n), with their bias1 - shift.
template <int kKeys>
class KeyTiles {
  static_assert(kKeys % kUnit == 0, "a tile is whole units");

 public:
  static int64_t most(int64_t Lk) { return (Lk + kKeys - 1) / kKeys; }

  // bias1: [most][kKeys]; tiles: [most].
  KeyTiles(float* bias1, KeyTile* tiles) : bias1_(bias1), tiles_(tiles) {}

  int num() const { return num_; }  // 0: the row n has no visible key
  const KeyTile& operator[](int tile) const { return tiles_[tile]; }
  const float* bias1(int tile) const { return bias1_ + int64_t(tile) * kKeys; }  // bias1 - shift

  template <typename Params>
  void find(const Params& p, int64_t b, int64_t n) {
    num_ = 0;
    if (!is_row_read(p, b, n)) return;
    const int64_t padded = round_up(p.Lk, kUnit);
    load_bias1(bias1_, p, b, n, 0, int(p.Lk));
    if (p.bias1 == nullptr) {
      for (int64_t key = 0; key < p.Lk; key += kKeys) add(p, key, key + kKeys);
      return;
    }
    for (int64_t k = p.Lk; k < padded; ++k) bias1_[k] = -kInfinity;
    const float largest = largest_finite(bias1_, padded);
    const Visibility visibility(largest, p.bias1_dtype);
    for (int64_t key = 0; key < p.Lk;) {
      if (!visibility.of_unit(bias1_ + key)) {
        key += kUnit;
        continue;
      }
      int64_t end = key + kKeys < padded ? key + kKeys : padded;
      while (!visibility.of_unit(bias1_ + end - kUnit)) end -= kUnit;
      // In place: no tile moves to a later position than that from which it was loaded.
      const float shift = largest == -kInfinity ? 0.0f : largest;
      float* to = bias1_ + int64_t(num_) * kKeys;
      for (int64_t k = key; k < end; ++k) *to++ = bias1_[k] - shift;
      add(p, key, end);
      key = end;
    }
  }

  // Calls body(first, last) for every range of keys outside the tiles.
  template <typename Body>
  void for_each_gap(int64_t Lk, const Body& body) const {
    int64_t done = 0;
    for (int tile = 0; tile < num_; ++tile) {
      if (tiles_[tile].key > done) body(done, tiles_[tile].key);
      done = tiles_[tile].key + tiles_[tile].count;
    }
    if (done < Lk) body(done, Lk);
  }

  // Calls body(tile, keys) for every run of tiles without a gap between them, which can be packed at once.
  template <typename Body>
  void for_each_run(const Body& body) const {
    for (int tile = 0, next; tile < num_; tile = next) {
      int keys = tiles_[tile].count;
      for (next = tile + 1; next < num_ && tiles_[next].key == tiles_[next - 1].key + kKeys; ++next) {
        if (tiles_[next - 1].count != kKeys) break;
        keys += tiles_[next].count;
      }
      body(tile, keys);
    }
  }

 private:
  template <typename Params>
  void add(const Params& p, int64_t key, int64_t end) {
    tiles_[num_++] = {key, int((end < p.Lk ? end : p.Lk) - key)};
  }

  float* bias1_;
  KeyTile* tiles_;
  int num_ = 0;
};

}  // namespace ds4s::cpu
