// The instructions wgmma.mma_async (PTX ISA 9.7.15) that kernels use, by type and N: WgmmaAtom<scalar_t, N>. CuTe has
// them, too, in 77,000 lines, which take a second of a unit's compilation.
#pragma once

#include <cutlass/numeric_types.h>

namespace ds4s::sm90 {

// How an operand in shared memory lies: along the 16 columns that are summed over (K), or across them.
enum class Major { K = 0, MN = 1 };
enum class ScaleOut { Zero = 0, One = 1 };

template <typename scalar_t, int kN>
struct WgmmaAtom {
  static_assert(kN == 0, "no product of this N in wgmma_atoms.h: it needs a line DS4S_WGMMA");
};

// 4, 8 or more accumulators, from d[I] on, and their names in the instruction.
#define DS4S_D4(I) "+f"(d[I]), "+f"(d[I + 1]), "+f"(d[I + 2]), "+f"(d[I + 3])
#define DS4S_D8(I) DS4S_D4(I), DS4S_D4(I + 4)
#define DS4S_D16(I) DS4S_D8(I), DS4S_D8(I + 8)
#define DS4S_D32(I) DS4S_D16(I), DS4S_D16(I + 16)
#define DS4S_NAMES8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define DS4S_NAMES16 DS4S_NAMES8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define DS4S_NAMES24 DS4S_NAMES16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define DS4S_NAMES28 DS4S_NAMES24 ", %24, %25, %26, %27"
#define DS4S_NAMES32 DS4S_NAMES28 ", %28, %29, %30, %31"
#define DS4S_NAMES48 DS4S_NAMES32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define DS4S_NAMES64 DS4S_NAMES48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// A to G: the numbers of the operands after the accumulators. These are a, b, scale and both majors, or the four
// registers of a, b, scale and the major of b.
#define DS4S_WGMMA_OF(SCALAR, TYPE, N, NAMES, A, B, C, D, E, F, G, ...)                                           \
  template <>                                                                                                     \
  struct WgmmaAtom<SCALAR, N> {                                                                                   \
    template <Major kMajorA, Major kMajorB>                                                                       \
    CUTLASS_DEVICE static void multiply(float* d, uint64_t a, uint64_t b, ScaleOut scale) {                       \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #C                                                        \
                   ", 0;\n"                                                                                       \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" NAMES "}, %" #A ", %" #B  \
                   ", p, 1, 1, %" #D ", %" #E ";\n}"                                                              \
                   : __VA_ARGS__                                                                                  \
                   : "l"(a), "l"(b), "r"(int(scale)), "n"(int(kMajorA)), "n"(int(kMajorB)));                      \
    }                                                                                                             \
    template <Major kMajorB>                                                                                      \
    CUTLASS_DEVICE static void multiply(float* d, const uint32_t* a, uint64_t b, ScaleOut scale) {                \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #F                                                        \
                   ", 0;\n"                                                                                       \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" NAMES "}, {%" #A ", %" #B \
                   ", %" #C ", %" #D "}, %" #E ", p, 1, 1, %" #G ";\n}"                                           \
                   : __VA_ARGS__                                                                                  \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(scale)), "n"(int(kMajorB)));     \
    }                                                                                                             \
  };
#define DS4S_WGMMA(...)                                   \
  DS4S_WGMMA_OF(cutlass::bfloat16_t, "bf16", __VA_ARGS__) \
  DS4S_WGMMA_OF(cutlass::half_t, "f16", __VA_ARGS__)
DS4S_WGMMA(16, DS4S_NAMES8, 8, 9, 10, 11, 12, 13, 14, DS4S_D8(0))
DS4S_WGMMA(32, DS4S_NAMES16, 16, 17, 18, 19, 20, 21, 22, DS4S_D16(0))
DS4S_WGMMA(48, DS4S_NAMES24, 24, 25, 26, 27, 28, 29, 30, DS4S_D16(0), DS4S_D8(16))
DS4S_WGMMA(56, DS4S_NAMES28, 28, 29, 30, 31, 32, 33, 34, DS4S_D16(0), DS4S_D8(16), DS4S_D4(24))
DS4S_WGMMA(64, DS4S_NAMES32, 32, 33, 34, 35, 36, 37, 38, DS4S_D32(0))
DS4S_WGMMA(96, DS4S_NAMES48, 48, 49, 50, 51, 52, 53, 54, DS4S_D32(0), DS4S_D16(32))
DS4S_WGMMA(128, DS4S_NAMES64, 64, 65, 66, 67, 68, 69, 70, DS4S_D32(0), DS4S_D32(32))
#undef DS4S_WGMMA
#undef DS4S_WGMMA_OF
#undef DS4S_NAMES64
#undef DS4S_NAMES48
#undef DS4S_NAMES32
#undef DS4S_NAMES28
#undef DS4S_NAMES24
#undef DS4S_NAMES16
#undef DS4S_NAMES8
#undef DS4S_D32
#undef DS4S_D16
#undef DS4S_D8
#undef DS4S_D4

}  // namespace ds4s::sm90
