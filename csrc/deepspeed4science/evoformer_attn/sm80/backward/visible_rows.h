// Iterates, in order, over the rows n that see one of a tile's keys. A warp tests 32 rows n at a time, one in each
// lane, so that skipped rows n cost next to nothing.
#pragma once

#include "common/key_mask.h"

namespace ds4s {

template <int kKeys, typename Index>  // Index: the integer type that indexes all B N rows n
struct VisibleRows {
  const KeyMask& mask;
  Index first_bn;  // index of row n = 0
  int key, end;
  int base;  // bit i of `seen`: row n = base + i sees one of the keys
  uint32_t seen = 0;

  CUTLASS_DEVICE VisibleRows(const KeyMask& mask_, Index first_bn_, int key_, int begin, int end_)
      : mask(mask_), first_bn(first_bn_), key(key_), end(end_), base(begin - 32) {}

  // The first row n, from `n` on, that sees one of the keys; `end` if there is none. n must not decrease between calls.
  // Called by all lanes together.
  CUTLASS_DEVICE int next(int n) {
    if (mask.visible == nullptr) return n;
    CUTLASS_PRAGMA_NO_UNROLL
    while (n < end) {
      if (n >= base + 32) {
        base = n;
        const int mine = n + int(threadIdx.x) % 32;
        const bool sees = mine < end && mask.units(first_bn + mine, key, kKeys / KeyMask::kUnit) != 0;
        seen = __ballot_sync(0xffffffffu, sees);
      }
      const uint32_t rest = seen >> (n - base);
      if (rest != 0) return n + __ffs(int(rest)) - 1;
      n = base + 32;
    }
    return end;
  }
};

}  // namespace ds4s
