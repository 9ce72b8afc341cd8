// Offsets of the result of common/key_mask.h in a workspace, and sizes of tiles: plain arithmetic, for plans.
#pragma once

#include "../params.h"
#include "workspace.h"

namespace ds4s {

// The keys of a tile where as few tiles as possible, all of the same size, contain the keys below `end`: `most`, or 7
// or 6 eighths of it.
constexpr int even_tile_keys(int end, int most) {
  const int eighth = most / 8, tiles = end <= most ? 1 : (end + most - 1) / most;
  const int eighths = (end + tiles * eighth - 1) / (tiles * eighth);
  return eighth * (eighths < 6 ? 6 : eighths);
}

class KeyMaskLayout {
 public:
  static constexpr int kUnit = 16;              // keys of one bit of the mask
  static constexpr int kWordKeys = 32 * kUnit;  // keys of one 32-bit word
  static constexpr int num_words(int64_t Lk) { return int((Lk + kWordKeys - 1) / kWordKeys); }

  template <typename Params>  // FwdParams or BwdParams
  explicit KeyMaskLayout(const Params& p)
      : needed_(p.bias1 != nullptr || p.row_mask != nullptr), rows_(p.B * p.N), words_(num_words(p.Lk)) {
    if (!needed_) return;
    WorkspaceLayout pieces;
    counter_ = pieces.reserve(true, 4);
    shift_ = pieces.reserve(true, 4 * rows_);
    range_ = pieces.reserve(true, 8 * rows_);
    visible_ = pieces.reserve(true, 4 * rows_ * words_);
    only_key_ = pieces.reserve(finds_only_keys(p), 4 * rows_);
    bytes_ = pieces.bytes();
  }

  bool needed() const { return needed_; }
  int64_t bytes() const { return bytes_; }
  int64_t rows() const { return rows_; }
  int words() const { return words_; }
  // Offsets in bytes from the beginning of the result.
  int64_t counter() const { return counter_; }
  int64_t shift() const { return shift_; }
  int64_t range() const { return range_; }
  int64_t visible() const { return visible_; }
  int64_t only_key() const { return only_key_; }

 private:
  static constexpr bool finds_only_keys(const FwdParams&) { return false; }
  static constexpr bool finds_only_keys(const BwdParams& p) { return p.bias1 != nullptr && p.partial_keys == 0; }

  bool needed_;
  int64_t rows_;
  int words_;
  int64_t bytes_ = 0, counter_ = 0, shift_ = 0, range_ = 0, visible_ = 0, only_key_ = kNotReserved;
};

}  // namespace ds4s
