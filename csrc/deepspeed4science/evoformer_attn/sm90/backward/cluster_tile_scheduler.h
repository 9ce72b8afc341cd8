// The tile scheduler of kernel_dbias2's persistent clusters. A cluster computes the pieces that RowPartition gives it,
// where all tiles have equally many rows n. Otherwise tiles are slices of the rows n, and a cluster computes every so
// many-th tile or, where tiles differ in cost (hidden keys), the next one from a counter in global memory. Its first
// block takes the tile from the counter and sends the number to all blocks; each block's barrier counts the bytes.
//
// Invariant: a queue entry is reused without waiting for its readers, because no warp is 16 tiles behind the thread
// that takes tiles. A tile has at least one step, and a step takes two stages. The producers of a cluster are at most
// all stages apart, consumers are at most all stages behind their producer, and consumers wait for each statistics warp
// in one of three steps. With up to eight stages, all of this together is less than 16 tiles.
#pragma once

#include "sm90/backward/cluster_barrier.h"
#include "sm90/backward/row_partition.h"
#include "sm90/backward/visible_slices.h"

namespace ds4s::sm90 {

struct ClusterTileQueue {
  static constexpr int kSize = 32;
  using Pipe = PipelineState<kSize>;
  int tiles[kSize];
  FullBarrier full[kSize];
  int num_slices, num_tiles;  // slices of the rows n, tiles of all slices
  int tile_keys;              // keys of a tile
  // With RowPartition: this cluster's pieces, by the numbers of their tiles among those of one slice.
  bool is_partitioned;
  RowPartition::Piece pieces[RowPartition::kMostPieces];
  int num_rows;  // of a tile

  CUTLASS_DEVICE void init() {
    for (auto& barrier : full) barrier.init(1);
  }
  // Called by a warp before all other reads. most_keys: of a tile, where no key is hidden.
  template <bool kPartitionsRows>
  CUTLASS_DEVICE void count_tiles(const BackwardArgs& args, int most_keys) {
    const int num_clusters = int(cute::cluster_grid_dims().x), all_lists = args.by_key_blocks.divisor;
    const VisibleSlices slices = args.num_slices > 0 ? VisibleSlices{args.num_slices, args.N, all_lists}
                                                     : choose_visible_slices(args, num_clusters);
    const int lane = int(threadIdx.x) % 32;
    if constexpr (kPartitionsRows) partition_rows(args, slices, num_clusters);
    if (lane != 0) return;
    num_slices = slices.num_slices, num_tiles = args.num_tiles * num_slices;
    tile_keys = args.row_lists.tile_keys == nullptr ? most_keys : *args.row_lists.tile_keys;
  }

 private:
  CUTLASS_DEVICE void partition_rows(const BackwardArgs& args, const VisibleSlices& slices, int num_clusters) {
    const int lane = int(threadIdx.x) % 32, all_lists = args.by_key_blocks.divisor;
    const RowPartition partition(args.num_tiles / all_lists * slices.lists, slices.num_rows, num_clusters);
    if (lane < RowPartition::kMostPieces && slices.lists > 0) {
      RowPartition::Piece piece = partition.piece(int(cute::cluster_id_in_grid().x), lane);
      // The tiles of the partition are those of the first `lists` lists of each batch.
      if (slices.lists < all_lists) piece.tile = piece.tile / slices.lists * all_lists + piece.tile % slices.lists;
      pieces[lane] = piece;
    }
    if (lane != 0) return;
    num_rows = slices.num_rows;
    is_partitioned = args.partitions_rows && num_rows > 0 && partition.suits();
  }
};

// One object for each warp. `tile` is at least the queue's num_tiles once all tiles are done. kTakes: for the one
// thread that takes tiles.
template <typename Config, bool kTakes>
class ClusterTileScheduler {
 public:
  int tile;

  CUTLASS_DEVICE ClusterTileScheduler(ClusterTileQueue& tile_queue, const BackwardArgs& args)
      : queue_(tile_queue), args_(args) {
    if (is_partitioned()) {
      take_piece();
    } else if (args.next_dbias2_tile == nullptr) {
      tile = int(cute::cluster_id_in_grid().x);
    } else {
      advance();
    }
  }
  CUTLASS_DEVICE void advance() {
    if (is_partitioned()) {
      ++piece_;
      return take_piece();
    }
    if (args_.next_dbias2_tile == nullptr) {
      tile += int(cute::cluster_grid_dims().x);
      return;
    }
    if constexpr (kTakes) take_next();
    wait_in_cluster(queue_.full[pipe_.index], pipe_.phase);
    tile = queue_.tiles[pipe_.index];
    pipe_.advance(), has_next_ = false;
  }
  // Takes the next tile, unless it is taken already. To be called near the end of a tile: if a tile were taken earlier,
  // idle clusters could not compute it.
  CUTLASS_DEVICE void take_next() {
    if (has_next_ || args_.next_dbias2_tile == nullptr || is_partitioned()) return;
    has_next_ = true;
    FullBarrier& full = queue_.full[pipe_.index];
    int& entry = queue_.tiles[pipe_.index];
    const uint32_t num_blocks = cute::cluster_shape().x;
    if (num_blocks > 1) full.arrive_and_expect_tx(sizeof(int));
    if (cute::block_rank_in_cluster() != 0) return;
    const int number = take();
    if (num_blocks == 1) {  // st.async is not legal without a cluster
      entry = number;
      full.arrive();
      return;
    }
    for (uint32_t rank = 0; rank < num_blocks; ++rank) store_async(&entry, number, full, rank);
  }

  // The rows n of the tile, whose coordinates are `at`.
  CUTLASS_DEVICE typename Config::Rows rows(const typename Config::Coordinates& at) const {
    if (!is_partitioned()) return typename Config::Rows(args_, queue_.num_slices, at);
    const RowPartition::Piece& piece = queue_.pieces[piece_];
    return typename Config::Rows(args_, at, piece.first, piece.count);
  }
  // Whether others add to the same part of dbias2.
  CUTLASS_DEVICE bool adds() const {
    if (!args_.adds_dbias2) return false;
    return is_partitioned() ? queue_.pieces[piece_].count < queue_.num_rows : queue_.num_slices > 1;
  }

 private:
  CUTLASS_DEVICE bool is_partitioned() const { return Config::kPartitionsRows && queue_.is_partitioned; }
  CUTLASS_DEVICE void take_piece() {
    const RowPartition::Piece& piece = queue_.pieces[piece_];
    tile = piece.count == 0 ? queue_.num_tiles : piece.tile;
  }

  // Tiles to which nothing is added are skipped.
  CUTLASS_DEVICE int take() {
    int number;
    do {
      number = atomicAdd(args_.next_dbias2_tile, 1);
    } while (number < queue_.num_tiles && args_.adds_dbias2 &&
             !Config::Rows(args_, queue_.num_slices, Config::locate(args_, queue_.tile_keys, number)).exist(args_));
    return number;
  }

  ClusterTileQueue& queue_;
  const BackwardArgs& args_;
  bool has_next_ = false;
  int piece_ = 0;  // of the partition
  ClusterTileQueue::Pipe pipe_;
};

}  // namespace ds4s::sm90
