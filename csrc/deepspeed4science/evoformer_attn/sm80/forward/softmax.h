// The online softmax of one warp's 32 rows, math.md (7), in base 2 (docs/kernels/sm80.md, Forward).
//
//   p = 2^(c s - c m),  l = sum p,  c = scale * log2(e)
//
// m is a reference, not the running maximum: any m gives the same quotient (5) as long as p and its sums fit their
// types. There are two ways to choose it:
//   begin()       once, from a row's first 32 scores, for P of a float's range. lower() keeps sums small, now and then;
//                 fits() tells at the end whether all was right.
//   must_move()   in each step: m moves when a score would make p exceed 2^kSlack, which fits every type of P.
#pragma once

#include <cutlass/array.h>

#include "../../epilogue/epilogue_rescale_output.h"
#include "../mma/mma.h"

namespace ds4s {

template <typename Mma, bool kIsWide = false>  // kIsWide: O takes 128 registers
struct RowSoftmax {
  static constexpr bool kKeepsHuge = !kIsWide;  // `huge` stays in a register
  static constexpr int kLaneRows = Mma::kLaneRows;
  static constexpr int kPerSlot = 8 / kLaneRows;  // values of one row in an accumulator tile
  static constexpr float kSlack = 8.0f;
  // For begin(), lower() and fits(). In units of c m, a reference lies so much above a row's first scores. The scores
  // of a stage may be 70 above those before it, and p V is a normal float for V from 2^-106 on. 1 / l is a normal float
  // for four of the largest sums, which four warps may bring together.
  static constexpr float kAbove = 20.0f;
  static constexpr float kLeastSum = 1.0f / (1 << 21), kUsualSum = 1 << 20, kLargestSum = 2e37f;
  static constexpr float kLargestStep = 120.0f;  // of m: 2 to the minus this is a normal float
  static constexpr float kHuge = 65536.0f;       // from this |c m| on, the rounding of c m makes c s - c m too coarse
  using Row = cutlass::Array<float, kLaneRows>;

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

  // The reference of all steps: kAbove above a row's largest first score. 0 where these are hidden, or huge.
  CUTLASS_DEVICE void begin(const float (&s)[4][8]) {
    Row largest;
    CUTLASS_PRAGMA_UNROLL
    for (int lane_row = 0; lane_row < kLaneRows; ++lane_row) largest[lane_row] = largest_of(s, lane_row);
    reduce_max(largest);
    CUTLASS_PRAGMA_UNROLL
    for (int lane_row = 0; lane_row < kLaneRows; ++lane_row) {
      const float x = largest[lane_row] * c;
      cm[lane_row] = fabsf(x) < kHuge ? x + kAbove : 0.f;
    }
  }
  // Where a sum has become large: divides l and the accumulators by its size, and m rises by as much. A sum p V that is
  // not finite makes l infinite, so that fits() returns false.
  template <int kTiles>
  CUTLASS_DEVICE void lower(float (&o)[kTiles][8]) {
    float largest = l[0];
    CUTLASS_PRAGMA_UNROLL
    for (int lane_row = 1; lane_row < kLaneRows; ++lane_row) largest = fmaxf(largest, l[lane_row]);
    if (!ptx::any(largest > kUsualSum)) return;
    const bool is_finite = all_finite(o);
    CUTLASS_PRAGMA_UNROLL
    for (int lane_row = 0; lane_row < kLaneRows; ++lane_row) {
      const float sum = Mma::reduce_max(l[lane_row]), before = cm[lane_row];
      if (sum > kUsualSum && sum <= kLargestSum) cm[lane_row] += fminf(ptx::log2(sum) + kAbove, kLargestStep);
      m_prime[lane_row] = ptx::exp2(before - cm[lane_row]);
      l[lane_row] = is_finite ? l[lane_row] * m_prime[lane_row] : infinity();
    }
    rescale(o, m_prime);
  }
  // After finish(): whether the references were right for the rows of this lane, so that no p was too large and none
  // that matters too small. o: the lane's part of sum p V, which may exceed a float's range where p is large.
  template <int kTiles>
  CUTLASS_DEVICE bool fits(const float (&o)[kTiles][8]) const {
    bool fits = true, is_large = false;
    CUTLASS_PRAGMA_UNROLL
    for (int lane_row = 0; lane_row < kLaneRows; ++lane_row) {
      fits &= l[lane_row] >= kLeastSum && l[lane_row] <= kLargestSum, is_large |= l[lane_row] > kUsualSum;
    }
    return fits && (!is_large || all_finite(o));
  }

  // Sets `largest` to the lane's largest score of each row. Returns whether some row of the warp must move its
  // reference.
  CUTLASS_DEVICE bool must_move(Row& largest, const float (&s)[4][8]) const {
    bool above = false;
    CUTLASS_PRAGMA_UNROLL
    for (int lane_row = 0; lane_row < kLaneRows; ++lane_row) {
      largest[lane_row] = largest_of(s, lane_row);
      above |= largest[lane_row] > limit[lane_row];
    }
    return ptx::any(above);
  }

  // Moves the references to the largest scores. The caller multiplies its accumulators by m_prime.
  CUTLASS_DEVICE void move(Row largest) {
    reduce_max(largest);
    bool any_huge = false;
    CUTLASS_PRAGMA_UNROLL
    for (int lane_row = 0; lane_row < kLaneRows; ++lane_row) {
      float x = largest[lane_row];
      float before = reference(lane_row), now = x * (c / 4);
      bool first = limit[lane_row] == -infinity(), was_huge = is_huge(lane_row);
      bool moves = first || was_huge ? x > limit[lane_row] : now > before;
      if (!moves) now = before;
      // c m of a huge reference is too coarse; the difference is taken of m itself, which is the limit.
      float by = was_huge ? moves ? (limit[lane_row] - x) * c : 0.f : 4 * (before - now);
      m_prime[lane_row] = first ? 1.f : ptx::exp2(by);
      l[lane_row] *= m_prime[lane_row];
      bool is_huge = fabsf(now) > kHuge / 4;
      if (moves) limit[lane_row] = is_huge ? x : x + kSlack / c;
      cm[lane_row] = is_huge ? 0.f : 4 * now;
      any_huge |= is_huge;
    }
    if constexpr (kKeepsHuge) huge = ptx::any(any_huge);
  }

  // Replaces s by the exponents c s - c m.
  CUTLASS_DEVICE void to_exponents(float (&s)[4][8]) const {
    if (some_are_huge()) {
      CUTLASS_PRAGMA_UNROLL
      for (int lane_row = 0; lane_row < kLaneRows; ++lane_row) {
        // A lane's exchange with itself keeps the compiler from predicating this rare branch into the common path.
        float m = ptx::shfl_xor(is_huge(lane_row) ? limit[lane_row] : 0.f, 0);
        CUTLASS_PRAGMA_UNROLL
        for (int x = 0; x < 32; ++x) {
          if (Mma::lane_row_of(x % 8) == lane_row) s[x / 8][x % 8] -= m;
        }
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < 32; ++x) s[x / 8][x % 8] = fmaf(s[x / 8][x % 8], c, -cm[Mma::lane_row_of(x % 8)]);
  }
  // Replaces exponents by p and adds p to l.
  CUTLASS_DEVICE void exponentiate(float (&s)[4][8]) {
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < 32; ++x) s[x / 8][x % 8] = ptx::exp2(s[x / 8][x % 8]);
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < 32; ++x) l[Mma::lane_row_of(x % 8)] += s[x / 8][x % 8];
  }

  // c m / 4, which is finite for every finite m. Where m is huge, limit holds m itself.
  CUTLASS_DEVICE float reference(int lane_row) const {
    return is_huge(lane_row) ? limit[lane_row] * (c / 4) : cm[lane_row] / 4;
  }

  // Called once, after the last keys: sums l over the lanes and makes cm the reference() of every row.
  CUTLASS_DEVICE void finish() {
    CUTLASS_PRAGMA_UNROLL
    for (int lane_row = 0; lane_row < kLaneRows; ++lane_row)
      l[lane_row] = Mma::reduce_sum(l[lane_row]), cm[lane_row] = reference(lane_row);
  }

  // Merges another warp's part of the row, given by its reference and its l (0 if it saw no key). Sets m_prime, the
  // factor of this part's accumulators, and returns the factor of the other part's. Both parts have finished.
  CUTLASS_DEVICE float join(int lane_row, float other, float other_l) {
    float before = cm[lane_row], now = l[lane_row] == 0.f ? other : other_l == 0.f ? before : fmaxf(before, other);
    m_prime[lane_row] = l[lane_row] == 0.f ? 0.f : ptx::exp2(4 * (before - now));
    float theirs = other_l == 0.f ? 0.f : ptx::exp2(4 * (other - now));
    l[lane_row] = l[lane_row] * m_prime[lane_row] + other_l * theirs;
    cm[lane_row] = now;
    return theirs;
  }

  // (6), after finish(); -inf where l is 0.
  CUTLASS_DEVICE float logsumexp(int lane_row) const {
    return fmaf(cm[lane_row], 4 * kLn2, ptx::log2(l[lane_row]) * kLn2);
  }

  // o = factor * o, with a factor for each of the lane's rows.
  template <int kTiles>
  CUTLASS_DEVICE void rescale(float (&o)[kTiles][8], const Row& factor) const {
    using Rescale = MemoryEfficientAttentionNormalize<float, float, kPerSlot, float, float, /*isFirst=*/false,
                                                      /*isLast=*/false, Row>;
    Rescale op(l, factor);
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kTiles; ++j) {
      CUTLASS_PRAGMA_UNROLL
      for (int lane_row = 0; lane_row < kLaneRows; ++lane_row) {
        cutlass::Array<float, kPerSlot> zero;
        zero.clear();
        put<kPerSlot>(o[j], lane_row, op(lane_row, zero, get(o[j], lane_row)));
      }
    }
  }

  // Sets o to 0 in rows that see no key, whatever V holds. The vote keeps the selections out of the common path.
  template <int kTiles>
  CUTLASS_DEVICE void clear_unseen(float (&o)[kTiles][8]) const {
    bool unseen = false;
    CUTLASS_PRAGMA_UNROLL
    for (int lane_row = 0; lane_row < kLaneRows; ++lane_row) unseen |= l[lane_row] == 0.f;
    if (!ptx::any(unseen)) return;
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < 8 * kTiles; ++x) {
      if (l[Mma::lane_row_of(x % 8)] == 0.f) o[x / 8][x % 8] = 0.f;
    }
  }

  // The values of one of the lane's rows in an accumulator tile, in ascending order.
  CUTLASS_DEVICE static cutlass::Array<float, kPerSlot> get(const float (&tile)[8], int lane_row) {
    cutlass::Array<float, kPerSlot> x;
    int n = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 8; ++i) {
      if (Mma::lane_row_of(i) == lane_row) x[n++] = tile[i];
    }
    return x;
  }
  template <int kCount>
  CUTLASS_DEVICE static void put(float (&tile)[8], int lane_row, const cutlass::Array<float, kCount>& x) {
    int n = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 8; ++i) {
      if (Mma::lane_row_of(i) == lane_row) tile[i] = x[n++];
    }
  }

 private:
  // Over the lanes of each row. In a loop over keys that contains another loop, ptxas places exponentials eight cycles
  // apart and products between them; in one that does not, they are ten cycles apart, and products come afterwards:
  // (1,384,384,4,32) 1.05 of the time. Where O takes 128 registers it is slower, 1.02 of the time.
  CUTLASS_DEVICE static void reduce_max(Row& rows) {
    if constexpr (!kIsWide) {
      Mma::reduce_max_in_loop(rows);
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int lane_row = 0; lane_row < kLaneRows; ++lane_row) rows[lane_row] = Mma::reduce_max(rows[lane_row]);
    }
  }
  template <int kTiles>
  CUTLASS_DEVICE static bool all_finite(const float (&o)[kTiles][8]) {
    bool finite = true;
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < 8 * kTiles; ++x) finite &= fabsf(o[x / 8][x % 8]) < infinity();
    return finite;
  }
  CUTLASS_DEVICE static float largest_of(const float (&s)[4][8], int lane_row) {
    float largest = s[0][first_of(lane_row)];
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < 32; ++x) {
      if (Mma::lane_row_of(x % 8) == lane_row && x != first_of(lane_row)) largest = fmaxf(largest, s[x / 8][x % 8]);
    }
    return largest;
  }
  // Without kKeepsHuge also true before the first visible key.
  CUTLASS_DEVICE bool some_are_huge() const {
    if constexpr (kKeepsHuge) return huge;
    float largest = fabsf(limit[0]);
    CUTLASS_PRAGMA_UNROLL
    for (int lane_row = 1; lane_row < kLaneRows; ++lane_row) largest = fmaxf(largest, fabsf(limit[lane_row]));
    return ptx::any(largest * c > kHuge);
  }
  CUTLASS_DEVICE bool is_huge(int lane_row) const {
    return limit[lane_row] > -infinity() && fabsf(limit[lane_row] * c) > kHuge;
  }
  CUTLASS_HOST_DEVICE static constexpr int first_of(int lane_row) {
    return Mma::kLaneRows == 4 ? 2 * lane_row : 2 * (lane_row & 1);
  }
};

}  // namespace ds4s
