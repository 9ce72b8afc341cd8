"""Sources that a compiler must compile before it counts as supporting an instruction set."""

from __future__ import annotations

_AVX2 = """\
extern "C" void probe_avx2(const float* in, float* out) {
  __m256 x = _mm256_loadu_ps(in);
  x = _mm256_fmadd_ps(x, x, x);
  const __m128i half = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
  const __m256i wide = _mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16);
  _mm256_storeu_ps(out, _mm256_add_ps(_mm256_castsi256_ps(wide), _mm256_cvtph_ps(half)));
}
"""

# At least one intrinsic of each of F, BW, VL and DQ.
_AVX512 = """\
extern "C" void probe_avx512(const float* in, float* out, unsigned short* halves, unsigned n) {
  const __mmask16 mask = static_cast<__mmask16>((1u << (n & 15)) - 1);
  __m512 x = _mm512_maskz_loadu_ps(mask, in);
  x = _mm512_fmadd_ps(x, x, _mm512_and_ps(x, x));
  const __m256i half = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
  _mm256_mask_storeu_epi16(halves, mask, half);
  const __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
  _mm512_mask_storeu_ps(out, mask, _mm512_scalef_ps(x, _mm512_castsi512_ps(wide)));
}
"""

_AVX512_BF16 = """\
extern "C" void probe_avx512_bf16(const float* in, float* out) {
  const __m512 x = _mm512_loadu_ps(in);
  const __m512bh pair = _mm512_cvtne2ps_pbh(x, x);
  _mm512_storeu_ps(out, _mm512_dpbf16_ps(x, pair, pair));
}
"""

_AMX = """\
extern "C" void probe_amx(const void* config, const void* a, const void* b, void* c) {
  _tile_loadconfig(config);
  _tile_zero(0);
  _tile_loadd(1, a, 64);
  _tile_loadd(2, b, 64);
  _tile_dpbf16ps(0, 1, 2);
  _tile_stored(0, c, 64);
  _tile_release();
}
"""

_HEADER = "#include <immintrin.h>\n"

PROBES: dict[str, str] = {
    "amx": _HEADER + _AVX512 + _AVX512_BF16 + _AMX,
    "avx512bf16": _HEADER + _AVX512 + _AVX512_BF16,
    "avx512": _HEADER + _AVX512,
    "avx2": _HEADER + _AVX2,
}
