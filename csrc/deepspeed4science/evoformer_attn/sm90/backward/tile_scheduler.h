// The tile schedulers of kernel_dq_dkdv's persistent blocks. A block computes
//
//   1. every gridDim.x-th tile (TileScheduler);
//   2. with dq in shared memory, all tiles of every gridDim.x-th (b, n, h), in clusters of every so many clusters
//      (GroupedTileScheduler for producers, PublishedTileScheduler for consumers);
//   3. with dq in global memory, unless rows n are paired, the next tile that no block has taken (TileScheduler,
//      TileQueue), of those that some row n sees (seen_tiles.h). The block's producer takes it from a counter and
//      passes it to all warps. Blocks take tiles in ascending order, so the tiles of one (b, n, h) run at the same
//      time, and no block waits for a tile that no block has taken.
#pragma once

#include <cute/arch/cluster_sm90.hpp>

#include "sm90/backward/args.h"
#include "sm90/backward/seen_tiles.h"
#include "sm90/backward/tile_sizes.h"
#include "sm90/mma/pipeline.h"

namespace ds4s::sm90 {

// Third order: a queue in shared memory, from the producer, which takes tiles, to the other warps.
template <int kReaders>
struct TileQueue {
  static constexpr int kSize = kTileQueueSize;
  using Pipe = PipelineState<kSize>;
  int tiles[kSize];
  EmptyBarrier full[kSize], empty[kSize];

  CUTLASS_DEVICE void init() {
    for (int i = 0; i < kSize; ++i) full[i].init(1), empty[i].init(kReaders);
  }
  CUTLASS_DEVICE int take(Pipe& pipe, const BackwardArgs& args, const SeenTiles& seen) {
    empty[pipe.index].wait(pipe.phase ^ 1);
    const int tile = tiles[pipe.index] = seen.tile(args, atomicAdd(args.next_tile, 1));
    full[pipe.index].arrive();
    pipe.advance();
    return tile;
  }
  // Called by all lanes of a warp.
  CUTLASS_DEVICE int read(Pipe& pipe) {
    full[pipe.index].wait(pipe.phase);
    const int tile = tiles[pipe.index];
    __syncwarp();
    if (threadIdx.x % 32 == 0) empty[pipe.index].arrive();
    pipe.advance();
    return tile;
  }
};

// Who has a scheduler: the thread that takes tiles for its block, all lanes of a warp, or a consumer warpgroup.
enum class TileReader { kTakes, kWarp, kConsumer };

// First and third order, one object for each warp. `tile` is at least args.num_tiles once all tiles are done.
template <typename Config, TileReader kReader>
struct TileScheduler {
  int tile;
  static constexpr int part = 0;

  CUTLASS_DEVICE TileScheduler(typename Config::Shared& shared, const BackwardArgs& args) {
    if constexpr (Config::kTakesTiles) {
      advance(shared, args);
    } else {
      tile = blockIdx.x;
    }
  }
  CUTLASS_DEVICE void advance(typename Config::Shared& shared, const BackwardArgs& args) {
    if constexpr (!Config::kTakesTiles) {
      tile += gridDim.x;
    } else if constexpr (kReader == TileReader::kTakes) {
      tile = shared.tile_queue.take(pipe_, args, shared.seen_tiles);
    } else {
      tile = shared.tile_queue.read(pipe_);
    }
  }

 private:
  typename TileQueue<1>::Pipe pipe_;
};

// Second order, for producers: the tiles of a (b, n, h) one after another, from the first to the last with a visible
// key, then those of the block's next (b, n, h). A row n without a visible key has its first tile only. With
// kHasQueryParts, all these tiles of one part of the queries come after those of the part before.
template <typename Config>
struct GroupedTileScheduler {
  int tile;
  bool first;  // the first tile of its (b, n, h)
  int end;     // the last tile of its (b, n, h), + 1
  int part = 0;

  CUTLASS_DEVICE GroupedTileScheduler(typename Config::Shared&, const BackwardArgs& args) : keys_(make_int2(0, 0)) {
    // The first time only loads keys_. A loop, so that there is one copy of this code: its size costs time.
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = -1; i <= 0; ++i) begin(args, first_pair() + i * step());
  }
  CUTLASS_DEVICE void advance(typename Config::Shared&, const BackwardArgs& args) {
    ++tile, first = false;
    if (tile < end) return;
    if constexpr (Config::kHasQueryParts) {
      if (++part < args.num_query_parts) {
        tile = begin_, first = true;
        return;
      }
      part = 0;
    }
    begin(args, args.by_blocks.div(tile - 1) + step());
  }

  // The number of the block's first (b, n, h), and the distance to its next one.
  CUTLASS_DEVICE static int first_pair() {
    return int(Config::kClusterBlocks == 1 ? blockIdx.x : cute::cluster_id_in_grid().x);
  }
  CUTLASS_DEVICE static int step() {
    return int(Config::kClusterBlocks == 1 ? gridDim.x : cute::cluster_grid_dims().x);
  }

 private:
  CUTLASS_DEVICE static int2 load(const BackwardArgs& args, int pair) {
    if (pair * args.by_blocks.divisor >= args.num_tiles) return make_int2(0, 0);
    if (Config::kClusterBlocks == 1 && !Config::kPairsRows) return args.mask.keys(args.by_heads.div(pair), args.Lk);
    const typename Config::Coordinates at = Config::locate(args, pair * args.by_blocks.divisor);
    if constexpr (Config::kPairsRows) return keys_of_cluster(args, at);
    return args.mask.keys(args.row_index(at.batch, at.row), args.Lk);
  }
  // The keys that one of a cluster's rows n sees.
  CUTLASS_DEVICE static int2 keys_of_cluster(const BackwardArgs& args, const typename Config::Coordinates& at) {
    int2 keys = make_int2(args.Lk, 0);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int n = at.row & ~1; n <= (at.row | 1) && n < args.N; ++n) {
      const int2 of_row = args.mask.keys(args.row_index(at.batch, n), args.Lk);
      if (of_row.x < of_row.y) keys.x = min(keys.x, of_row.x), keys.y = max(keys.y, of_row.y);
    }
    return keys;
  }
  CUTLASS_DEVICE void begin(const BackwardArgs& args, int pair) {
    constexpr int kKeys = Config::kTiles * Config::kOwned;
    if constexpr (Config::kSplitsKeys) {
      tile = pair * args.by_blocks.divisor + Config::rank(), end = tile + 1, first = true;
      return;
    }
    const bool sees = keys_.x < keys_.y;
    tile = end = pair * args.by_blocks.divisor, first = true;
    tile += sees ? keys_.x / kKeys : 0, end += sees ? (keys_.y + kKeys - 1) / kKeys : 1;
    begin_ = tile;
    keys_ = load(args, pair + step());  // a whole (b, n, h) ahead of its use
  }

  int begin_;  // the first tile of this (b, n, h)
  int2 keys_;  // the range that contains the visible keys of the next (b, n, h)
};

// Second order, for consumers: producers publish the tile together with the owned tiles K and V.
template <typename Config>
struct PublishedTileScheduler {
  int tile;

  CUTLASS_DEVICE PublishedTileScheduler(typename Config::Shared& shared, const BackwardArgs&) { read(shared); }
  CUTLASS_DEVICE void advance(typename Config::Shared& shared, const BackwardArgs&) {
    pipe_.advance();
    read(shared);
  }

 private:
  CUTLASS_DEVICE void read(typename Config::Shared& shared) {
    shared.owned_full[pipe_.index].wait(pipe_.phase);
    tile = uniform(shared.visible[pipe_.index].tile);
  }
  typename Config::OwnedPipe pipe_;
};

}  // namespace ds4s::sm90
