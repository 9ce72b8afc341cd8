// dbias2, math.md (16), of two rows n by one addition (kPairsRows). Two blocks of a cluster own the same keys in
// neighbouring rows n and stream the same queries. Each adds dbias2 of half of the keys, the sum of both blocks' dS.
// The warps of the other half send their dS to the partner, besides storing it in their own block:
//
//   block 0, row n        keys 0 .. 63: stored, added       keys 64 .. 127: stored, sent
//   block 1, row n + 1    keys 0 .. 63: stored, sent        keys 64 .. 127: stored, added
//
// A block without a partner adds dbias2 of all its keys: where that row n does not exist, is of another b or sees none
// of the keys, or where one half is hidden in both rows.
//
// Invariants:
//   R1  `full` of a buffer ends a phase when all that the partner sends of a tile has arrived: st.async counts bytes.
//   R2  `empty` of a buffer ends a phase when all warps of the partner have read a tile. The warps that send wait for
//       it before the next tile of the buffer; nobody arrives at it for the last two tiles. So a block waits for all
//       that its partner sends to it, and may end without waiting for the partner's end.
//   R3  The blocks' numbers are 2 i and 2 i + 1, and neither waits for the pair (b, n, h) of the other, since their
//       accumulators of dq differ. So clusters wait for clusters with smaller numbers only (S1, S3 in
//       dq_accumulator.h).
#pragma once

#include "sm80/backward/ds_tile.h"
#include "sm80/backward/tile_position.h"

namespace ds4s {

// The memory that a block has for its partner.
template <typename Config>
struct PartnerBuffers {
  using scalar_t = typename Config::scalar_t;
  static constexpr int kKeys = Config::kOwned / 2, kElements = kKeys * Config::kStreamed;
  static constexpr int kTileBytes = kElements * int(sizeof(scalar_t));

  scalar_t ds[2][kElements];  // the partner's dS of a tile, half of a DsTile
  uint64_t full[2], empty[2];
  uint64_t drawn;   // ends its phase when `number` has arrived
  uint32_t number;  // of this block
};

template <typename Config>
struct RowPartner {
  using scalar_t = typename Config::scalar_t;
  using Ds = DsTile<Config>;
  using Buffers = PartnerBuffers<Config>;

  Buffers* buffers;
  uint32_t remote = 0;  // the address of the partner's buffers, if this warp sends its dS to it

  // Draws the numbers of the cluster's blocks, one even and one odd, and makes the barriers.
  CUTLASS_DEVICE static uint32_t draw(uint32_t* ticket, Buffers* buffers) {
    const bool draws = threadIdx.x == 0 && ptx::rank_in_cluster() == 0;
    uint32_t first = 0;
    if (draws) first = atomicAdd(ticket, 2u);
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(&buffers->drawn, 1);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2; ++i) {
        ptx::mbarrier_init(buffers->full + i, 1), ptx::mbarrier_init(buffers->empty + i, Config::kWarps);
      }
      ptx::mbarrier_init_fence();
      ptx::mbarrier_expect(&buffers->drawn, int(sizeof(uint32_t)));
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2; ++i) expect(buffers, i);
    }
    __syncthreads();  // the barriers exist
    ptx::cluster_arrive(), ptx::cluster_wait();
    if (draws) {
      CUTLASS_PRAGMA_UNROLL
      for (uint32_t i = 0; i < 2; ++i) {
        ptx::store_async(ptx::shared_address(&buffers->number, i), first + i, ptx::shared_address(&buffers->drawn, i));
      }
    }
    ptx::mbarrier_wait(&buffers->drawn, 0);
    return uniform(buffers->number);
  }

  // Whether the other block of the cluster has a neighbouring row n of the same b.
  CUTLASS_DEVICE static bool is_neighbour(const BwdParams& p, const TilePosition<Config>& at) {
    constexpr int kRows = TilePosition<Config>::kRows;
    static_assert(kRows % 2 == 0, "the blocks of a cluster are in the same group of rows n");
    const int64_t rows = p.B * p.N;
    const bool is_odd_group = rows % 2 != 0 && at.bn >= rows / kRows * kRows;  // other blocks are neighbours there
    return !is_odd_group && (at.bn % 2 == 0 ? at.n + 1 != p.N : at.n != 0);
  }
  // The visible keys of a block and its partner, from KeyMask::units of both; 0: it has no partner.
  CUTLASS_DEVICE static uint32_t units(uint32_t mine, uint32_t theirs) {
    constexpr int kHalf = Config::kOwned / KeyMask::kUnit / 2;
    const uint32_t units = mine | theirs;
    return theirs != 0 && units >> kHalf != 0 && units % (1u << kHalf) != 0 ? units : 0;
  }

  CUTLASS_DEVICE void begin(bool exists, int warp_row) {
    const uint32_t partner = ptx::rank_in_cluster() ^ 1;
    if (exists && uint32_t(warp_row) / Buffers::kKeys == partner) remote = ptx::shared_address(buffers, partner);
  }
  // Sends 32 keys x 32 queries of a tile, if the warp has keys of the partner.
  CUTLASS_DEVICE void send(int tile, int stripe, int lane_offset, const ScoreWords& words) const {
    if (remote == 0) return;
    const int buffer = tile & 1;
    if (stripe == 0 && tile >= 2) ptx::mbarrier_wait(buffers->empty + buffer, (tile / 2 - 1) & 1);
    const uint32_t to = remote + buffer * Buffers::kTileBytes, full = remote + kFull + buffer * 8;
    Ds::for_each_chunk(lane_offset, words, stripe, [&](int offset, const uint4& x) {
      ptx::store_async(to + offset % Buffers::kElements * int(sizeof(scalar_t)), x, full);
    });
  }
  // The same for a warp whose keys are all hidden.
  CUTLASS_DEVICE void send_zeros(int tile, int lane_offset) const {
    CUTLASS_PRAGMA_UNROLL
    for (int stripe = 0; stripe < Config::kStripes; ++stripe) send(tile, stripe, lane_offset, ScoreWords{});
  }

  // Waits for the partner's dS of a tile. The phase of the buffer's next tile begins.
  CUTLASS_DEVICE static const scalar_t* receive(Buffers* buffers, int tile, int thread) {
    ptx::mbarrier_wait(buffers->full + (tile & 1), tile / 2 & 1);
    if (thread == 0) expect(buffers, tile & 1);
    return buffers->ds[tile & 1];
  }
  // Called by each warp when it has read that dS, if the partner sends a tile to the same buffer again.
  CUTLASS_DEVICE static void release(Buffers* buffers, int tile, int lane) {
    __syncwarp();
    if (lane == 0) {
      ptx::mbarrier_arrive_remote(ptx::shared_address(buffers->empty + (tile & 1), ptx::rank_in_cluster() ^ 1));
    }
  }

 private:
  static constexpr int kFull = int(sizeof(Buffers::ds));

  CUTLASS_DEVICE static void expect(Buffers* buffers, int buffer) {
    ptx::mbarrier_expect(buffers->full + buffer, Buffers::kTileBytes);
  }
};

}  // namespace ds4s
