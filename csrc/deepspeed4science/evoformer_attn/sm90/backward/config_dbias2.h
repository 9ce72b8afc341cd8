// The configuration of kernel_dbias2: tile sizes, the layout of shared memory, the registers of each warpgroup.
#pragma once

#include "sm90/backward/cluster_tile_scheduler.h"
#include "sm90/backward/tile_sizes.h"
#include "sm90/mma/rank1_mma.h"

namespace ds4s::sm90 {

// dbias2 of 64 queries by 64 or 128 keys for each warpgroup, for all rows n that see one of the keys.
template <typename scalar_t_, int kHeadDim_, typename Tiles>
struct Dbias2Config {
  using scalar_t = scalar_t_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kQueries = 64, kKeys = Tiles::kKeys;  // of a warpgroup
  static constexpr int kColumns = Tiles::kColumns, kStages = Tiles::kStages;
  static constexpr int kQueryTiles = Tiles::kQueryTiles, kKeyTiles = Tiles::kKeyTiles;
  static constexpr bool kCutsEvenly = Tiles::kCutsEvenly;
  static constexpr int kBlockQueries = kQueries * kQueryTiles, kBlockKeys = kKeys * kKeyTiles;
  static constexpr int kWarpgroups = kQueryTiles * kKeyTiles;  // consumers
  static constexpr int kNumThreads = 128 * (kWarpgroups + 1);  // the last warpgroup produces
  // Whether the rows n may be divided by RowPartition. Producers with 32 registers would spill more of them.
  static constexpr bool kPartitionsRows = kWarpgroups <= 3;
  // Statistics take many; tiles of 128 keys leave 56, four consumers 32.
  static constexpr int kProducerRegisters = kWarpgroups == 3 ? 80 : kWarpgroups < 3 ? 56 : 32;
  using Registers = RegisterShares<kWarpgroups, /*kBlocksPerSm=*/1, kProducerRegisters>;

  // At most as many warps as rows n in flight. So no warp is ahead by all stages: the phase bit of a barrier could not
  // tell that from being in step.
  static constexpr int kStatisticsWarps = kStages / 2 < 3 ? kStages / 2 : 3;

  using QueryTile = SwizzledTile<kBlockQueries, kHeadDim>;
  using KeyTile = SwizzledTile<kBlockKeys, kHeadDim>;
  static constexpr int kHeadSteps = (kHeadDim + 15) / 16;

  // The operands of one product: Q and K of a row n, or dO and V; and the terms of its rank-1 update
  // (sm90/mma/rank1_mma.h): -lse / scale and bias1 / scale, or -delta.
  template <typename Tile>
  struct Operand {
    alignas(1024) uint8_t tile[Tile::kBytes];
    uint8_t terms[Tile::kRows * Rank1Tile::kRowBytes];
  };
  struct Stage {
    Operand<QueryTile> queries;
    Operand<KeyTile> keys;
  };
  struct Shared {
    alignas(256) uint8_t ones[Rank1Terms::kOnesBytes];
    Stage stages[kStages];
    FullBarrier full[kStages];
    EmptyBarrier empty[kStages];
    EmptyBarrier partner_empty[kStages];  // in a cluster: the stage is free in the other block, too
    int num_rows[kStages];                // in stages with Q and K of a tile's first row n: the tile's number of rows n
    ClusterTileQueue tile_queue;
  };
  static constexpr int kSharedBytes = int(sizeof(Shared));
  static_assert(kSharedBytes <= 227 * 1024, "a multiprocessor of 9.0 has 227 KiB for blocks");
  using Pipe = PipelineState<kStages>;
  // The second of the two stages of a row n. With an even number of stages both are of one phase.
  CUTLASS_DEVICE static Pipe second(Pipe pipe) {
    if constexpr (kStages % 2 == 0) return {pipe.index + 1, pipe.phase};
    pipe.advance();
    return pipe;
  }

  // One tile of a block: kBlockQueries queries, tile_keys keys (at most kBlockKeys), a slice of the rows n.
  struct Coordinates {
    int query, key, head, batch, slice;
    int list;  // of the rows n that see the tile's keys, among the lists of the batch
  };
  // The two blocks of a cluster have the same keys: one block loads K for both, the other V.
  CUTLASS_DEVICE static int rank() { return int(cute::block_rank_in_cluster()); }
  CUTLASS_DEVICE static int num_blocks() { return int(cute::cluster_shape().x); }
  CUTLASS_DEVICE static Coordinates locate(const BackwardArgs& args, int tile_keys, int tile) {
    Coordinates at;
    args.by_key_blocks(tile, at.list, tile);
    args.by_query_blocks(tile, at.query, tile);
    args.by_heads(tile, at.head, tile);
    args.by_batches(at.slice, at.batch, tile);
    at.key = at.list * tile_keys, at.query = (at.query * num_blocks() + rank()) * kBlockQueries;
    return at;
  }
  // The rows n of a tile that see one of its keys, by their index in the list. There is always one: where none sees a
  // key it is N, of which the tensor memory accelerator reads zeros.
  struct Rows {
    const int32_t* list;  // from the tile's first row n on; null: neighbouring rows n
    int first, count;

    CUTLASS_DEVICE Rows(const BackwardArgs& args, int num_slices, const Coordinates& at) {
      const RowLists& lists = args.row_lists;
      const int all = lists.count(at.batch, at.list);
      count = all / num_slices;
      const int rest = all - count * num_slices;  // one more for the first slices
      first = at.slice * count + min(at.slice, rest), count += at.slice < rest;
      list = lists.rows == nullptr || count == 0 ? nullptr : lists.list(at.batch, at.list) + first;
      if (count == 0) first = args.N, count = 1;
    }
    // `of_piece` rows n, from the from-th on.
    CUTLASS_DEVICE Rows(const BackwardArgs& args, const Coordinates& at, int from, int of_piece)
        : first(from), count(of_piece) {
      const RowLists& lists = args.row_lists;
      list = lists.rows == nullptr ? nullptr : lists.list(at.batch, at.list) + from;
    }
    CUTLASS_DEVICE bool exist(const BackwardArgs& args) const { return first < args.N; }
    // Starts the load of a row index and does not wait for it.
    CUTLASS_DEVICE void load(int& row, int i) const {
      row = first + i;
      if (list != nullptr) ptx::load_int(row, list + i);
    }
  };
};

}  // namespace ds4s::sm90
