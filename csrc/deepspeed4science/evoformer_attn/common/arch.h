// Which instructions a template family may use, and how many warps should be resident on a multiprocessor.
#pragma once

#include <cutlass/arch/arch.h>
#include <cutlass/bfloat16.h>
#include <cutlass/half.h>
#include <cutlass/numeric_types.h>

// The release of CUDA whose compiler this is: 12010 is 12.1. A test pretends that it is an older one.
#ifndef DS4S_CUDA_VERSION
#define DS4S_CUDA_VERSION (__CUDACC_VER_MAJOR__ * 1000 + __CUDACC_VER_MINOR__ * 10)
#endif
// Whether it knows additions of four floats and stores into another block's shared memory (PTX ISA 8.1).
#define DS4S_KNOWS_VECTOR_ATOMICS (DS4S_CUDA_VERSION >= 12010)

namespace ds4s {

template <typename ArchTag>
struct ArchTraits {
  static constexpr int kCapability = ArchTag::kMinComputeCapability;
  static constexpr bool kHasCpAsync = kCapability >= 80;  // global -> shared without registers
};

// Shared memory of a multiprocessor in KiB, the least among the GPUs that this unit is compiled for. The host must know
// it too: it sizes the launch.
CUTLASS_HOST_DEVICE constexpr int shared_kib_of_multiprocessor() {
  int least = 64;  // also of a runtime compiler, which sees no host side
#ifdef __CUDA_ARCH_LIST__
  constexpr int kArchs[] = {__CUDA_ARCH_LIST__};
  least = 228;
  for (int arch : kArchs) {
    int kib = 64;  // 7.5
    if (arch == 700) kib = 96;
    if (arch == 800 || arch == 870) kib = 164;
    if (arch == 860 || arch == 890 || arch >= 1100) kib = 100;  // 12.0; of 11.0 not known
    if (arch >= 900 && arch < 1100) kib = 228;
    least = kib < least ? kib : least;
  }
#endif
  return least;
}

// Whether this unit has PTX, which later GPUs run, too: these may have less shared memory (12.0 than 9.0). The builder
// defines the macro (op_builder/toolchain/arch.py).
CUTLASS_HOST_DEVICE constexpr bool has_ptx() {
#ifdef DS4S_HAS_PTX
  return true;
#else
  return false;
#endif
}

// Whether every GPU that this unit is compiled for adds four floats to global memory at a time: from 9.0 up, with a
// compiler that knows it.
CUTLASS_HOST_DEVICE constexpr bool has_vector_atomics() {
#if defined(__CUDA_ARCH_LIST__) && DS4S_KNOWS_VECTOR_ATOMICS
  constexpr int kArchs[] = {__CUDA_ARCH_LIST__};
  for (int arch : kArchs) {
    if (arch < 900) return false;
  }
  return true;
#else
  return false;  // a runtime compiler, which sees no host side
#endif
}

// Whether every GPU that this unit is compiled for has programmatic dependent launch: a kernel may start beside the
// last blocks of the previous one. From 9.0 up; not used with compilers that are older than 12.1.
CUTLASS_HOST_DEVICE constexpr bool has_dependent_launch() { return has_vector_atomics(); }

}  // namespace ds4s

// Warps that should be resident on one multiprocessor: the register file (65,536 registers) divided by the registers
// that a warp with a 32 x 32 score tile needs. 16 warps leave 128 registers a thread, 12 leave 168.
template <typename scalar_t, typename ArchTag>
constexpr int getWarpsPerSm() {
  return sizeof(scalar_t) == 2 && ds4s::ArchTraits<ArchTag>::kCapability >= 75 ? 12 : 8;
}
