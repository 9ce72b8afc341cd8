// Rows of dbias2 are made to add up to 0, math.md (16a), and rounded to the type of q if they are wanted in it. One
// warp does a row. It holds its sums in registers, or reads them twice if there are too many. Rows of sums may lie
// further apart than Lk.
#pragma once

#include "common/ptx.h"
#include "params.h"

namespace ds4s {

// A row's sum as a share of its elements' size; 0 where an element is NaN or infinite, or all are 0.
CUTLASS_DEVICE float excess_share(float sum, float size) {
  const float share = sum / size;
  return fabsf(share) <= 1.f ? share : 0.f;
}

template <typename scalar_t>
class Dbias2Rows {
 public:
  // add_up: rows add up to 0 already.
  CUTLASS_DEVICE Dbias2Rows(const BwdParams& p, int64_t stride, bool add_up = false)
      : p_(p), stride_(stride), add_up_(add_up), lane_(int(threadIdx.x) % 32) {}

  // row: of [B, H, Lq].
  CUTLASS_DEVICE void finish(int64_t row) const {
    if (p_.dbias2 == nullptr) return;  // not wanted, or an earlier kernel has written rounded_dbias2
    p_.Lk % 2 == 0 && is_aligned() ? finish_by<2>(row) : finish_by<1>(row);
  }

 private:
  CUTLASS_DEVICE bool is_aligned() const {
    return reinterpret_cast<uintptr_t>(p_.dbias2) % 8 == 0 && reinterpret_cast<uintptr_t>(p_.rounded_dbias2) % 4 == 0;
  }
  static constexpr int kAtOnce = 12;  // loads under way

  template <typename T, int kWidth>
  struct alignas(sizeof(T) * kWidth) Vector {
    T x[kWidth];
  };

  // A lane's loads have kWidth neighbours.
  template <int kWidth>
  CUTLASS_DEVICE void finish_by(int64_t row) const {
    using Sums = Vector<float, kWidth>;
    using Rounded = Vector<scalar_t, kWidth>;
    auto* const sums = reinterpret_cast<Sums*>(p_.dbias2 + row * stride_);
    auto* const rounded = p_.rounded_dbias2
                              ? reinterpret_cast<Rounded*>(static_cast<scalar_t*>(p_.rounded_dbias2) + row * p_.Lk)
                              : nullptr;
    const int64_t count = p_.Lk / kWidth;
    // One row n: kernels store dbias2, and another pass over it would take a fifth of their time.
    const bool corrects = !add_up_ && p_.N > 1 && p_.partial_keys == 0;
    if (!corrects && rounded == nullptr) return;

    Sums held[kAtOnce];
    float sum = 0.f, size = 0.f;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int64_t begin = lane_; corrects && begin < count; begin += 32 * kAtOnce) {
      read(held, sums, begin, count);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kAtOnce * kWidth; ++i) sum += held[i / kWidth].x[i % kWidth];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kAtOnce * kWidth; ++i) size += fabsf(held[i / kWidth].x[i % kWidth]);
    }
    const float excess = corrects ? share(sum, size) : 0.f;
    if (rounded == nullptr && excess == 0.f) return;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int64_t begin = lane_; begin < count; begin += 32 * kAtOnce) {
      if (!corrects || count > 32 * kAtOnce) read(held, sums, begin, count);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        Rounded small;
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < kWidth; ++j) {
          float& x = held[i].x[j];
          if (excess != 0.f) x = fmaf(-excess, fabsf(x), x);  // 0 times infinity is NaN
          small.x[j] = scalar_t(x);
        }
        const int64_t at = begin + 32 * i;
        if (at >= count) continue;
        if (rounded) {
          rounded[at] = small;
        } else {
          sums[at] = held[i];
        }
      }
    }
  }

  // This lane's part of kAtOnce * 32 loads, which begin with `begin`; 0 past the row's end.
  template <typename Sums>
  CUTLASS_DEVICE static void read(Sums (&held)[kAtOnce], const Sums* sums, int64_t begin, int64_t count) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kAtOnce; ++i) held[i] = begin + 32 * i < count ? load(sums + begin + 32 * i) : Sums{};
  }
  CUTLASS_DEVICE static Vector<float, 1> load(const Vector<float, 1>* sums) {
    return {{ptx::load_written(reinterpret_cast<const float*>(sums))}};
  }
  CUTLASS_DEVICE static Vector<float, 2> load(const Vector<float, 2>* sums) {
    const int2 of = ptx::load_written(reinterpret_cast<const int2*>(sums));
    return {{__int_as_float(of.x), __int_as_float(of.y)}};
  }

  CUTLASS_DEVICE static float share(float sum, float size) {
    CUTLASS_PRAGMA_UNROLL
    for (int mask = 16; mask > 0; mask /= 2) sum += ptx::shfl_xor(sum, mask), size += ptx::shfl_xor(size, mask);
    return excess_share(sum, size);
  }

  const BwdParams& p_;
  const int64_t stride_;
  const bool add_up_;
  const int lane_;
};

}  // namespace ds4s
