// The arguments of the older families' backward kernels, and of Sm90's preprocess: the caller's parameters, and the
// statistics and copies that common/preprocess.h makes of them.
#pragma once

#include "common/key_mask.h"
#include "common/ptx.h"
#include "params.h"

namespace ds4s {

// A bias matrix whose rows are aligned to 16 bytes and have stride 1: the caller's own, or a copy of it.
struct BiasMatrix {
  const void* ptr;   // [B, H, rows, pitch]
  int64_t stride_b;  // elements
  int64_t stride_h;
  int64_t stride_row;  // at least the number of columns, rounded up to 16 bytes
};

struct BackwardInputs {
  BwdParams p;
  BiasMatrix bias2;            // rows are queries
  BiasMatrix bias2_t;          // rows are keys
  const void* bias1;           // [B, N, Lk], stride 1 along Lk: the caller's own, or a copy of it
  int64_t bias1_stride[2];     // B, N
  KeyMask mask;                // the keys that bias1 and row_mask hide, and the shift of bias1, math.md (1a), (6a)
  const float2* softmax;       // full precision: [B, N, H, Lq], replaces lse (sm80/backward/statistics.h)
  const void* negative_delta;  // [B, N, H, Lq] QueryValue; null for the fused kernel, which keeps it in dq (DeltaInDq)
  float* dbias1_parts;         // [B, N, H, Lk], or null: add into p.dbias1 atomically
  float* dbias2_parts;         // [dbias2_slices, B, H, Lq, Lk], or null: store (one slice) or add atomically
  int32_t dbias2_slices;       // number of parts into which the rows n are cut
};

// A kernel's matrices are [B, N, L, H, D]: element (b, n, l, h, 0).
template <typename T>
CUTLASS_DEVICE T* element(const void* ptr, const int64_t (&stride)[4], int64_t b, int64_t n, int64_t l, int64_t h) {
  return const_cast<T*>(static_cast<const T*>(ptr)) + b * stride[0] + n * stride[1] + l * stride[2] + h * stride[3];
}

// -delta, math.md (9), of one (b, n, h) for the fused kernel, until dq is written: of eight queries at the beginning of
// every eighth row of dq, or where a row has only 16 bytes, of four at the beginning of every fourth. With one in each
// row, and so in each sector of memory, the fused kernel would take 1.04 times as long at (1,384,384,4,32).
template <typename scalar_t>
struct DeltaInDq {
  float* ptr;
  int stride;  // of queries
  int last;    // number of queries together, minus one
  CUTLASS_DEVICE DeltaInDq(const BwdParams& p, int64_t b, int64_t n, int64_t h)
      : DeltaInDq(element<scalar_t>(p.dq, p.dq_stride, b, n, 0, h), p.dq_stride[2], p.D) {}
  // first: dq of the first query; row_stride: of queries, in elements.
  CUTLASS_DEVICE DeltaInDq(scalar_t* first, int64_t row_stride, int64_t D)
      : ptr(reinterpret_cast<float*>(first)),
        stride(int(row_stride * int64_t(sizeof(scalar_t)) / 4)),
        last(D * int64_t(sizeof(scalar_t)) >= 32 ? 7 : 3) {}
  CUTLASS_DEVICE float* at(int64_t query) const { return ptr + (query & ~int64_t(last)) * stride + (query & last); }
};

// An lse below -kLargestLse has no digits after the point, so P = exp(s - lse), math.md (8), has no meaning. bias2 is
// then a large negative number on all keys of that query (a large bias1 is shifted away). Such a query counts as one
// without a visible key.
constexpr float kLargestLse = 4194304.f;

}  // namespace ds4s
