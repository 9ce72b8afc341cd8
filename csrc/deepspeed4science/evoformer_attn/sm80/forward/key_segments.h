// The keys of a row n that a forward block computes: segments, one after another, within which the loop reads no mask.
// Keys hidden by math.md (6a) inside a segment are computed as usual; those between two segments, kGapUnits units or
// more, are neither loaded nor computed. Beginning a segment takes about as long as 32 keys.
//
// The mask may come from a kernel that this one overlaps with: ptx::load_written.
#pragma once

#include "../../common/key_mask.h"

namespace ds4s {

struct KeySegment {
  int begin, end;
};

// The mask of a row n, loaded by a warp at once, so that it waits once.
struct RowMask {
  KeyMask mask;       // from this row n on; null: nothing is hidden
  int2 range;         // as in KeyMask
  uint32_t word = 0;  // this lane's word of KeyMask::visible
  float shift = 0.f;

  CUTLASS_DEVICE bool sees_nothing() const { return range.x >= range.y; }

  // kSkips = false: without bias1 a row n sees all of its keys or none. kGiven: the mask is not null.
  template <bool kSkips, bool kGiven>
  CUTLASS_DEVICE static RowMask load(const KeyMask& mask, int num_keys) {
    RowMask row{mask, make_int2(0, num_keys)};
    if (!kGiven && mask.range == nullptr) return row;
    row.range = ptx::load_written(mask.range);
    if constexpr (kSkips) {
      const int lane = int(threadIdx.x % 32);
      if (lane < mask.words) row.word = ptx::load_written(mask.visible + lane);
      row.shift = ptx::load_written(mask.shift);
    }
    return row;
  }
};

// Called by all lanes of a warp with the same arguments.
struct KeySegments {
  static constexpr int kGapUnits = 4;

  const uint32_t* visible;  // of this row n, as in KeyMask; null: nothing is hidden
  int words, num_keys;
  int begin, end;  // all visible keys are in [begin, end)

  CUTLASS_DEVICE KeySegments(const RowMask& row, int num_keys_)
      : visible(row.mask.visible),
        words(row.mask.words),
        num_keys(num_keys_),
        begin(row.range.x),
        end(row.range.y < num_keys_ ? row.range.y : num_keys_) {}

  // Called by a whole warp, for a row n that sees a key.
  CUTLASS_DEVICE KeySegment first(const RowMask& row) const {
    if (visible == nullptr) return {begin, end};
    const int lane = int(threadIdx.x % 32);
    const uint32_t in_range =
        below((end - 1) / KeyMask::kUnit + 1 - 32 * lane) & ~below(begin / KeyMask::kUnit - 32 * lane);
    const bool has_holes = words > 32 || ptx::any((in_range & ~row.word) != 0);
    return has_holes ? from(begin) : whole_stripes(begin, end);
  }

  // The same without RowMask, which the loop does not keep.
  CUTLASS_DEVICE KeySegment first() const { return visible == nullptr ? KeySegment{begin, end} : from(begin); }

  CUTLASS_DEVICE bool has_more(const KeySegment& segment) const { return segment.end < end; }
  // The first segment that begins at `key`, a multiple of 16, or later. One exists.
  CUTLASS_DEVICE KeySegment from(int key) const {
    uint32_t bits = units(key);
    CUTLASS_PRAGMA_NO_UNROLL
    while (bits == 0) key += KeyMask::kWordKeys, bits = units(key);
    key += (__ffs(int(bits)) - 1) * KeyMask::kUnit;
    int stop = key;
    CUTLASS_PRAGMA_NO_UNROLL
    while (true) {
      // Bit i: one of the units i - 3 to i is visible, or belongs to the previous window.
      bits = units(stop);
      bits |= bits << 1;
      bits |= bits << 2 | ((1u << (kGapUnits - 1)) - 1);
      if (bits != ~0u) break;
      stop += (32 - (kGapUnits - 1)) * KeyMask::kUnit;
    }
    return whole_stripes(key, stop + (__ffs(int(~bits)) - kGapUnits) * KeyMask::kUnit);
  }

 private:
  // Rounded up to whole stripes of 32 keys where these exist: they need no bounds checks.
  CUTLASS_DEVICE KeySegment whole_stripes(int first, int last) const {
    last = first + (last - first + 31) / 32 * 32;
    return {first, last < num_keys ? last : num_keys};
  }
  // Of the 32 units from `key` on.
  CUTLASS_DEVICE uint32_t units(int key) const {
    const int word = key / KeyMask::kWordKeys;
    const uint32_t low = word < words ? ptx::load_written(visible + word) : 0;
    const uint32_t high = word + 1 < words ? ptx::load_written(visible + word + 1) : 0;
    return __funnelshift_r(low, high, uint32_t(key) / KeyMask::kUnit);
  }
  CUTLASS_DEVICE static uint32_t below(int bit) { return bit <= 0 ? 0u : bit >= 32 ? ~0u : (1u << bit) - 1; }
};

}  // namespace ds4s
