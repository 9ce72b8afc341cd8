// dbias2, math.md (16), in kernel_dq_dkdv, of two rows n by one addition (Config::kPairsRows). The blocks of a cluster
// have neighbouring rows n and the same head, and iterate over the same keys and queries, in step. Of each step, a
// block adds the sum of both blocks' dS to dbias2 for half of the queries, and sends its dS of the other half to the
// other block:
//
//   block 0, row n        queries 0 .. 31: kept, added      queries 32 .. 63: sent
//   block 1, row n + 1    queries 0 .. 31: sent             queries 32 .. 63: kept, added
//
// A warpgroup of its own adds: each warp eight of the 32 queries, by additions of TMA (cp.reduce.async.bulk) that leave
// from shared memory. Additions from registers (red) would pass through the pipe of shared memory, which is the busiest
// part of the kernel: 0.98 instead of 0.90 of the time of two kernels at (1,384,384,4,32). The warpgroup for dq sends,
// while its product runs, since this one is busier; without such a warpgroup (kDqInGlobal) this one sends, too.
//
// Both blocks take all tiles with a key that one of the rows n sees. A row n that sees none of them, or that does not
// exist, has dS = 0.
#pragma once

#include "sm90/backward/cluster_barrier.h"
#include "sm90/backward/config.h"
#include "sm90/backward/maps.h"

namespace ds4s::sm90 {

template <typename Config>
class RowPairs {
  using Shared = typename Config::Shared;
  using scalar_t = typename Config::scalar_t;
  using Coordinates = typename Config::Coordinates;
  using Tiles = typename Config::RowPairTiles;
  using DsTile = typename Config::BiasTile;
  static constexpr int kTiles = Config::kTiles, kOwned = Config::kOwned;
  static constexpr int kSlots = Config::kDsSlots, kSlotTiles = Config::kSlotTiles;
  static constexpr int kQueries = Tiles::kQueries, kWarpQueries = Tiles::kWarpQueries;
  static constexpr int kPasses = kWarpQueries / 2;  // 16 lanes read 64 keys of a query
  using Part = uint2[kTiles][kPasses];              // four keys of a query

 public:
  using Slots = PipelineState<kSlots>;

  CUTLASS_DEVICE static void init(Tiles& tiles) {
    for (int i = 0; i < kSlots; ++i) {
      tiles.full[i].init(1), tiles.empty[i].init(4);
      tiles.full[i].arrive_and_expect_tx(Tiles::kSlotBytes);
    }
    for (auto& barrier : tiles.ready) barrier.init(1);
  }

  // Called by the warpgroup for dq, or by this one: sends half of a step's dS.
  CUTLASS_DEVICE static void send(Slots& slots, Shared& shared, const uint8_t* all, const ConsumerCoord& at) {
    Tiles& tiles = shared.pairs;
    const uint32_t rank = cute::block_rank_in_cluster(), other = rank ^ 1;
    const int mine = 16 * (32 * at.warp + at.lane);
    const uint8_t* ds = all + (rank == 0 ? kQueries * DsTile::kRowBytes : 0) + mine;
    CUTLASS_PRAGMA_UNROLL
    for (int t = 0; t < kTiles; ++t) {
      const int in_slot = t % kSlotTiles;
      constexpr int kPieces = Tiles::kTileBytes / (128 * 16);
      uint4 pieces[kPieces];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kPieces; ++i) pieces[i] = *reinterpret_cast<const uint4*>(ds + t * DsTile::kBytes + i * 2048);
      if (in_slot == 0) tiles.empty[slots.index].wait(slots.phase ^ 1);
      const uint32_t full = cute::set_block_rank(shared_address(&tiles.full[slots.index]), other);
      const uint32_t to = cute::set_block_rank(shared_address(tiles.ds[slots.index][in_slot]), other) + mine;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kPieces; ++i) ptx::store_async(to + i * 2048, pieces[i], full);
      if (in_slot == kSlotTiles - 1) slots.advance();
    }
  }

  // The warpgroup for dbias2.
  CUTLASS_DEVICE static void run(Shared& shared, const BackwardArgs& args, const DqDkdvMaps& maps) {
    const ConsumerCoord at = ConsumerCoord::of_helper();
    RowPairs pairs(shared, maps, at);
    typename Config::OwnedPipe owned_pipe;
    if constexpr (Config::kDqInShared) {
      typename Config::Pipe pipe;
      for (PublishedTileScheduler<Config> tiles(shared, args); tiles.tile < args.num_tiles;
           tiles.advance(shared, args), owned_pipe.advance()) {
        const typename Config::Visible visible = shared.visible[owned_pipe.index];
        const int num_steps = uniform(visible.num_steps);
        const int first_query = Config::columns(args, visible.at.part).begin;
        CUTLASS_PRAGMA_NO_UNROLL
        for (int step = 0; step < num_steps; ++step, pipe.advance()) {
          shared.dq.full[pipe.index].wait(pipe.phase);
          pairs.add(visible.at, first_query + step * Config::kColumns, shared.stages[pipe.index].bias2[0],
                    shared.empty[pipe.index]);
        }
        shared.owned_empty[owned_pipe.index].arrive();
      }
    } else {
      PipelineState<Config::DqGlobalTiles::kDsStages> pipe;
      for (typename Config::template Scheduler<TileReader::kWarp> tiles(shared, args); tiles.tile < args.num_tiles;
           tiles.advance(shared, args), owned_pipe.advance()) {
        const Coordinates block = Config::locate(args, tiles.tile);
        shared.owned_full[owned_pipe.index].wait(owned_pipe.phase);
        const int num_steps = uniform(shared.visible[owned_pipe.index].num_steps);
        arrive_after(num_steps, shared.owned_empty[owned_pipe.index], pairs.zero_);
        CUTLASS_PRAGMA_NO_UNROLL
        for (int step = 0; step < num_steps; ++step, pipe.advance()) {
          shared.dq_global_barriers.full[pipe.index].wait(pipe.phase);
          pairs.add(block, step * Config::kColumns, shared.dq_global.ds[pipe.index][0],
                    shared.dq_global_barriers.empty[pipe.index]);
        }
      }
    }
    // The last sums are added: the next kernel may read dbias2 when this one has ended.
    if (at.lane == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    ptx::wait_for_kernel_before();
  }

 private:
  CUTLASS_DEVICE RowPairs(Shared& shared, const DqDkdvMaps& maps, const ConsumerCoord& at)
      : shared_(shared), maps_(maps), at_(at), thread_(32 * at.warp + at.lane) {}

  // Adds the half of a step's dS that is kept and the other block's to dbias2. query: the step's first one; empty: is
  // told when dS has been read.
  CUTLASS_DEVICE void add(const Coordinates& block, int query, const uint8_t* all, EmptyBarrier& empty) {
    Tiles& tiles = shared_.pairs;
    const uint32_t rank = cute::block_rank_in_cluster();
    const uint8_t* ds = all + rank * kQueries * DsTile::kRowBytes;
    Part kept;
    CUTLASS_PRAGMA_UNROLL
    for (int t = 0; t < kTiles; ++t) read(kept[t], ds + t * DsTile::kBytes);
    if constexpr (!Config::kDqInShared) send(sent_, shared_, all, at_);
    release(empty, kept);
    CUTLASS_PRAGMA_UNROLL
    for (int t = 0; t < kTiles; ++t) {
      const int in_slot = t % kSlotTiles;
      FullBarrier& full = tiles.full[slots_.index];
      if (in_slot == 0) full.wait(slots_.phase);
      __syncwarp();
      if (in_slot == 0 && at_.issues()) full.arrive_and_expect_tx(Tiles::kSlotBytes);
      uint2 theirs[kPasses];
      read(theirs, tiles.ds[slots_.index][in_slot]);
      float4 sums[kPasses];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kPasses; ++i) {
        float x[4], y[4];
        unpack(x, kept[t][i]), unpack(y, theirs[i]);
        sums[i] = make_float4(x[0] + y[0], x[1] + y[1], x[2] + y[2], x[3] + y[3]);
      }
      if (at_.lane == 0) cute::tma_store_wait<0>();  // the last sums have left
      __syncwarp();
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kPasses; ++i) {
        *reinterpret_cast<float4*>(&tiles.sums[first_query() + 2 * i][thread_ % 16 * 4]) = sums[i];
      }
      const bool releases = in_slot == kSlotTiles - 1;
      cute::tma_store_fence();
      __syncwarp();
      if (releases && at_.lane == 0) tiles.empty[slots_.index].arrive(rank ^ 1);
      if (releases) slots_.advance();
      if (at_.lane == 0) {
        cute::SM90_TMA_REDUCE_ADD_5D::copy(&maps_.dbias2, tiles.sums[kWarpQueries * at_.warp], block.owned + kOwned * t,
                                           query + kQueries * int(rank) + kWarpQueries * at_.warp, block.head, 0,
                                           block.batch);
        cute::tma_store_arrive();
      }
    }
  }

  // Releases dS of which `part` has been read.
  CUTLASS_DEVICE void release(EmptyBarrier& empty, const Part& part) const {
    uint32_t all = 0;
    for (auto& of_tile : part) {
      for (auto& four : of_tile) all |= four.x | four.y;
    }
    arrive_after(all, empty, zero_);
  }
  // This thread's first query of a half.
  CUTLASS_DEVICE int first_query() const { return kWarpQueries * at_.warp + at_.lane / 16; }
  CUTLASS_DEVICE static void unpack(float (&x)[4], const uint2& four) {
    const float2 low = ptx::unpack<scalar_t>(four.x), high = ptx::unpack<scalar_t>(four.y);
    x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
  }
  // Reads every second one of a warp's queries. The swizzle of a query's chunks differs by 2 from one to the next.
  CUTLASS_DEVICE void read(uint2 (&part)[kPasses], const uint8_t* ds) const {
    static_assert(kWarpQueries == 8 && DsTile::kRowBytes == 128, "swizzled offsets");
    const uint32_t mine = shared_address(ds) + DsTile::offset(first_query(), thread_ % 16 / 2) + thread_ % 2 * 8;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kPasses; ++i) part[i] = load_two((mine ^ (32 * i)) + i * 2 * DsTile::kRowBytes);
  }
  CUTLASS_DEVICE static uint2 load_two(uint32_t address) {
    uint2 x;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(address) : "memory");
    return x;
  }

  Shared& shared_;
  const DqDkdvMaps& maps_;
  const ConsumerCoord& at_;
  const int thread_;
  const uint32_t zero_ = unknown_zero();
  Slots slots_, sent_;
};

}  // namespace ds4s::sm90
