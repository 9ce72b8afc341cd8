// Two blocks of a cluster have the same keys and each one half of the queries: the first finishes dk, the second dv.
// Each warpgroup writes what it has of the other result into its partner's shared memory, and adds what comes from
// there.
#pragma once

#include <cute/arch/cluster_sm90.hpp>

#include "sm90/row_pass_producer.h"

namespace ds4s::sm90 {

template <typename Config>
struct SplitResults {
  using Shared = typename Config::Shared;
  using OwnedPair = typename Config::template Pair<typename Config::OwnedTile>;
  using Result = float[Config::kHeadDim / 2];
  static_assert(sizeof(OwnedPair) >= 128 * sizeof(Result), "a result goes where the owned tiles were");

  CUTLASS_DEVICE static void init(typename Config::Dq& dq) {
    for (auto& barrier : dq.ready) barrier.init(128);
    for (auto& barrier : dq.received) barrier.init(128);
  }

  // Nothing reads the owned tiles any more. Of both results one is complete afterwards.
  CUTLASS_DEVICE static void exchange(Shared& shared, OwnedPair& owned, Result& dk, Result& dv, uint32_t& parity,
                                      const Place& at) {
    if (Config::rank() == 0) {
      exchange(shared, owned, dk, dv, 1, parity, at);
    } else {
      exchange(shared, owned, dv, dk, 0, parity, at);
    }
    parity ^= 1;
  }

 private:
  CUTLASS_DEVICE static void exchange(Shared& shared, OwnedPair& owned, Result& mine, const Result& theirs,
                                      uint32_t partner, uint32_t parity, const Place& at) {
    float4* place = reinterpret_cast<float4*>(owned.first) + threadIdx.x % 128;
    auto& ready = shared.dq.ready[at.tile];
    auto& received = shared.dq.received[at.tile];
    arrive(ready, partner);
    wait(ready, parity);
    uint32_t remote = cute::set_block_rank(shared_address(place), partner);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Config::kHeadDim / 8; ++i) {
      asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(remote + 2048 * i), "f"(theirs[4 * i]),
                   "f"(theirs[4 * i + 1]), "f"(theirs[4 * i + 2]), "f"(theirs[4 * i + 3])
                   : "memory");
    }
    arrive(received, partner);
    wait(received, parity);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Config::kHeadDim / 8; ++i) {
      float4 x = place[128 * i];
      mine[4 * i] += x.x, mine[4 * i + 1] += x.y, mine[4 * i + 2] += x.z, mine[4 * i + 3] += x.w;
    }
    at.sync();  // everybody has read what the finished result is written over
  }
  // mbarrier.arrive and mbarrier.try_wait (9.7.13.15) with the scope of the cluster, for what was written there.
  CUTLASS_DEVICE static void arrive(EmptyBarrier& barrier, uint32_t block) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(
                     cute::set_block_rank(shared_address(&barrier), block))
                 : "memory");
  }
  CUTLASS_DEVICE static void wait(EmptyBarrier& barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@done bra finished;\n"
        "bra again;\n"
        "finished:\n"
        "}" ::"r"(shared_address(&barrier)),
        "r"(parity)
        : "memory");
  }
};

}  // namespace ds4s::sm90
