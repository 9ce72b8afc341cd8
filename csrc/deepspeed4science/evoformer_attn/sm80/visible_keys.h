// Iterates over the keys of a row n, in tiles of kTileKeys that are loaded together and groups of kGroupKeys that are
// computed together. Tiles without a visible key (common/key_mask.h) are not loaded, groups without one not computed. A
// row n that sees nothing is handled elsewhere.
#pragma once

#include "../common/key_mask.h"

namespace ds4s {

template <int kTileKeys, int kGroupKeys, bool kSkips_>  // kSkips = false: all keys, at no cost
struct VisibleKeys {
  static constexpr bool kSkips = kSkips_;
  static constexpr int kUnits = kTileKeys / KeyMask::kUnit, kGroupUnits = kGroupKeys / KeyMask::kUnit;
  // Halves of a tile are not skipped: at D = 48 and 128 the forward would spill 15 more registers in its loop.
  static constexpr bool kSkipsGroups = kSkips && kTileKeys > 2 * kGroupKeys;
  static constexpr uint32_t kTile = kUnits < 32 ? (1u << kUnits % 32) - 1 : ~0u;
  static constexpr uint32_t kGroup = kGroupUnits < 32 ? (1u << kGroupUnits % 32) - 1 : ~0u;
  static_assert(kTileKeys % kGroupKeys == 0 && kGroupKeys % KeyMask::kUnit == 0, "whole groups of whole units");
  static_assert(kUnits <= 32, "a tile's units are one word");

  KeyMask mask;
  int64_t bn;
  int num_keys;

  // A bit for every unit of a tile that exists.
  CUTLASS_DEVICE uint32_t units_of(int tile) const {
    if constexpr (!kSkips) return ~0u;
    if constexpr (32 % kUnits != 0) return mask.units(bn, tile * kTileKeys, kUnits);
    if (mask.visible == nullptr) return ~0u;
    const uint32_t first = uint32_t(tile) * kUnits;  // all in one word
    return __ldg(mask.visible + bn * mask.words + first / 32) >> first % 32 & kTile;
  }
  CUTLASS_DEVICE static bool is_visible(uint32_t units, int group) {
    return !kSkipsGroups || (units >> group * kGroupUnits & kGroup) != 0;
  }

  // The number of groups of a tile up to the last visible key; it may exceed the number that exist.
  CUTLASS_DEVICE static int groups_in_use(uint32_t units) {
    return (32 - __clz(int(units)) + kGroupUnits - 1) / kGroupUnits;
  }

  CUTLASS_DEVICE bool has(int tile) const { return tile * kTileKeys < num_keys; }
  // The first tile from `tile` on that has a visible key, or one that is not there. pass_over(): once for each before
  // it.
  template <typename PassOver>
  CUTLASS_DEVICE int seek(int tile, PassOver pass_over) const {
    if constexpr (kSkips) {
      CUTLASS_PRAGMA_NO_UNROLL
      for (; has(tile) && units_of(tile) == 0; ++tile) pass_over();
    }
    return tile;
  }
};

}  // namespace ds4s
