// dbias2, math.md (16), in kernel_dq_dkdv, of two rows n by one addition (Config::kPairsRows). The blocks of a cluster
// have neighbouring rows n and the same head, and iterate over the same keys and queries, in step. Of each step, a
// block adds the sum of both blocks' dS to dbias2 for half of the queries, and sends its dS of the other half to the
// other block:
//
//   block 0, row n        queries 0 .. 31: kept, added      queries 32 .. 63: sent
//   block 1, row n + 1    queries 0 .. 31: sent             queries 32 .. 63: kept, added
//
// A warpgroup of its own does so: each warp eight of the 32 queries, by an addition of TMA (cp.reduce.async.bulk) that
// leaves from shared memory. Additions from registers (red) would pass through the pipe of shared memory, which is the
// busiest part of the kernel: 0.98 instead of 0.90 of the time of two kernels at (1,384,384,4,32).
//
// Both blocks take all tiles with a key that one of the rows n sees. A row n that sees none of them, or that does not
// exist, has dS = 0.
#pragma once

#include "sm90/backward/cluster_barrier.h"
#include "sm90/backward/dq_smem.h"

namespace ds4s::sm90 {

template <typename Config>
class RowPairs {
  using Shared = typename Config::Shared;
  using scalar_t = typename Config::scalar_t;
  using Coordinates = typename Config::Coordinates;
  using Tiles = typename Config::RowPairTiles;
  using DsTile = typename Config::BiasTile;
  static constexpr int kTiles = Config::kTiles, kOwned = Config::kOwned;
  static constexpr int kQueries = Tiles::kQueries, kWarpQueries = Tiles::kWarpQueries;
  static constexpr int kPasses = kWarpQueries / 2;  // 16 lanes read 64 keys of a query
  using Part = uint2[kTiles][kPasses];              // four keys of a query

 public:
  CUTLASS_DEVICE static void init(Tiles& tiles) {
    for (int i = 0; i < 2; ++i) {
      tiles.full[i].init(1), tiles.empty[i].init(4);
      tiles.full[i].arrive_and_expect_tx(Tiles::kBytes);
    }
    for (auto& barrier : tiles.ready) barrier.init(1);
  }

  CUTLASS_DEVICE static void run(Shared& shared, const BackwardArgs& args, const DqDkdvMaps& maps) {
    const ConsumerCoord at = ConsumerCoord::of_helper();
    RowPairs pairs(shared, maps, at);
    typename Config::Pipe pipe;
    typename Config::OwnedPipe owned_pipe;
    for (PublishedTileScheduler<Config> tiles(shared, args); tiles.tile < args.num_tiles;
         tiles.advance(shared, args), owned_pipe.advance()) {
      const typename Config::Visible visible = shared.visible[owned_pipe.index];
      const int num_steps = uniform(visible.num_steps);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int step = 0; step < num_steps; ++step, pipe.advance()) {
        shared.dq.full[pipe.index].wait(pipe.phase);
        pairs.exchange(pipe.index);
        shared.empty[pipe.index].arrive();
        pairs.add(visible.at, step * Config::kColumns);
      }
      shared.owned_empty[owned_pipe.index].arrive();
    }
    // The last sums are added: the next kernel may read dbias2 when this one has ended.
    if (at.lane == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    ptx::wait_for_kernel_before();
  }

 private:
  CUTLASS_DEVICE RowPairs(Shared& shared, const DqDkdvMaps& maps, const ConsumerCoord& at)
      : shared_(shared), maps_(maps), at_(at), thread_(32 * at.warp + at.lane) {}

  // Keeps half of a step's dS and sends the other half. The stage may be released afterwards: the reads of the kept
  // half have ended, since they come before those of the sent half, whose results the stores need. The other way round
  // they would wait behind stores to the other block, and could come after the arrival that releases the stage.
  CUTLASS_DEVICE void exchange(int stage) {
    const uint8_t* ds = shared_.stages[stage].bias2[0];
    const uint32_t rank = cute::block_rank_in_cluster();
    read(kept_, ds + rank * kQueries * DsTile::kRowBytes, DsTile::kBytes);
    send(ds + (rank == 0 ? kQueries * DsTile::kRowBytes : 0), rank ^ 1);
  }
  // Adds the kept half and the other block's to dbias2. query: the step's first one.
  CUTLASS_DEVICE void add(const Coordinates& block, int query) {
    Tiles& tiles = shared_.dq.pairs;
    const int buffer = count_ & 1;
    const uint32_t rank = cute::block_rank_in_cluster();
    if (at_.lane == 0) cute::tma_store_wait<0>();  // of the sums of the step before
    tiles.full[buffer].wait(count_ >> 1 & 1);
    __syncwarp();
    if (at_.issues()) tiles.full[buffer].arrive_and_expect_tx(Tiles::kBytes);
    Part theirs;
    read(theirs, tiles.ds[buffer][0], Tiles::kTileBytes);
    CUTLASS_PRAGMA_UNROLL
    for (int t = 0; t < kTiles; ++t) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kPasses; ++i) {
        float x[4], y[4];
        unpack(x, kept_[t][i]), unpack(y, theirs[t][i]);
        *reinterpret_cast<float4*>(&tiles.sums[first_query() + 2 * i][kOwned * t + thread_ % 16 * 4]) =
            make_float4(x[0] + y[0], x[1] + y[1], x[2] + y[2], x[3] + y[3]);
      }
    }
    cute::tma_store_fence();
    __syncwarp();
    if (at_.lane == 0) {
      tiles.empty[buffer].arrive(rank ^ 1);
      cute::SM90_TMA_REDUCE_ADD_5D::copy(&maps_.dbias2, tiles.sums[kWarpQueries * at_.warp], block.owned,
                                         query + kQueries * int(rank) + kWarpQueries * at_.warp, block.head, 0,
                                         block.batch);
      cute::tma_store_arrive();
    }
    ++count_;
  }

  // This thread's first query of a half.
  CUTLASS_DEVICE int first_query() const { return kWarpQueries * at_.warp + at_.lane / 16; }
  CUTLASS_DEVICE static void unpack(float (&x)[4], const uint2& four) {
    const float2 low = ptx::unpack<scalar_t>(four.x), high = ptx::unpack<scalar_t>(four.y);
    x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
  }
  // Reads every second one of a warp's queries. The swizzle of a query's chunks differs by 2 from one to the next.
  CUTLASS_DEVICE void read(Part& part, const uint8_t* ds, int tile_bytes) const {
    static_assert(kWarpQueries == 8 && DsTile::kRowBytes == 128, "swizzled offsets");
    const uint32_t mine = shared_address(ds) + DsTile::offset(first_query(), thread_ % 16 / 2) + thread_ % 2 * 8;
    CUTLASS_PRAGMA_UNROLL
    for (int t = 0; t < kTiles; ++t) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kPasses; ++i) {
        part[t][i] = load_two((mine ^ (32 * i)) + t * tile_bytes + i * 2 * DsTile::kRowBytes);
      }
    }
  }
  CUTLASS_DEVICE static uint2 load_two(uint32_t address) {
    uint2 x;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(address) : "memory");
    return x;
  }
  CUTLASS_DEVICE void send(const uint8_t* ds, uint32_t other) const {
    const int buffer = count_ & 1;
    Tiles& tiles = shared_.dq.pairs;
    if (count_ >= 2) tiles.empty[buffer].wait(((count_ >> 1) - 1) & 1);
    const uint32_t full = cute::set_block_rank(shared_address(&tiles.full[buffer]), other);
    const uint32_t to = cute::set_block_rank(shared_address(tiles.ds[buffer][0]), other) + 16 * thread_;
    CUTLASS_PRAGMA_UNROLL
    for (int t = 0; t < kTiles; ++t) {
      CUTLASS_PRAGMA_UNROLL
      for (int x = 0; x < Tiles::kTileBytes; x += 128 * 16) {
        ptx::store_async(to + t * Tiles::kTileBytes + x,
                         *reinterpret_cast<const uint4*>(ds + t * DsTile::kBytes + x + 16 * thread_), full);
      }
    }
  }

  Shared& shared_;
  const DqDkdvMaps& maps_;
  const ConsumerCoord& at_;
  const int thread_;
  int count_ = 0;  // steps that have been added
  Part kept_;
};

}  // namespace ds4s::sm90
