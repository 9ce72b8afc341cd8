// The online softmax of one warp's 32 rows, math.md (7), in base 2 (docs/kernels/sm80.md, Forward).
//
//   p = 2^(c s - c m),  l = sum p,  c = scale * log2(e)
//
// m is a reference, not the running maximum. It moves only when a score of the row would make p exceed 2^kSlack: any m
// gives the same quotient (5), and 2^8 fits every type to which P is rounded. Usually lanes exchange and rescale
// nothing.
#pragma once

#include <cutlass/array.h>

#include "../../epilogue/epilogue_rescale_output.h"
#include "../mma/mma.h"

namespace ds4s {

template <typename Mma, bool kKeepsHuge = true>  // kKeepsHuge: `huge` stays in a register
struct RowSoftmax {
  static constexpr int kSlots = Mma::kSlots;
  static constexpr int kPerSlot = 8 / kSlots;  // values of one row in an accumulator tile
  static constexpr float kSlack = 8.0f;
  static constexpr float kHuge = 65536.0f;  // from this |c m| on, the rounding of c m makes c s - c m too coarse
  using Row = cutlass::Array<float, kSlots>;

  Row cm;       // c m; 0 where huge, and 0 before the first visible key: 2^(-inf - 0) is 0, -inf - -inf would be NaN
  Row limit;    // m moves for raw scores above: m + kSlack / c; m where huge; -inf before the first visible key
  Row l;        // this lane's part of the sum
  Row m_prime;  // factor of the last move
  float c;
  bool huge;  // some row of the warp has a huge |c m|: all its keys carry a mask like -1e9

  CUTLASS_DEVICE explicit RowSoftmax(float scale) : c(scale * kLog2e), huge(false) {
    cm.fill(0.f);
    limit.fill(-infinity());
    l.fill(0.f);
  }

  // Sets `largest` to the lane's largest score of each row. Returns whether some row of the warp must move its
  // reference.
  CUTLASS_DEVICE bool must_move(Row& largest, const float (&s)[4][8]) const {
    bool above = false;
    CUTLASS_PRAGMA_UNROLL
    for (int slot = 0; slot < kSlots; ++slot) {
      largest[slot] = s[0][first_of(slot)];
      CUTLASS_PRAGMA_UNROLL
      for (int x = 0; x < 32; ++x) {
        if (Mma::slot_of(x % 8) == slot && x != first_of(slot)) largest[slot] = fmaxf(largest[slot], s[x / 8][x % 8]);
      }
      above |= largest[slot] > limit[slot];
    }
    return ptx::any(above);
  }

  // Moves the references to the largest scores. The caller multiplies its accumulators by m_prime.
  CUTLASS_DEVICE void move(const Row& largest) {
    bool any_huge = false;
    CUTLASS_PRAGMA_UNROLL
    for (int slot = 0; slot < kSlots; ++slot) {
      float x = Mma::reduce_max(largest[slot]);
      float before = reference(slot), now = x * (c / 4);
      bool first = limit[slot] == -infinity(), was_huge = is_huge(slot);
      bool moves = first || was_huge ? x > limit[slot] : now > before;
      if (!moves) now = before;
      // c m of a huge reference is too coarse; the difference is taken of m itself, which is the limit.
      float by = was_huge ? moves ? (limit[slot] - x) * c : 0.f : 4 * (before - now);
      m_prime[slot] = first ? 1.f : ptx::exp2(by);
      l[slot] *= m_prime[slot];
      bool is_huge = fabsf(now) > kHuge / 4;
      if (moves) limit[slot] = is_huge ? x : x + kSlack / c;
      cm[slot] = is_huge ? 0.f : 4 * now;
      any_huge |= is_huge;
    }
    if constexpr (kKeepsHuge) huge = ptx::any(any_huge);
  }

  // Replaces s by p and adds p to l.
  CUTLASS_DEVICE void exponentiate(float (&s)[4][8]) {
    if (some_are_huge()) {
      CUTLASS_PRAGMA_UNROLL
      for (int slot = 0; slot < kSlots; ++slot) {
        // A lane's exchange with itself keeps the compiler from predicating this rare branch into the common path.
        float m = ptx::shfl_xor(is_huge(slot) ? limit[slot] : 0.f, 0);
        CUTLASS_PRAGMA_UNROLL
        for (int x = 0; x < 32; ++x) {
          if (Mma::slot_of(x % 8) == slot) s[x / 8][x % 8] -= m;
        }
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < 32; ++x) {
      s[x / 8][x % 8] = ptx::exp2(fmaf(s[x / 8][x % 8], c, -cm[Mma::slot_of(x % 8)]));
    }
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < 32; ++x) l[Mma::slot_of(x % 8)] += s[x / 8][x % 8];
  }

  // c m / 4, which is finite for every finite m. Where m is huge, limit holds m itself.
  CUTLASS_DEVICE float reference(int slot) const { return is_huge(slot) ? limit[slot] * (c / 4) : cm[slot] / 4; }

  // Called once, after the last keys: sums l over the lanes and makes cm the reference() of every row.
  CUTLASS_DEVICE void finish() {
    CUTLASS_PRAGMA_UNROLL
    for (int slot = 0; slot < kSlots; ++slot) l[slot] = Mma::reduce_sum(l[slot]), cm[slot] = reference(slot);
  }

  // Merges another warp's part of the row, given by its reference and its l (0 if it saw no key). Sets m_prime, the
  // factor of this part's accumulators, and returns the factor of the other part's. Both parts have finished.
  CUTLASS_DEVICE float join(int slot, float other, float other_l) {
    float before = cm[slot], now = l[slot] == 0.f ? other : other_l == 0.f ? before : fmaxf(before, other);
    m_prime[slot] = l[slot] == 0.f ? 0.f : ptx::exp2(4 * (before - now));
    float theirs = other_l == 0.f ? 0.f : ptx::exp2(4 * (other - now));
    l[slot] = l[slot] * m_prime[slot] + other_l * theirs;
    cm[slot] = now;
    return theirs;
  }

  // (6), after finish().
  CUTLASS_DEVICE float logsumexp(int slot) const {
    return l[slot] == 0.f ? -infinity() : fmaf(cm[slot], 4 * kLn2, ptx::log2(l[slot]) * kLn2);
  }

  // o = factor * o, with a factor for each slot.
  template <int kTiles>
  CUTLASS_DEVICE void rescale(float (&o)[kTiles][8], const Row& factor) const {
    using Rescale = MemoryEfficientAttentionNormalize<float, float, kPerSlot, float, float, /*isFirst=*/false,
                                                      /*isLast=*/false, Row>;
    Rescale op(l, factor);
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kTiles; ++j) {
      CUTLASS_PRAGMA_UNROLL
      for (int slot = 0; slot < kSlots; ++slot) {
        cutlass::Array<float, kPerSlot> zero;
        zero.clear();
        put<kPerSlot>(o[j], slot, op(slot, zero, get(o[j], slot)));
      }
    }
  }

  // Sets o to 0 in rows that see no key, whatever V holds. The vote keeps the selections out of the common path.
  template <int kTiles>
  CUTLASS_DEVICE void clear_unseen(float (&o)[kTiles][8]) const {
    bool unseen = false;
    CUTLASS_PRAGMA_UNROLL
    for (int slot = 0; slot < kSlots; ++slot) unseen |= l[slot] == 0.f;
    if (!ptx::any(unseen)) return;
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < 8 * kTiles; ++x) {
      if (l[Mma::slot_of(x % 8)] == 0.f) o[x / 8][x % 8] = 0.f;
    }
  }

  // The values of one slot of an accumulator tile, in ascending order.
  CUTLASS_DEVICE static cutlass::Array<float, kPerSlot> get(const float (&tile)[8], int slot) {
    cutlass::Array<float, kPerSlot> x;
    int n = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 8; ++i) {
      if (Mma::slot_of(i) == slot) x[n++] = tile[i];
    }
    return x;
  }
  template <int kCount>
  CUTLASS_DEVICE static void put(float (&tile)[8], int slot, const cutlass::Array<float, kCount>& x) {
    int n = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 8; ++i) {
      if (Mma::slot_of(i) == slot) tile[i] = x[n++];
    }
  }

 private:
  // Without kKeepsHuge also true before the first visible key.
  CUTLASS_DEVICE bool some_are_huge() const {
    if constexpr (kKeepsHuge) return huge;
    float largest = fabsf(limit[0]);
    CUTLASS_PRAGMA_UNROLL
    for (int slot = 1; slot < kSlots; ++slot) largest = fmaxf(largest, fabsf(limit[slot]));
    return ptx::any(largest * c > kHuge);
  }
  CUTLASS_DEVICE bool is_huge(int slot) const { return limit[slot] > -infinity() && fabsf(limit[slot] * c) > kHuge; }
  CUTLASS_HOST_DEVICE static constexpr int first_of(int slot) { return Mma::kSlots == 4 ? 2 * slot : 2 * (slot & 1); }
};

}  // namespace ds4s
