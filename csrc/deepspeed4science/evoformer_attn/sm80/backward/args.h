// Two terms of the exponent, math.md (8): bias1 of the keys and lse of the queries of a (b, n, h).
#pragma once

#include "common/backward_args.h"
#include "sm80/mma/mma.h"

namespace ds4s {

// bias1 - shift of one (b, n). `load` only starts the load; `value` waits for it.
template <typename scalar_t>
struct Bias1Row {
  const scalar_t* ptr = nullptr;  // null without bias1
  float shift = 0.f;

  CUTLASS_DEVICE Bias1Row(const BackwardInputs& args, int64_t b, int64_t n) {
    if (!args.bias1) return;
    ptr = static_cast<const scalar_t*>(args.bias1) + b * args.bias1_stride[0] + n * args.bias1_stride[1];
    shift = args.mask.shift_of(b * args.p.N + n);
  }
  CUTLASS_DEVICE uint32_t load(int k) const { return ptr ? ptx::load_bits(ptr + k) : 0; }
  CUTLASS_DEVICE static float value(uint32_t bits, float shift) { return ptx::bits_to_float<scalar_t>(bits) - shift; }
  CUTLASS_DEVICE float value(uint32_t bits) const { return value(bits, shift); }
  CUTLASS_DEVICE float at(int k) const { return value(load(k)); }
};

// The initial values of the exponents of one (b, n, h): -lse, or in full precision -max and 1 / sum.
template <typename QueryValue>
struct NegativeLse {
  static constexpr bool kExact = sizeof(QueryValue) == sizeof(float2);
  const QueryValue* ptr;

  CUTLASS_DEVICE NegativeLse(const BackwardInputs& args, int64_t b, int64_t n, int64_t h) {
    int64_t offset = ((b * args.p.N + n) * args.p.H + h) * args.p.Lq;
    if constexpr (kExact) {
      ptr = args.softmax + offset;
    } else {
      ptr = args.p.lse + offset;
    }
  }
  CUTLASS_DEVICE QueryValue load(int q) const { return ptr[q]; }
  // -inf, not inf, for a query with no visible key: its P is 0.
  CUTLASS_DEVICE static QueryValue value(QueryValue x) {
    if constexpr (!kExact) x = x < -kLargestLse ? -infinity() : -x;
    return x;
  }
};

}  // namespace ds4s
