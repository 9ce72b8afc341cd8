// The engine that multiplies for each type on each ISA, and the ISAs that this translation unit is compiled for. Their
// compiler flags: op_builder/toolchain/cpu_isa.py.
#pragma once

// gcc's names; clang 14 and 15 have their own.
#if (defined(__AMX_TILE__) && defined(__AMX_BF16__)) || (defined(__AMXTILE__) && defined(__AMXBF16__))
#define DS4S_AMX 1
#endif

#include "gemm_fma.h"
#include "isa_portable.h"
#include "scalar.h"
#include "tile_sizes.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "isa_avx2.h"
#endif
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include "isa_avx512.h"
#if defined(__AVX512BF16__)
#include "gemm_pair.h"
#if defined(DS4S_AMX)
#include "isa_amx.h"
#endif
#endif
#endif

namespace ds4s::cpu {

template <typename scalar_t, typename Isa, int kKeys>
struct EngineFor {
  using type = FmaEngine<Isa, kKeys>;
};

#if defined(__AVX512BF16__)
template <int kKeys>
struct EngineFor<bfloat16_t, Avx512, kKeys> {
  using type = PairEngine<DotMultiplier, kPairQueries<kKeys>, kKeys>;
};
#if defined(DS4S_AMX)
template <int kKeys>
struct EngineFor<bfloat16_t, Amx, kKeys> {
  using type = PairEngine<AmxMultiplier, kPairQueries<kKeys>, kKeys>;
};
#endif
#endif

// 16-bit inputs do not need the last digits of exp.
template <typename scalar_t>
constexpr bool kPreciseExp = sizeof(scalar_t) == 4;

}  // namespace ds4s::cpu
