// Single machine instructions: CuTe's atoms where CuTe has one, inline PTX (section numbers of PTX ISA 9.0) elsewhere.
// Every asynchronous or warp-wide instruction of the Sm70 to Sm80 kernels is here and nowhere else.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm80.hpp>
#include <cute/arch/mma_sm70.hpp>
#include <cute/arch/mma_sm75.hpp>
#include <cute/arch/mma_sm80.hpp>

#include "arch.h"

namespace ds4s {

CUTLASS_DEVICE float infinity() { return __uint_as_float(0x7f800000u); }
constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// Makes a value that is equal in all lanes known as such to the compiler, which keeps it in a uniform register.
CUTLASS_DEVICE uint32_t uniform(uint32_t x) { return __shfl_sync(0xffffffffu, x, 0); }
CUTLASS_DEVICE int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }
CUTLASS_DEVICE float uniform(float x) { return __uint_as_float(uniform(__float_as_uint(x))); }

}  // namespace ds4s

namespace ds4s::ptx {

// 2^x, flushing subnormals: ex2.approx.ftz (9.7.3.21), two units in the last place; -inf gives 0.
CUTLASS_DEVICE float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2(x): lg2.approx.ftz (9.7.3.20); 0 gives -inf.
CUTLASS_DEVICE float log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, one unit in the last place, flushing subnormals: rcp.approx.ftz (9.7.3.13).
CUTLASS_DEVICE float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Nearest TF32 value, ties away from zero: cvt.rna.tf32 (9.7.9.21). The mma itself would cut the low bits off.
CUTLASS_DEVICE uint32_t to_tf32(float x) {
  uint32_t y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

// Two floats in one register, x in the low half: cvt.rn.{f16x2,bf16x2}.f32 (9.7.9.21) from 8.0 up, two conversions
// before.
template <typename T>
CUTLASS_DEVICE uint32_t pack(float x, float y) {
  uint32_t d;
  if constexpr (cutlass::platform::is_same<T, cutlass::bfloat16_t>::value) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(y), "f"(x));
  } else {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(y), "f"(x));
#else
    asm("{.reg .f16 l, h;\n cvt.rn.f16.f32 l, %1;\n cvt.rn.f16.f32 h, %2;\n mov.b32 %0, {l, h};}"
        : "=r"(d)
        : "f"(x), "f"(y));
#endif
  }
  return d;
}

// The reverse, exact.
template <typename T>
CUTLASS_DEVICE float2 unpack(uint32_t d) {
  if constexpr (cutlass::platform::is_same<T, cutlass::bfloat16_t>::value) {
    return make_float2(__uint_as_float(d << 16), __uint_as_float(d & 0xffff0000u));
  } else {
    float2 f;
    asm("{.reg .f16 l, h;\n mov.b32 {l, h}, %2;\n cvt.f32.f16 %0, l;\n cvt.f32.f16 %1, h;}"
        : "=f"(f.x), "=f"(f.y)
        : "r"(d));
    return f;
  }
}

// Multiplies two 16-bit numbers, or a float, by a power of two or 0: for bfloat16 fma.rn.bf16x2 (9.7.4.4), adding -0.
template <typename T>
CUTLASS_DEVICE uint32_t scale_word(uint32_t x, float factor) {
  if constexpr (cutlass::platform::is_same<T, cutlass::bfloat16_t>::value) {
    uint32_t y;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(x), "r"(pack<T>(factor, factor)), "r"(0x80008000u));
    return y;
  } else if constexpr (sizeof(T) == 2) {
    float2 pair = unpack<T>(x);
    return pack<T>(pair.x * factor, pair.y * factor);
  } else {
    return __float_as_uint(__uint_as_float(x) * factor);
  }
}

// The larger absolute values of two pairs of halves each, with any sign; NaN of NaN: max.NaN.xorsign.abs.f16x2
// (9.7.4.10), from 8.6 up.
CUTLASS_DEVICE uint32_t max_of_sizes(uint32_t x, uint32_t y) {
  uint32_t z;
  asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}

// Two neighbours as floats.
template <typename T>
CUTLASS_DEVICE float2 load_pair(const T* x) {
  return unpack<T>(*reinterpret_cast<const uint32_t*>(x));
}
CUTLASS_DEVICE float2 load_pair(const float* x) { return make_float2(x[0], x[1]); }

// Loads the bits of one element, zero-extended to a whole register: ld.global.nc (9.7.9.8). A 16-bit variable would be
// widened by an instruction right after the load, which waits for it; here the wait is where the value is used.
template <typename T>
CUTLASS_DEVICE uint32_t load_bits(const T* gmem) {
  uint32_t x;
  if constexpr (sizeof(T) == 2) {
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=r"(x) : "l"(gmem));
  } else {
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(x) : "l"(gmem));
  }
  return x;
}
template <typename T>
CUTLASS_DEVICE float bits_to_float(uint32_t x) {
  if constexpr (sizeof(T) == 2) {
    return unpack<T>(x).x;
  } else {
    return __uint_as_float(x);
  }
}

// Loads 16 bytes by ld.global (9.7.9.8), which ptxas does not move past a barrier. It moves ld.global.nc, of __ldg, to
// where the value is used, and the wait for it is there.
CUTLASS_DEVICE uint4 load_16(const void* gmem) {
  uint4 x;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(gmem));
  return x;
}

// Loads 4, 8 or 16 bytes into x if `wanted` (ld.global, 9.7.9.8). ptxas would wait for the load where a branch ends.
CUTLASS_DEVICE void load_if(bool wanted, const void* gmem, uint32_t& x) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p ld.global.b32 %0, [%1];\n}"
               : "+r"(x)
               : "l"(gmem), "r"(int(wanted))
               : "memory");
}
CUTLASS_DEVICE void load_if(bool wanted, const void* gmem, uint32_t (&x)[2]) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p ld.global.v2.b32 {%0, %1}, [%2];\n}"
               : "+r"(x[0]), "+r"(x[1])
               : "l"(gmem), "r"(int(wanted))
               : "memory");
}
CUTLASS_DEVICE void load_if(bool wanted, const void* gmem, uint32_t (&x)[4]) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
               : "+r"(x[0]), "+r"(x[1]), "+r"(x[2]), "+r"(x[3])
               : "l"(gmem), "r"(int(wanted))
               : "memory");
}

// Stores 16 bytes by st.global (9.7.9.11): also where the compiler does not know that the address is global.
CUTLASS_DEVICE void store_16(void* gmem, const uint4& x) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(gmem), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

// Stores 4 or 16 bytes if `wanted` (st.global, 9.7.9.11), without a branch: after one on which lanes disagree, nvcc
// would use no uniform registers in the rest of a loop.
CUTLASS_DEVICE void store_if(bool wanted, float* gmem, float x) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p st.global.f32 [%0], %1;\n}" ::"l"(gmem), "f"(x),
               "r"(int(wanted))
               : "memory");
}
CUTLASS_DEVICE void store_if(bool wanted, float* gmem, const float (&x)[4]) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p st.global.v4.f32 [%0], {%1, %2, %3, %4};\n}" ::"l"(gmem),
               "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(int(wanted))
               : "memory");
}

// Loads directly into the register of x. If x were chosen between a loaded and another value, the compiler would insert
// a move here, which waits for the load.
CUTLASS_DEVICE void load_int(int& x, const int* gmem) {
  asm volatile("ld.global.nc.s32 %0, [%1];" : "+r"(x) : "l"(gmem));
}

// Makes a value opaque, so that it stays in its register and is not computed again in every iteration of a loop.
CUTLASS_DEVICE void keep(uint32_t& x) { asm volatile("" : "+r"(x)); }
CUTLASS_DEVICE void keep(int& x) { asm volatile("" : "+r"(x)); }
CUTLASS_DEVICE void keep(float& x) { asm volatile("" : "+f"(x)); }
CUTLASS_DEVICE void keep(int64_t& x) { asm volatile("" : "+l"(x)); }
template <typename T>
CUTLASS_DEVICE void keep(T*& x) {
  asm volatile("" : "+l"(x));
}

// blockIdx.x, read again at every call: values that depend on it are computed again instead of being kept in registers.
CUTLASS_DEVICE uint32_t block_x() {
  uint32_t x;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
  return x;
}
// threadIdx.x, likewise.
CUTLASS_DEVICE uint32_t thread_x() {
  uint32_t x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

// Between blocks: ld.acquire and st.release (9.7.9.8, 9.7.9.11) at the scope of the GPU, as 7.0's memory model has
// them.
CUTLASS_DEVICE int load_acquire(const int* flag) {
  int x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(flag) : "memory");
  return x;
}
// Waits until a counter has at least that value, which it returns.
CUTLASS_DEVICE int wait_for(const int* counter, int at_least) {
  int x;
  while ((x = load_acquire(counter)) < at_least) __nanosleep(200);
  return x;
}
CUTLASS_DEVICE void store_release(int* flag, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}
// red.release (9.7.13.6): this thread's earlier writes, and those of threads that it has met at a barrier, are visible
// to whoever acquires the sum.
CUTLASS_DEVICE void add_release(int* counter, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}

// Programmatic dependent launch between the kernels of a stream (griddepcontrol, 9.7.13.13; no effect before 9.0). The
// next kernel's blocks may start where resources are free, once all blocks of this one have called this or ended.
CUTLASS_DEVICE void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Waits until the previous kernel has ended and all its writes are visible.
CUTLASS_DEVICE void wait_for_kernel_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Loads values that the previous kernel wrote: ld.global (9.7.9.8). Loads by __ldg might be moved before the wait.
CUTLASS_DEVICE uint32_t load_written(const uint32_t* gmem) {
  uint32_t x;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(x) : "l"(gmem) : "memory");
  return x;
}
CUTLASS_DEVICE float load_written(const float* gmem) {
  return __uint_as_float(load_written(reinterpret_cast<const uint32_t*>(gmem)));
}
CUTLASS_DEVICE int2 load_written(const int2* gmem) {
  int2 x;
  asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(gmem) : "memory");
  return x;
}

// The larger one, NaN where one is NaN: max.NaN.f32 (9.7.3.12), from 8.0 up.
CUTLASS_DEVICE float max_nan(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

// Of two pairs of 16-bit values the larger ones, likewise: max.NaN.{f16x2,bf16x2} (9.7.4.7), from 8.0 up.
template <typename T>
CUTLASS_DEVICE uint32_t max_nan_pairs(uint32_t x, uint32_t y) {
  uint32_t d;
  if constexpr (cutlass::platform::is_same<T, cutlass::bfloat16_t>::value) {
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(x), "r"(y));
  } else {
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(d) : "r"(x), "r"(y));
  }
  return d;
}

// Of two pairs of float16; of a number and NaN, the number: max.f16x2 (9.7.4.7).
CUTLASS_DEVICE uint32_t max_half_pairs(uint32_t x, uint32_t y) {
  uint32_t d;
  asm("max.f16x2 %0, %1, %2;" : "=r"(d) : "r"(x), "r"(y));
  return d;
}

// Between the blocks of a cluster, from 9.0 up. Waits until the other blocks have begun: barrier.cluster (9.7.13.4),
// relaxed, since it makes no writes visible.
CUTLASS_DEVICE void cluster_arrive() { cute::cluster_arrive_relaxed(); }
CUTLASS_DEVICE void cluster_wait() { cute::cluster_wait(); }
CUTLASS_DEVICE uint32_t rank_in_cluster() { return cute::block_rank_in_cluster(); }
// The address of the same variable in the shared memory of block `rank`: mapa (9.7.9.23).
CUTLASS_DEVICE uint32_t shared_address(const void* smem) { return uint32_t(__cvta_generic_to_shared(smem)); }
CUTLASS_DEVICE uint32_t shared_address(const void* smem, uint32_t rank) {
  return cute::set_block_rank(shared_address(smem), rank);
}
// Stores in another block's shared memory, in which the mbarrier `announces` counts the bytes: st.async (9.7.9.12).
CUTLASS_DEVICE void store_async(uint32_t address, uint32_t x, uint32_t announces) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address), "r"(x),
               "r"(announces)
               : "memory");
}
CUTLASS_DEVICE void store_async(uint32_t address, const uint4& x, uint32_t announces) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
      "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(announces)
      : "memory");
}
// mbarriers (9.7.13.15). Their init is followed by the fence and a barrier of the cluster.
CUTLASS_DEVICE void mbarrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
CUTLASS_DEVICE void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// An arrival that announces bytes.
CUTLASS_DEVICE void mbarrier_expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
// An arrival in another block. With the scope of the block, which needs no fence: it announces reads, not writes.
CUTLASS_DEVICE void mbarrier_arrive_remote(uint32_t address) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address) : "memory");
}
// Waits for the end of a phase. Not with the scope of the cluster, which would invalidate the L1 cache as well.
CUTLASS_DEVICE void mbarrier_wait(const uint64_t* barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

CUTLASS_DEVICE float shfl_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
CUTLASS_DEVICE uint32_t shfl_xor(uint32_t x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
CUTLASS_DEVICE float shfl_quad(float x, int lane_in_quad) { return __shfl_sync(0xffffffffu, x, lane_in_quad, 4); }
CUTLASS_DEVICE bool any(bool x) { return __any_sync(0xffffffffu, x); }

// Four 8x8 matrices of 16-bit elements (or 8x4 of 32-bit ones), lanes 8i..8i+7 giving the rows of matrix i.
CUTLASS_DEVICE void ldmatrix(uint32_t (&r)[4], const void* row) {
  cute::SM75_U32x4_LDSM_N::copy(*static_cast<const cute::uint128_t*>(row), r[0], r[1], r[2], r[3]);
}
CUTLASS_DEVICE void ldmatrix_trans(uint32_t (&r)[4], const void* row) {
  cute::SM75_U16x8_LDSM_T::copy(*static_cast<const cute::uint128_t*>(row), r[0], r[1], r[2], r[3]);
}

// The transpose of an 8x8 matrix of 16-bit elements, two of row lane / 4 in each lane: movmatrix (9.7.14.5.17).
CUTLASS_DEVICE uint32_t transpose_8x8(uint32_t x) {
  uint32_t d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(x));
  return d;
}

// 16 bytes global -> shared past L1; zeros when the predicate is false (the address is then not read).
CUTLASS_DEVICE void cp_async_16(void* smem, const void* gmem, bool pred) {
  cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(*static_cast<const cute::uint128_t*>(gmem),
                                                               *static_cast<cute::uint128_t*>(smem), pred);
}
CUTLASS_DEVICE void cp_async_commit() { cute::cp_async_fence(); }
template <int kPending>
CUTLASS_DEVICE void cp_async_wait() {
  cute::cp_async_wait<kPending>();
}

// d[16x8] += a[16x16] b[16x8]: mma.m16n8k16, or two m16n8k8 on Sm75.
template <typename T, typename ArchTag>
CUTLASS_DEVICE void mma_16x8x16(float* d, const uint32_t* a, const uint32_t* b) {
  if constexpr (ArchTraits<ArchTag>::kCapability < 80) {
    using Atom = cute::SM75_16x8x8_F32F16F16F32_TN;
    Atom::fma(d[0], d[1], d[2], d[3], a[0], a[1], b[0], d[0], d[1], d[2], d[3]);
    Atom::fma(d[0], d[1], d[2], d[3], a[2], a[3], b[1], d[0], d[1], d[2], d[3]);
  } else if constexpr (cutlass::platform::is_same<T, cutlass::bfloat16_t>::value) {
    cute::SM80_16x8x16_F32BF16BF16F32_TN::fma(d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3], b[0], b[1], d[0], d[1],
                                              d[2], d[3]);
  } else {
    cute::SM80_16x8x16_F32F16F16F32_TN::fma(d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3], b[0], b[1], d[0], d[1],
                                            d[2], d[3]);
  }
}

// d[16x8] += a[16x8] b[8x8] in TF32.
CUTLASS_DEVICE void mma_16x8x8_tf32(float* d, const uint32_t* a, const uint32_t* b) {
  cute::SM80_16x8x8_F32TF32TF32F32_TN::fma(d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3], b[0], b[1], d[0], d[1], d[2],
                                           d[3]);
}

// Four d[8x8] += a[8x4] b[4x8], one for each quad pair. The name says how a and b are stored: row or column by column.
CUTLASS_DEVICE void mma_8x8x4_row_col(float* d, const uint32_t* a, const uint32_t* b) {
  cute::SM70_8x8x4_F32F16F16F32_TN::fma(d[0], d[1], d[2], d[3], d[4], d[5], d[6], d[7], a[0], a[1], b[0], b[1], d[0],
                                        d[1], d[2], d[3], d[4], d[5], d[6], d[7]);
}
CUTLASS_DEVICE void mma_8x8x4_row_row(float* d, const uint32_t* a, const uint32_t* b) {
  cute::SM70_8x8x4_F32F16F16F32_TT::fma(d[0], d[1], d[2], d[3], d[4], d[5], d[6], d[7], a[0], a[1], b[0], b[1], d[0],
                                        d[1], d[2], d[3], d[4], d[5], d[6], d[7]);
}

}  // namespace ds4s::ptx
