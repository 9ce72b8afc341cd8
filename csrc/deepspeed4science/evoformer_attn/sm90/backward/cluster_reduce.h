// Two blocks of a cluster have the same keys and each one half of the queries: the first finishes dk, the second dv.
// Each warpgroup writes what it has of the other result into its partner's shared memory, where a barrier counts the
// bytes, and adds what comes from there.
#pragma once

#include "sm90/backward/cluster_barrier.h"
#include "sm90/backward/config.h"

namespace ds4s::sm90 {

template <typename Config>
struct ClusterReduce {
  using Shared = typename Config::Shared;
  using OwnedPair = typename Config::template Pair<typename Config::OwnedTile>;
  using Result = float[Config::kHeadDim / 2];
  static_assert(sizeof(OwnedPair) >= 128 * sizeof(Result), "a result goes where the owned tiles were");

  CUTLASS_DEVICE static void init(typename Config::Dq& dq) {
    for (auto& barrier : dq.ready) barrier.init(128);
    for (auto& barrier : dq.received) barrier.init(1);
  }

  // Nothing reads the owned tiles any more. Of both results one is complete afterwards.
  CUTLASS_DEVICE static void exchange(Shared& shared, OwnedPair& owned, Result& dk, Result& dv, uint32_t& parity,
                                      const ConsumerCoord& at) {
    if (Config::rank() == 0) {
      exchange(shared, owned, dk, dv, 1, parity, at);
    } else {
      exchange(shared, owned, dv, dk, 0, parity, at);
    }
    parity ^= 1;
  }

 private:
  CUTLASS_DEVICE static void exchange(Shared& shared, OwnedPair& owned, Result& mine, const Result& theirs,
                                      uint32_t partner, uint32_t parity, const ConsumerCoord& at) {
    float4* buffer = reinterpret_cast<float4*>(owned.first) + threadIdx.x % 128;
    auto& ready = shared.dq.ready[at.tile];
    auto& received = shared.dq.received[at.tile];
    if (at.issues()) received.arrive_and_expect_tx(128 * sizeof(Result));
    arrive_relaxed(ready, partner);  // what this buffer held is in registers
    wait_relaxed(ready, parity);
    uint32_t remote = cute::set_block_rank(shared_address(buffer), partner);
    uint32_t announced = cute::set_block_rank(shared_address(&received), partner);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Config::kHeadDim / 8; ++i) {
      store_async(remote + 2048 * i, theirs + 4 * i, announced);
    }
    wait_in_cluster(received, parity);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Config::kHeadDim / 8; ++i) {
      float4 x = buffer[128 * i];
      mine[4 * i] += x.x, mine[4 * i + 1] += x.y, mine[4 * i + 2] += x.z, mine[4 * i + 3] += x.w;
    }
    at.sync();  // everybody has read what the finished result is written over
  }
};

}  // namespace ds4s::sm90
