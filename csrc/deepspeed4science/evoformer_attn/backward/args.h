// What the kernels of the backward share: the caller's parameters and what backward/prepare.h made of them.
#pragma once

#include "core/mma.h"
#include "params.h"

namespace ds4s {

// A bias matrix whose rows begin at 16 bytes and have stride 1: the caller's own, or a copy of it.
struct BiasMatrix {
  const void* ptr;     // [B, H, rows, pitch]
  int64_t stride_b;    // elements
  int64_t stride_h;
  int64_t stride_row;  // at least the number of columns, rounded up to 16 bytes
};

struct BackwardArgs {
  BwdParams p;
  BiasMatrix bias2;            // rows are queries
  BiasMatrix bias2_t;          // rows are keys
  const float* bias1;          // [B, N, Lk], less shift; null without bias1
  const float* shift;          // [B, N], what bias1 lost; null without bias1
  const void* negative_lse;    // [B, N, H, Lq] QueryValue, of the shifted scores; -inf for a row with no visible key
  const void* negative_delta;  // [B, N, H, Lq] QueryValue
  float* dbias1_parts;         // [B, N, H, Lk], or null: add into p.dbias1 atomically
  float* dbias2_parts;         // [dbias2_slices, B, H, Lq, Lk], or null: store (one slice) or add atomically
  int32_t dbias2_slices;       // into how many parts the rows n are cut
};

// The same in every lane, and the compiler knows it: such values live in uniform registers.
CUTLASS_DEVICE uint32_t uniform(uint32_t x) { return __shfl_sync(0xffffffffu, x, 0); }

// A kernel's matrices are [B, N, L, H, D]: element (b, n, l, h, 0).
template <typename T>
CUTLASS_DEVICE T* element(const void* ptr, const int64_t (&stride)[4], int64_t b, int64_t n, int64_t l, int64_t h) {
  return const_cast<T*>(static_cast<const T*>(ptr)) + b * stride[0] + n * stride[1] + l * stride[2] + h * stride[3];
}

}  // namespace ds4s
