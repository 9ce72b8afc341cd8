// Barriers, stores and loads between the blocks of a cluster: mbarrier.arrive and mbarrier.try_wait (PTX ISA 9.7.13.15)
// with the scope of the cluster, st.async (9.7.9.12), whose barrier counts the bytes; arrivals beside such stores.
#pragma once

#include <cute/arch/cluster_sm90.hpp>

#include "sm90/mma/pipeline.h"

namespace ds4s::sm90 {

// Relaxed, because no writes need to become visible to the other block. Compilers before CUDA 12.8 know the stronger
// release and acquire alone.
#if DS4S_CUDA_VERSION >= 12080
#define DS4S_RELAXED_ARRIVE "relaxed"
#define DS4S_RELAXED_WAIT "relaxed"
#else
#define DS4S_RELAXED_ARRIVE "release"
#define DS4S_RELAXED_WAIT "acquire"
#endif
CUTLASS_DEVICE void arrive_relaxed(EmptyBarrier& barrier, uint32_t rank) {
  asm volatile("mbarrier.arrive." DS4S_RELAXED_ARRIVE
               ".cluster.shared::cluster.b64 _, [%0];" ::"r"(cute::set_block_rank(shared_address(&barrier), rank))
               : "memory");
}

// A zero that ptxas does not know.
CUTLASS_DEVICE uint32_t unknown_zero() { return threadIdx.y; }

// Arrives when `loaded` has been loaded from shared memory. Loads may wait behind stores to another block, and an
// arrival does not wait for loads: so its address depends on them.
CUTLASS_DEVICE void arrive_after(uint32_t loaded, EmptyBarrier& barrier, uint32_t zero = unknown_zero()) {
  (&barrier)[loaded & zero].arrive();
}

#define DS4S_TRY_WAIT(SEMANTICS)                   \
  asm volatile(                                    \
      "{\n"                                        \
      ".reg .pred done;\n"                         \
      "again:\n"                                   \
      "mbarrier.try_wait.parity." SEMANTICS        \
      ".cluster.shared::cta.b64 done, [%0], %1;\n" \
      "@done bra finished;\n"                      \
      "bra again;\n"                               \
      "finished:\n"                                \
      "}" ::"r"(shared_address(&barrier)),         \
      "r"(parity)                                  \
      : "memory")
CUTLASS_DEVICE void wait_relaxed(EmptyBarrier& barrier, uint32_t parity) { DS4S_TRY_WAIT(DS4S_RELAXED_WAIT); }
CUTLASS_DEVICE void wait_in_cluster(FullBarrier& barrier, uint32_t parity) { DS4S_TRY_WAIT("acquire"); }
#undef DS4S_TRY_WAIT
#undef DS4S_RELAXED_ARRIVE
#undef DS4S_RELAXED_WAIT

// Stores to the same address in the shared memory of block `rank`, whose barrier `announces` counts the bytes.
CUTLASS_DEVICE void store_async(int* address, int value, FullBarrier& announces, uint32_t rank) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.s32 [%0], %1, [%2];" ::"r"(
                   cute::set_block_rank(shared_address(address), rank)),
               "r"(value), "r"(cute::set_block_rank(shared_address(&announces), rank))
               : "memory");
}
CUTLASS_DEVICE void store_async(uint32_t address, const float* four, uint32_t announces) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
      "f"(four[0]), "f"(four[1]), "f"(four[2]), "f"(four[3]), "r"(announces)
      : "memory");
}

// Loads four floats from another block's shared memory (9.7.9.8).
CUTLASS_DEVICE float4 load_four(uint32_t address) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

}  // namespace ds4s::sm90
