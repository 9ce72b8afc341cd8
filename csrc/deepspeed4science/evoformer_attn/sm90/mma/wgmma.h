// The tensor cores' asynchronous products, d[64 x N] += a[64 x 16] b[16 x N], a in registers or shared memory, b in
// shared memory (wgmma, PTX ISA 9.7.15).
#pragma once

#include "sm90/mma/wgmma_atoms.h"

namespace ds4s::sm90 {

// d = a b (ScaleOut::Zero) or d += a b, with a by its descriptor or in registers. Neither d nor a may be read or
// written before wgmma_wait.
//   a: value 2 i + e of the 16 columns: row lane / 4 + 8 (i & 1), column 8 (i >> 1) + 2 (lane & 3) + e, packed in a[i]
//   d: value 4 c + 2 i + e: the same row, column 8 c + 2 (lane & 3) + e
template <typename scalar_t, int kN, Major kMajorB, Major kMajorA = Major::K>
CUTLASS_DEVICE void wgmma(float (&d)[kN / 2], uint64_t a, uint64_t b, ScaleOut scale = ScaleOut::One) {
  WgmmaAtom<scalar_t, kN>::template multiply<kMajorA, kMajorB>(d, a, b, scale);
}
template <typename scalar_t, int kN, Major kMajorB>
CUTLASS_DEVICE void wgmma(float (&d)[kN / 2], const uint32_t* a, uint64_t b, ScaleOut scale = ScaleOut::One) {
  WgmmaAtom<scalar_t, kN>::template multiply<kMajorB>(d, a, b, scale);
}

// In which of the thread's two rows (lane / 4, and 8 more) value `index` of an accumulator lies.
CUTLASS_HOST_DEVICE constexpr int row_of(int index) { return index >> 1 & 1; }

// While a product runs, it changes registers without the compiler's knowledge; this marks the end of that.
template <int kCount>
CUTLASS_DEVICE void fence_registers(float (&d)[kCount]) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

CUTLASS_DEVICE void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
CUTLASS_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
CUTLASS_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

}  // namespace ds4s::sm90
