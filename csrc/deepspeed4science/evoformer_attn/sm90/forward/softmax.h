// The online softmax of one thread's two rows, math.md (2), (3), (4) and (7), in base 2: p = 2^(c s - c m), l = sum p.
//
// m is a reference, not the running maximum: any m gives the same quotient as long as p and its sums fit their types.
// It moves when a row exceeds it by far. Usually lanes exchange nothing and nothing is rescaled.
#pragma once

#include "common/ptx.h"
#include "sm90/mma/wgmma.h"

namespace ds4s::sm90 {

template <typename scalar_t>
struct WarpgroupSoftmax {
  // The test for a too small m. Where P has a float's range (bfloat16), l is tested: without a too small m it exceeds
  // kLargestSum only after a million keys, and then m moves in every step without need. In float16 p itself is tested.
  static constexpr bool kWide = cutlass::platform::is_same<scalar_t, cutlass::bfloat16_t>::value;
  static constexpr float kLargestSum = 1048576.0f, kLargestP = 256.0f;
  static constexpr float kHuge = 65536.0f;  // from this |c m| on, the rounding of c m makes c s - c m too coarse

  float c;
  float cm[2];   // c m; 0 before the first visible key: 2^(-inf - 0) is 0, -inf - -inf would be NaN
  float m[2];    // -inf before the first visible key
  float l[2];    // this thread's part of the sum
  bool careful;  // some row of the warp has seen no key yet, or its m is huge: all its keys carry a mask like -1e9

  CUTLASS_DEVICE explicit WarpgroupSoftmax(float c_)
      : c(c_), cm{0.f, 0.f}, m{-infinity(), -infinity()}, l{0.f, 0.f}, careful(true) {}

  // Takes the first reference from a quarter of a tile's first scores. Where these are all hidden, or huge,
  // exponentiate(), which looks at all scores, sets the reference.
  template <int kCount>
  CUTLASS_DEVICE void begin(const float (&s)[kCount]) {
    float x[2];
    bool special = false;
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2; ++r) {
      x[r] = fmaxf(fmaxf(s[2 * r], s[2 * r + 1]), fmaxf(s[2 * r + 4], s[2 * r + 5]));
      x[r] = fmaxf(x[r], ptx::shfl_xor(x[r], 1));
      x[r] = fmaxf(x[r], ptx::shfl_xor(x[r], 2));
      special |= !(fabsf(x[r] * c) < kHuge);
    }
    if (ptx::any(special)) return;
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2; ++r) m[r] = x[r], cm[r] = x[r] * c;
    careful = false;
  }

  // Computes p, packed, and adds it to l. If m has moved, calls rescale(factor): the accumulators must be multiplied by
  // `factor`.
  template <int kCount, typename Rescale>
  CUTLASS_DEVICE void exponentiate(uint32_t (&p)[kCount / 2], const float (&s)[kCount], const Rescale& rescale) {
    if (!careful) {
      float l_before[2] = {l[0], l[1]};
      exponentiate_common(p, s);
      if (!ptx::any(exceeds(p))) return;
      l[0] = l_before[0], l[1] = l_before[1];
    }
    float factor[2];
    move(factor, s);
    exponentiate_careful(p, s);
    rescale(factor);
  }

  // Adds the sum of row r over other keys, of reference `their_m`. Accumulators must then be multiplied by `factor`,
  // and those of the other keys by `of_theirs`.
  CUTLASS_DEVICE void join(int r, float their_m, float their_l, float& factor, float& of_theirs) {
    const float larger = fmaxf(m[r], their_m), reference = larger == -infinity() ? 0.f : larger;
    factor = ptx::exp2((m[r] - reference) * c), of_theirs = ptx::exp2((their_m - reference) * c);
    l[r] = fmaf(their_l, of_theirs, l[r] * factor);
    m[r] = larger;
  }

  // Called once, after the last keys: sums l over the four threads of each row.
  CUTLASS_DEVICE void finish_sums() {
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2; ++r) {
      l[r] += ptx::shfl_xor(l[r], 1);
      l[r] += ptx::shfl_xor(l[r], 2);
    }
  }

  // (6); -inf for a row that has seen no key.
  CUTLASS_DEVICE float logsumexp(int r) const {
    return l[r] == 0.f ? -infinity() : (m[r] * c + ptx::log2(l[r])) * kLn2;
  }

 private:
  // Whether m is too small for these p.
  template <int kCount>
  CUTLASS_DEVICE bool exceeds(const uint32_t (&p)[kCount]) const {
    if constexpr (kWide) {
      return fmaxf(l[0], l[1]) > kLargestSum;
    } else {
      uint32_t top = p[0];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 1; i < kCount; ++i) top = ptx::max_half_pairs(top, p[i]);
      const float2 largest = ptx::unpack<scalar_t>(top);
      return fmaxf(largest.x, largest.y) > kLargestP;
    }
  }

  // Two sums of a row, so that ptxas leaves other instructions between two of 2^x; as x + y it puts both side by side,
  // where the second one waits.
  template <int kCount>
  CUTLASS_DEVICE void exponentiate_common(uint32_t (&p)[kCount / 2], const float (&s)[kCount]) {
    float of_odd[2] = {-0.f, -0.f};  // -0 + y is y
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount / 2; ++i) {
      int r = row_of(2 * i);
      float x = ptx::exp2(fmaf(s[2 * i], c, -cm[r])), y = ptx::exp2(fmaf(s[2 * i + 1], c, -cm[r]));
      l[r] += x, of_odd[r] += y;
      p[i] = ptx::pack<scalar_t>(x, y);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2; ++r) l[r] += of_odd[r];
  }
  template <int kCount>
  CUTLASS_DEVICE void exponentiate_careful(uint32_t (&p)[kCount / 2], const float (&s)[kCount]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount / 2; ++i) {
      int r = row_of(2 * i);
      float reference = m[r] == -infinity() ? 0.f : m[r];
      float x = ptx::exp2((s[2 * i] - reference) * c), y = ptx::exp2((s[2 * i + 1] - reference) * c);
      l[r] += x + y;
      p[i] = ptx::pack<scalar_t>(x, y);
    }
  }

  // Moves the references to the largest scores of the four threads of a row.
  template <int kCount>
  CUTLASS_DEVICE void move(float (&factor)[2], const float (&s)[kCount]) {
    bool special = false;
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2; ++r) {
      float x = m[r];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; ++i) {
        if (row_of(i) == r) x = fmaxf(x, s[i]);
      }
      x = fmaxf(x, ptx::shfl_xor(x, 1));
      x = fmaxf(x, ptx::shfl_xor(x, 2));
      factor[r] = m[r] == -infinity() ? 1.f : ptx::exp2((m[r] - x) * c);
      l[r] *= factor[r];
      m[r] = x;
      cm[r] = x == -infinity() ? 0.f : x * c;
      special |= x == -infinity() || fabsf(cm[r]) > kHuge;
    }
    careful = ptx::any(special);
  }
};

}  // namespace ds4s::sm90
