// dbias2, math.md (16), in kernel_dq_dkdv, of two rows n by one addition (Config::kPairsRows). The blocks of a cluster
// have neighbouring rows n and the same head, and iterate over the same keys and queries, in step. Of each step, a
// block adds the sum of both blocks' dS to dbias2 for half of the queries, and sends its dS of the other half to the
// other block:
//
//   block 0, row n        queries 0 .. 31: kept, added      queries 32 .. 63: sent
//   block 1, row n + 1    queries 0 .. 31: sent             queries 32 .. 63: kept, added
//
// A warpgroup of its own adds, each warp eight of the 32 queries (red.global.add.v4.f32). The warpgroup for dq sends,
// while its product runs, since this one is busier; without such a warpgroup (kDqInGlobal) this one sends, too.
//
// Both blocks take all tiles with a key that one of the rows n sees. A row n that sees none of them, or that does not
// exist, has dS = 0.
#pragma once

#include "common/atomic_add.h"
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
  static constexpr int kQueries = Tiles::kQueries, kWarpQueries = Tiles::kWarpQueries;
  static constexpr int kHalves = 2;                      // of a tile of keys: eight lanes read 32 keys of a query
  static constexpr int kLaneQueries = kWarpQueries / 4;  // of a step,
  static constexpr int kNextQuery = 2;                   // so many queries from one to the next
  using Query = uint2[kTiles * kHalves];                 // four keys of each half
  using Part = Query[kLaneQueries];
  // All loads come before all additions, but not where this warpgroup also sends. (1,768,768,4,32): 0.994;
  // (1,48,768,16,48), where it sends: 1.01.
  static constexpr bool kReadsAhead = Config::kDqInShared;

 public:
  using Slots = PipelineState<Tiles::kSlots>;

  CUTLASS_DEVICE static void init(Tiles& tiles) {
    for (int i = 0; i < Tiles::kSlots; ++i) {
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
      constexpr int kPieces = Tiles::kTileBytes / (128 * 16);
      uint4 pieces[kPieces];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kPieces; ++i) pieces[i] = *reinterpret_cast<const uint4*>(ds + t * DsTile::kBytes + i * 2048);
      if (t == 0) tiles.empty[slots.index].wait(slots.phase ^ 1);
      const uint32_t full = cute::set_block_rank(shared_address(&tiles.full[slots.index]), other);
      const uint32_t to = cute::set_block_rank(shared_address(tiles.ds[slots.index][t]), other) + mine;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kPieces; ++i) ptx::store_async(to + i * 2048, pieces[i], full);
    }
    slots.advance();
  }

  // The warpgroup for dbias2.
  CUTLASS_DEVICE static void run(Shared& shared, const BackwardArgs& args) {
    const ConsumerCoord at = ConsumerCoord::of_helper();
    RowPairs pairs(shared, args, at);
    typename Config::OwnedPipe owned_pipe;
    if constexpr (Config::kDqInShared) {
      typename Config::Pipe pipe;
      for (PublishedTileScheduler<Config> tiles(shared, args); tiles.tile < args.num_tiles;
           tiles.advance(shared, args), owned_pipe.advance()) {
        const typename Config::Visible visible = shared.visible[owned_pipe.index];
        const int num_steps = uniform(visible.num_steps);
        pairs.begin(visible.at);
        CUTLASS_PRAGMA_NO_UNROLL
        for (int step = 0; step < num_steps; ++step, pipe.advance()) {
          shared.dq.full[pipe.index].wait(pipe.phase);
          pairs.add(shared.stages[pipe.index].bias2[0], shared.empty[pipe.index]);
        }
        shared.owned_empty[owned_pipe.index].arrive();
      }
    } else {
      PipelineState<Config::DqGlobalTiles::kDsStages> pipe;
      for (typename Config::template Scheduler<TileReader::kWarp> tiles(shared, args); tiles.tile < args.num_tiles;
           tiles.advance(shared, args), owned_pipe.advance()) {
        pairs.begin(Config::locate(args, tiles.tile));
        shared.owned_full[owned_pipe.index].wait(owned_pipe.phase);
        const int num_steps = uniform(shared.visible[owned_pipe.index].num_steps);
        arrive_after(num_steps, shared.owned_empty[owned_pipe.index], pairs.zero_);
        CUTLASS_PRAGMA_NO_UNROLL
        for (int step = 0; step < num_steps; ++step, pipe.advance()) {
          shared.dq_global_barriers.full[pipe.index].wait(pipe.phase);
          pairs.add(shared.dq_global.ds[pipe.index][0], shared.dq_global_barriers.empty[pipe.index]);
        }
      }
    }
    ptx::wait_for_kernel_before();
  }

 private:
  CUTLASS_DEVICE RowPairs(Shared& shared, const BackwardArgs& args, const ConsumerCoord& at)
      : shared_(shared), args_(args), at_(at) {}

  // Finds this lane's first elements of dbias2 in the first step of a tile.
  CUTLASS_DEVICE void begin(const Coordinates& block) {
    const int key = block.owned + at_.lane % 8 * 4;
    const int query =
        Config::columns(args_, block.part).begin + kQueries * int(cute::block_rank_in_cluster()) + first_query();
    const int64_t row = (int64_t(block.batch) * args_.H + block.head) * args_.Lq + query;
    sums_ = args_.dbias2_global + row * args_.dbias2_stride + key;
    keys_left_ = args_.dbias2_stride - key, queries_left_ = args_.Lq - query;
  }
  // Adds the half of a step's dS that is kept and the other block's to dbias2. empty: is told when dS has been read.
  CUTLASS_DEVICE void add(const uint8_t* all, EmptyBarrier& empty) {
    Tiles& tiles = shared_.pairs;
    const uint32_t rank = cute::block_rank_in_cluster();
    Part kept, theirs;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kLaneQueries; ++i) read<DsTile::kBytes>(kept[i], all + rank * kQueries * DsTile::kRowBytes, i);
    if constexpr (!Config::kDqInShared) send(sent_, shared_, all, at_);
    release(empty, kept);
    // Loads have ended, so those of the step before, too: its slot is free.
    if (at_.lane == 0 && begun_) tiles.empty[slots_.before().index].arrive(rank ^ 1);
    begun_ = true;
    FullBarrier& full = tiles.full[slots_.index];
    full.wait(slots_.phase);
    __syncwarp();
    if (at_.issues()) full.arrive_and_expect_tx(Tiles::kSlotBytes);
    const uint8_t* ds = tiles.ds[slots_.index][0];
    if constexpr (kReadsAhead) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kLaneQueries; ++i) read<Tiles::kTileBytes>(theirs[i], ds, i);
      __syncwarp();  // otherwise ptxas moves loads behind additions, for which they wait
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kLaneQueries; ++i) {
      if constexpr (!kReadsAhead) {
        read<Tiles::kTileBytes>(theirs[i], ds, i);
        __syncwarp();
      }
      if (kNextQuery * i < queries_left_) add_query(kept[i], theirs[i], sums_ + kNextQuery * i * args_.dbias2_stride);
    }
    slots_.advance();
    sums_ += Config::kColumns * args_.dbias2_stride, queries_left_ -= Config::kColumns;
  }
  // Adds a query's sums to dbias2.
  CUTLASS_DEVICE void add_query(const Query& x, const Query& y, float* sums) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kTiles * kHalves; ++i) {
      if (32 * i >= keys_left_) break;
      float a[4], b[4];
      unpack(a, x[i]), unpack(b, y[i]);
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < 4; ++e) a[e] += b[e];
      atomic_add_vector(sums + 32 * i, a);
    }
  }

  // Releases dS of which `part` has been read.
  CUTLASS_DEVICE void release(EmptyBarrier& empty, const Part& part) const {
    uint32_t all = 0;
    for (auto& query : part) {
      for (auto& four : query) all |= four.x | four.y;
    }
    arrive_after(all, empty, zero_);
  }
  // This lane's first query of a half. The lanes that read at once have queries 0 and 4, or 1 and 5, of their warp,
  // whose swizzled chunks lie in different banks.
  CUTLASS_DEVICE int first_query() const { return kWarpQueries * at_.warp + at_.lane / 8 % 2 * 4 + at_.lane / 16; }
  CUTLASS_DEVICE static void unpack(float (&x)[4], const uint2& four) {
    const float2 low = ptx::unpack<scalar_t>(four.x), high = ptx::unpack<scalar_t>(four.y);
    x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
  }
  // Reads this lane's query `index`. kNextTile: bytes to the next tile of keys. The number of a swizzled chunk differs
  // in bit 1 from one of a lane's queries to the next, and in bit 2 between the halves of a tile's keys.
  template <int kNextTile>
  CUTLASS_DEVICE void read(Query& x, const uint8_t* ds, int index) const {
    static_assert(kWarpQueries == 8 && kOwned == 64 && DsTile::kRowBytes == 128, "swizzled offsets");
    const uint32_t mine = shared_address(ds) + DsTile::offset(first_query(), at_.lane % 8 / 2) + at_.lane % 2 * 8;
    CUTLASS_PRAGMA_UNROLL
    for (int t = 0; t < kTiles; ++t) {
      CUTLASS_PRAGMA_UNROLL
      for (int h = 0; h < kHalves; ++h) {
        const uint32_t address = (mine ^ (32 * index + 64 * h)) + index * kNextQuery * DsTile::kRowBytes;
        x[kHalves * t + h] = load_two(address + t * kNextTile);
      }
    }
  }
  CUTLASS_DEVICE static uint2 load_two(uint32_t address) {
    uint2 x;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(address) : "memory");
    return x;
  }

  Shared& shared_;
  const BackwardArgs& args_;
  const ConsumerCoord& at_;
  const uint32_t zero_ = uint32_t(args_.Lq) >> 31;  // which ptxas does not know; threadIdx.y would be read again
  Slots slots_, sent_;
  float* sums_;                   // where this lane adds: its first query of a step, its first key of a tile
  int queries_left_, keys_left_;  // rows and columns of dbias2 from there on
  bool begun_ = false;            // a step has been added
};

}  // namespace ds4s::sm90
