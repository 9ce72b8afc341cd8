// The tensor cores' asynchronous products, d[64 x N] += a[64 x 16] b[16 x N], a in registers or shared memory, b in
// shared memory (wgmma, PTX ISA 9.7.15): CuTe's atoms by type and N.
#pragma once

#include <cutlass/numeric_types.h>

#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/arch/mma_sm90_gmma_ext.hpp>

namespace ds4s::sm90 {

using cute::SM90::GMMA::Major;
using cute::SM90::GMMA::ScaleOut;

template <typename scalar_t, int kN, Major kMajorB, Major kMajorA = Major::K>
struct WgmmaAtom;

#define DS4S_WGMMA_ATOM(N)                                                                 \
  template <Major kMajorB, Major kMajorA>                                                  \
  struct WgmmaAtom<cutlass::bfloat16_t, N, kMajorB, kMajorA> {                             \
    using Shared = cute::SM90::GMMA::MMA_64x##N##x16_F32BF16BF16_SS<kMajorA, kMajorB>;     \
    using Registers = cute::SM90::GMMA::MMA_64x##N##x16_F32BF16BF16_RS<Major::K, kMajorB>; \
  };                                                                                       \
  template <Major kMajorB, Major kMajorA>                                                  \
  struct WgmmaAtom<cutlass::half_t, N, kMajorB, kMajorA> {                                 \
    using Shared = cute::SM90::GMMA::MMA_64x##N##x16_F32F16F16_SS<kMajorA, kMajorB>;       \
    using Registers = cute::SM90::GMMA::MMA_64x##N##x16_F32F16F16_RS<Major::K, kMajorB>;   \
  };
DS4S_WGMMA_ATOM(16)
DS4S_WGMMA_ATOM(32)
DS4S_WGMMA_ATOM(48)
DS4S_WGMMA_ATOM(56)
DS4S_WGMMA_ATOM(64)
DS4S_WGMMA_ATOM(96)
DS4S_WGMMA_ATOM(128)
#undef DS4S_WGMMA_ATOM

template <typename Atom, size_t... I>
CUTLASS_DEVICE void wgmma_expanded(float* d, uint64_t a, uint64_t b, ScaleOut scale, std::index_sequence<I...>) {
  Atom::fma(a, b, d[I]..., scale);
}
template <typename Atom, size_t... I>
CUTLASS_DEVICE void wgmma_expanded(float* d, const uint32_t* a, uint64_t b, ScaleOut scale, std::index_sequence<I...>) {
  Atom::fma(a[0], a[1], a[2], a[3], b, d[I]..., scale);
}

// d = a b (ScaleOut::Zero) or d += a b, with a by its descriptor or in registers. Neither d nor a may be read or
// written before wgmma_wait.
//   a: value 2 i + e of the 16 columns: row lane / 4 + 8 (i & 1), column 8 (i >> 1) + 2 (lane & 3) + e, packed in a[i]
//   d: value 4 c + 2 i + e: the same row, column 8 c + 2 (lane & 3) + e
template <typename scalar_t, int kN, Major kMajorB, Major kMajorA = Major::K>
CUTLASS_DEVICE void wgmma(float (&d)[kN / 2], uint64_t a, uint64_t b, ScaleOut scale = ScaleOut::One) {
  using Atom = typename WgmmaAtom<scalar_t, kN, kMajorB, kMajorA>::Shared;
  wgmma_expanded<Atom>(d, a, b, scale, std::make_index_sequence<kN / 2>());
}
template <typename scalar_t, int kN, Major kMajorB>
CUTLASS_DEVICE void wgmma(float (&d)[kN / 2], const uint32_t* a, uint64_t b, ScaleOut scale = ScaleOut::One) {
  using Atom = typename WgmmaAtom<scalar_t, kN, kMajorB>::Registers;
  wgmma_expanded<Atom>(d, a, b, scale, std::make_index_sequence<kN / 2>());
}

// In which of the thread's two rows (lane / 4, and 8 more) value `index` of an accumulator lies.
CUTLASS_HOST_DEVICE constexpr int row_of(int index) { return index >> 1 & 1; }

// While a product runs, it changes registers without the compiler's knowledge; this marks the end of that.
template <int kCount>
CUTLASS_DEVICE void fence_registers(float (&d)[kCount]) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kCount; ++i) cute::warpgroup_fence_operand(d[i]);
}

CUTLASS_DEVICE void wgmma_begin() { cute::warpgroup_arrive(); }
CUTLASS_DEVICE void wgmma_commit() { cute::warpgroup_commit_batch(); }
template <int kPending>
CUTLASS_DEVICE void wgmma_wait() {
  cute::warpgroup_wait<kPending>();
}

}  // namespace ds4s::sm90
