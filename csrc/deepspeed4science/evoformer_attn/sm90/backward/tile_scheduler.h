// The order of a persistent block's tiles: every gridDim.x-th tile, all tiles of every so many-th (b, n, h), or the
// next tile that no block has taken.
//
// In the third order the block's producer takes the next tile from a counter and passes it to all warps. Blocks take
// tiles in ascending order, so the tiles of one (b, n, h) run at the same time, and no block waits for one that has not
// begun.
#pragma once

#include <cute/arch/cluster_sm90.hpp>

#include "sm90/backward/args.h"
#include "sm90/backward/tile_sizes.h"
#include "sm90/mma/pipeline.h"

namespace ds4s::sm90 {

// In shared memory.
template <int kReaders>
struct TileQueue {
  static constexpr int kSize = kTileQueueSize;
  using Pipe = PipelineState<kSize>;
  int tiles[kSize];
  EmptyBarrier full[kSize], empty[kSize];

  CUTLASS_DEVICE void init() {
    for (int i = 0; i < kSize; ++i) full[i].init(1), empty[i].init(kReaders);
  }
  CUTLASS_DEVICE int take(Pipe& pipe, int* counter) {
    empty[pipe.index].wait(pipe.phase ^ 1);
    const int tile = tiles[pipe.index] = atomicAdd(counter, 1);
    full[pipe.index].arrive();
    pipe.advance();
    return tile;
  }
  // By a warp, or by one lane of it.
  CUTLASS_DEVICE int read(Pipe& pipe, bool warp) {
    full[pipe.index].wait(pipe.phase);
    const int tile = tiles[pipe.index];
    if (warp) __syncwarp();
    if (!warp || threadIdx.x % 32 == 0) empty[pipe.index].arrive();
    pipe.advance();
    return tile;
  }
};

enum class TileReader { kTakes, kWarp, kLane, kConsumer };

// One warp's way through them; `tile` is args.num_tiles or more behind the last one.
template <typename Config, TileReader kReader>
struct TileScheduler {
  int tile;

  CUTLASS_DEVICE TileScheduler(typename Config::Shared& shared, const BackwardArgs& args) {
    if constexpr (Config::kDqInGlobal) {
      advance(shared, args);
    } else {
      tile = blockIdx.x;
    }
  }
  CUTLASS_DEVICE void advance(typename Config::Shared& shared, const BackwardArgs& args) {
    if constexpr (!Config::kDqInGlobal) {
      tile += gridDim.x;
    } else if constexpr (kReader == TileReader::kTakes) {
      tile = shared.tile_queue.take(pipe_, args.next_tile);
    } else {
      tile = shared.tile_queue.read(pipe_, kReader != TileReader::kLane);
    }
  }

 private:
  typename TileQueue<1>::Pipe pipe_;
};

// kDqInShared, for its producers: the tiles of a (b, n, h) one after another, from the first that sees a key to the
// last; of a row n that sees nothing the first one. Then the next (b, n, h) of this block.
template <typename Config>
struct GroupedTileScheduler {
  int tile;
  bool first;  // the first tile of its (b, n, h)
  int end;     // the last tile of its (b, n, h), + 1

  CUTLASS_DEVICE GroupedTileScheduler(typename Config::Shared&, const BackwardArgs& args)
      : keys_(load(args, first_pair())) {
    begin(args, first_pair());
  }
  CUTLASS_DEVICE void advance(typename Config::Shared&, const BackwardArgs& args) {
    ++tile, first = false;
    if (tile == end) begin(args, (tile - 1) / args.num_blocks + step());
  }

 private:
  CUTLASS_DEVICE static int first_pair() {
    return int(Config::kClusterBlocks == 1 ? blockIdx.x : cute::cluster_id_in_grid().x);
  }
  CUTLASS_DEVICE static int step() {
    return int(Config::kClusterBlocks == 1 ? gridDim.x : cute::cluster_grid_dims().x);
  }
  CUTLASS_DEVICE static int2 load(const BackwardArgs& args, int pair) {
    if (pair * args.num_blocks >= args.num_tiles) return make_int2(0, 0);
    if (Config::kClusterBlocks == 1) return args.mask.keys(pair / args.H, args.Lk);
    const typename Config::Coordinates at = Config::locate(args, pair * args.num_blocks);
    return args.mask.keys(args.row_index(at.batch, at.row), args.Lk);
  }
  CUTLASS_DEVICE void begin(const BackwardArgs& args, int pair) {
    constexpr int kKeys = Config::kTiles * Config::kOwned;
    if (Config::splits_keys(args)) {
      tile = pair * args.num_blocks + Config::rank(), end = tile + 1, first = true;
      return;
    }
    const bool sees = keys_.x < keys_.y;
    tile = end = pair * args.num_blocks, first = true;
    tile += sees ? keys_.x / kKeys : 0, end += sees ? (keys_.y + kKeys - 1) / kKeys : 1;
    keys_ = load(args, pair + step());  // long before it is needed
  }

  int2 keys_;  // in which the next (b, n, h) has visible ones
};

// The same order for the consumers, who read it together with the owned tiles.
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
