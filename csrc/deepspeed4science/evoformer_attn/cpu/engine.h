// Which engine multiplies for a type on an ISA, and which ISAs this translation unit was compiled for.
#pragma once

#include "gemm_fma.h"
#include "isa_portable.h"
#include "scalar.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "isa_avx2.h"
#endif
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include "isa_avx512.h"
#if defined(__AVX512BF16__)
#include "gemm_pair.h"
#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
#include "isa_amx.h"
#endif
#endif
#endif

namespace ds4s::cpu {

template <typename scalar_t, typename Isa>
struct EngineFor {
  using type = FmaEngine<Isa>;
};

#if defined(__AVX512BF16__)
template <>
struct EngineFor<bfloat16_t, Avx512> {
  using type = PairEngine<DotMultiplier>;
};
#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
template <>
struct EngineFor<bfloat16_t, Amx> {
  using type = PairEngine<AmxMultiplier>;
};
#endif
#endif

// Sixteen-bit inputs do not need the last digits of exp.
template <typename scalar_t>
constexpr bool kPreciseExp = sizeof(scalar_t) == 4;

}  // namespace ds4s::cpu
