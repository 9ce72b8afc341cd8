// Sums dk and dv over the blocks of a cluster, which have the same keys and each a part of the queries. The first block
// gets dk, the second dv. First, pairs of blocks swap: each warpgroup writes its part of the partner's result into the
// partner's shared memory, where a barrier counts the bytes, and adds the part that it receives. Then the third block
// sends dk to the first (without a fourth block also dv to the second), and the fourth sends dv to the second.
//
//   blocks   swapped              then sent
//   2        0 <-> 1
//   3        0 <-> 1              2 -> 0 dk, 2 -> 1 dv
//   4        0 <-> 1, 2 <-> 3     2 -> 0 dk, 3 -> 1 dv
#pragma once

#include "sm90/backward/cluster_barrier.h"
#include "sm90/backward/config.h"

namespace ds4s::sm90 {

template <typename Config>
struct ClusterReduce {
  using Shared = typename Config::Shared;
  using Result = float[Config::kHeadDim / 2];
  static_assert(2 * Config::OwnedTile::kBytes >= 128 * sizeof(Result), "a result takes the room of two tiles");

  Shared& shared;
  float4* buffer;  // this thread's part of the buffer, in which results also leave
  uint32_t parity;
  const ConsumerCoord& at;

  CUTLASS_DEVICE static void init(typename Config::Dq& dq) {
    for (auto& barriers : dq.cluster.ready) {
      for (auto& barrier : barriers) barrier.init(128);
    }
    for (auto& barriers : dq.cluster.received) {
      for (auto& barrier : barriers) barrier.init(1);
    }
  }

  // To be called when nothing reads the buffer any more. Afterwards dk is complete in the first block, dv in the
  // second.
  CUTLASS_DEVICE static void exchange(Shared& shared, uint8_t* buffer, Result& dk, Result& dv, uint32_t& parity,
                                      const ConsumerCoord& at) {
    const ClusterReduce reduce{shared, reinterpret_cast<float4*>(buffer) + threadIdx.x % 128, parity, at};
    if (Config::rank() == 2 && cute::cluster_shape().x == 3) {
      reduce.send(dk, 0, 1, 1), reduce.send(dv, 1, 2, 1);
    } else if (Config::rank() % 2 == 0) {
      reduce.run(dk, dv);
    } else {
      reduce.run(dv, dk);
    }
    parity ^= 1;
  }

 private:
  CUTLASS_DEVICE void run(Result& mine, const Result& theirs) const {
    const uint32_t rank = Config::rank(), blocks = cute::cluster_shape().x;
    announce(rank ^ 1, 0, 0);
    send(theirs, rank ^ 1, 0, 0);
    receive(mine, 0);
    if (blocks == 2) return;
    if (rank < 2) {
      announce(min(rank + 2, blocks - 1), 1 + rank, 1);
      receive(mine, 1);
    } else {
      send(mine, rank - 2, rank - 1, 1);
    }
  }

  // Announces to the partner that this block's buffer is free, since its contents are in registers.
  CUTLASS_DEVICE void announce(uint32_t partner, int its_ready, int my_received) const {
    if (at.issues()) shared.dq.cluster.received[my_received][at.tile].arrive_and_expect_tx(128 * sizeof(Result));
    arrive_relaxed(shared.dq.cluster.ready[its_ready][at.tile], partner);
  }
  CUTLASS_DEVICE void send(const Result& x, uint32_t partner, int my_ready, int its_received) const {
    wait_relaxed(shared.dq.cluster.ready[my_ready][at.tile], parity);
    uint32_t remote = cute::set_block_rank(shared_address(buffer), partner);
    uint32_t announced =
        cute::set_block_rank(shared_address(&shared.dq.cluster.received[its_received][at.tile]), partner);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Config::kHeadDim / 8; ++i) store_async(remote + 2048 * i, x + 4 * i, announced);
  }
  CUTLASS_DEVICE void receive(Result& sum, int my_received) const {
    wait_in_cluster(shared.dq.cluster.received[my_received][at.tile], parity);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Config::kHeadDim / 8; ++i) {
      float4 x = buffer[128 * i];
      sum[4 * i] += x.x, sum[4 * i + 1] += x.y, sum[4 * i + 2] += x.z, sum[4 * i + 3] += x.w;
    }
    at.sync();  // all threads have read the buffer that the next message overwrites
  }
};

}  // namespace ds4s::sm90
