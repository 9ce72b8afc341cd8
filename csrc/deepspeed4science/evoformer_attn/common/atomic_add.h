// Atomic additions to an array that several blocks add to: without a workspace, in any order.
#pragma once

#include <cutlass/bfloat16.h>
#include <cutlass/half.h>

#include "arch.h"

namespace ds4s {

// Adds four neighbours; dst is aligned to 16 bytes. red.global.add.v4.f32 (PTX ISA 9.0, 9.7.13.7) from 9.0 up makes 1.4
// times as many additions a second as single ones.
CUTLASS_DEVICE void atomic_add_vector(float* dst, const float* x) {
#if !defined(__CUDA_ARCH__)
  for (int e = 0; e < 4; ++e) atomicAdd(dst + e, x[e]);
#elif __CUDA_ARCH__ >= 900 && DS4S_KNOWS_VECTOR_ATOMICS
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(dst), "f"(x[0]), "f"(x[1]), "f"(x[2]),
               "f"(x[3])
               : "memory");
#else
  CUTLASS_PRAGMA_UNROLL
  for (int e = 0; e < 4; ++e) asm volatile("red.global.add.f32 [%0], %1;" ::"l"(dst + e), "f"(x[e]) : "memory");
#endif
}

// Adds eight neighbours in float16, which are given in pairs; dst is aligned to 16 bytes. From 9.0 up (PTX ISA 8.1).
CUTLASS_DEVICE void atomic_add_halves(void* dst, const uint32_t (&x)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && DS4S_KNOWS_VECTOR_ATOMICS
  asm volatile("red.relaxed.gpu.global.add.noftz.v4.f16x2 [%0], {%1, %2, %3, %4};" ::"l"(dst), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
#endif
}

// dst[0 .. kCount) += x.
template <int kCount>
CUTLASS_DEVICE void atomic_add(float* dst, const float* x) {
  if constexpr (kCount % 4 == 0) {
    if ((reinterpret_cast<unsigned long long>(dst) & 15) == 0) {
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < kCount; e += 4) atomic_add_vector(dst + e, x + e);
      return;
    }
  }
  CUTLASS_PRAGMA_UNROLL
  for (int e = 0; e < kCount; ++e) atomicAdd(dst + e, x[e]);
}

// *dst += x. Returns what rounding takes from the sum, exactly (Knuth, The Art of Computer Programming, vol. 2, 4.2.2,
// theorem B); 0 where the sum is infinite or NaN.
CUTLASS_DEVICE float atomic_add_and_keep_rest(float* dst, float x) {
  const float before = atomicAdd(dst, x), sum = before + x, added = sum - before;
  const float rest = (before - (sum - added)) + (x - added);
  return rest == rest ? rest : 0.f;
}

// 16-bit elements, in pairs where dst is aligned to 4 bytes. bfloat16 needs 8.0.
template <int kCount, typename Pair, typename Native>
CUTLASS_DEVICE void atomic_add_16(Native* dst, const Native* x) {
  if (kCount % 2 == 0 && (reinterpret_cast<unsigned long long>(dst) & 3) == 0) {
    CUTLASS_PRAGMA_UNROLL
    for (int e = 0; e + 1 < kCount; e += 2) atomicAdd(reinterpret_cast<Pair*>(dst + e), Pair{x[e], x[e + 1]});
  } else {
    CUTLASS_PRAGMA_UNROLL
    for (int e = 0; e < kCount; ++e) atomicAdd(dst + e, x[e]);
  }
}
template <int kCount>
CUTLASS_DEVICE void atomic_add(cutlass::half_t* dst, const cutlass::half_t* x) {
  atomic_add_16<kCount, __half2>(reinterpret_cast<__half*>(dst), reinterpret_cast<const __half*>(x));
}
template <int kCount>
CUTLASS_DEVICE void atomic_add(cutlass::bfloat16_t* dst, const cutlass::bfloat16_t* x) {
  atomic_add_16<kCount, __nv_bfloat162>(reinterpret_cast<__nv_bfloat16*>(dst),
                                        reinterpret_cast<const __nv_bfloat16*>(x));
}

// Adds the first `valid` of kCount elements.
template <int kCount, typename Element>
CUTLASS_DEVICE void atomic_add_access(Element* dst, const Element* x, int valid) {
  if (valid >= kCount) {
    atomic_add<kCount>(dst, x);
  } else {
    CUTLASS_PRAGMA_UNROLL
    for (int e = 0; e < kCount; ++e) {
      if (e < valid) atomic_add<1>(dst + e, x + e);
    }
  }
}

}  // namespace ds4s
