// The shapes of the backward's kernels: tile sizes, what lies in shared memory, how registers are shared out.
#pragma once

#include "common/arch.h"
#include "sm90/backward/args.h"
#include "sm90/backward/cluster_tile_scheduler.h"
#include "sm90/backward/tile_scheduler.h"
#include "sm90/mma/rank1_mma.h"

namespace ds4s::sm90 {

template <int kRows_,     // rows n of a block; they share tiles of bias2
          int kTiles_,    // owned tiles of 64 of each n; they share what is walked over
          int kColumns_,  // columns of a step
          int kStages_,   // steps in flight
          int kBuffers_,  // places for owned tiles: 2, and the next ones arrive during the last steps (1: kHandsBack)
          int kQueries_ = 0,          // of keys: dq as well, of so many queries at most (dq_smem.h)
          int kClusterBlocks_ = 1,    // fused: blocks of a cluster, that have so many queries each
          bool kDqInGlobal_ = false,  // of keys: dq as well, by additions to accumulators in L2 (dq_global.h)
          bool kAddsDbias2_ = false>  // kDqInGlobal: dbias2 as well, where it is asked for (dbias2_global.h)
struct DqDkdvTiles {
  static constexpr int kRows = kRows_, kTiles = kTiles_, kColumns = kColumns_, kStages = kStages_, kBuffers = kBuffers_;
  static constexpr int kQueries = kQueries_, kClusterBlocks = kClusterBlocks_;
  static constexpr bool kDqInGlobal = kDqInGlobal_, kAddsDbias2 = kAddsDbias2_;
};

// dk and dv of owned keys, walking over queries (kKeys), or dq of owned queries, walking over keys.
//
//                 owned: first, second    walked over: first, second    results in place of the owned
//   kKeys         K, V                    Q, dO                         dk, dv
//   not kKeys     Q, dO                   K, V                          dq, -
//   kDqInShared        as kKeys, and dq from dS
template <typename Element_,  // half_t, bfloat16_t
          int kHeadDim_,      // tier of D and Dv
          bool kKeys_,        // what is owned
          bool kBias2_,       // bias2 is given
          typename Tiles>     // DqDkdvTiles
struct DqDkdvConfig {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kKeys = kKeys_, kBias2 = kBias2_;
  static constexpr int kRows = Tiles::kRows, kTiles = Tiles::kTiles, kColumns = Tiles::kColumns;
  static constexpr int kStages = Tiles::kStages, kBuffers = Tiles::kBuffers;

  static constexpr int kOwned = 64;                   // rows of one wgmma
  static constexpr int kWarpgroups = kRows * kTiles;  // consumers
  static constexpr bool kDqInShared = Tiles::kQueries > 0;
  static constexpr int kQueries = Tiles::kQueries, kClusterBlocks = Tiles::kClusterBlocks;  // fused
  static constexpr bool kDqInGlobal = Tiles::kDqInGlobal, kAddsDbias2 = Tiles::kAddsDbias2;
  // With one place for owned tiles, it is free for the next ones as soon as the last scores are computed. Results leave
  // from registers then, not through it.
  static constexpr bool kHandsBack = kBuffers == 1 && !kDqInShared;
  static_assert(kClusterBlocks <= 2, "one block finishes dk, the other dv");
  static constexpr int kNumThreads = 128 * (kWarpgroups + 1);  // the last warpgroup produces
  using Registers = cute::conditional_t<kDqInGlobal, RegisterShares<kWarpgroups, /*kBlocksPerSm=*/1, /*kProducer=*/56>,
                                        RegisterShares<kWarpgroups, /*kBlocksPerSm=*/1>>;  // writing dq takes many
  static_assert(!kDqInShared || (kKeys && kRows == 1), "a block has all keys of a row n, one after another");
  static_assert(kKeys || kColumns == Rank1Tile::kRows, "the product of -delta and ones");
  static_assert(!kDqInGlobal || (kKeys && kRows == 1 && kHandsBack), "two more warps of the producers");
  static_assert(kRows <= 3, "a warp of the producers for each row n, and one for tiles");

  using OwnedTile = SwizzledTile<kOwned, kHeadDim>;
  using WalkedTile = SwizzledTile<kColumns, kHeadDim>;
  using BiasTile = SwizzledTile<kKeys ? kColumns : kOwned, kKeys ? kOwned : kColumns>;  // queries by keys, as it came
  static constexpr int kHeadSteps = (kHeadDim + 15) / 16, kColumnSteps = kColumns / 16;
  static_assert(WalkedTile::kBytes % 1024 == 0, "tiles lie one behind the other");

  // What a block works on at a time: kRows rows from `row` on, kTiles tiles from `owned` on.
  struct Coordinates {
    int owned, head, row, batch;
  };
  template <typename Tile>
  struct Pair {
    alignas(1024) uint8_t first[Tile::kBytes];
    alignas(1024) uint8_t second[Tile::kBytes];
  };
  struct Stage {
    Pair<WalkedTile> walked[kRows];
    // Fused: dS takes its place.
    alignas(1024) uint8_t bias2[kBias2 || kDqInShared ? kTiles : 1][kBias2 || kDqInShared ? BiasTile::kBytes : 16];
  };
  static constexpr int kProductsBytes = (kKeys ? kColumns : kOwned) * Rank1Tile::kRowBytes;
  // Fused: dq of all queries, as a warpgroup's accumulators have it.
  struct DqTile {
    alignas(1024) float x[kHeadDim / 8][128][4];
  };
  struct Dq {
    DqTile tiles[kQueries / kColumns];
    EmptyBarrier full[kStages][kTiles];  // dS is there
    EmptyBarrier keys_read[kBuffers];
    EmptyBarrier ready[kTiles];  // split (cluster_reduce.h)
    FullBarrier received[kTiles];
  };
  struct NoDq {};
  static constexpr int kAccumulatorColumns = 64 * OwnedTile::kNumBoxes;  // kDqInGlobal: of dq in its accumulator
  // kDqInGlobal: dS on its way from one warpgroup to all, dq on its way from a accumulator.
  struct DqGlobalTiles {
    static constexpr int kPlaces = 4, kSums = 4;  // of each
    alignas(1024) uint8_t ds[kPlaces][kTiles][BiasTile::kBytes];
    float4 sums[kSums][64 * 16 / 4];
  };
  struct DqGlobalBarriers {
    EmptyBarrier full[DqGlobalTiles::kPlaces][kTiles], empty[DqGlobalTiles::kPlaces];
    EmptyBarrier accumulator_free, added;
    int accumulator;  // of the tile that accumulator_free is about
  };
  using Queue = TileQueue</*kReaders=*/4 * kWarpgroups + 3>;  // kDqInGlobal: all warps but the one that takes
  // What there is to compute of a tile.
  struct Visible {
    int tile;             // kDqInShared: which it is; args.num_tiles or more behind the last one
    bool first;           // kDqInShared: of a (b, n, h)
    int end;              // kDqInShared: behind the last one of this (b, n, h)
    int num_steps;        // 0: nothing
    uint32_t warpgroups;  // a bit for each one that sees a key, or whose keys are seen
  };
  struct Shared {
    Pair<OwnedTile> owned[kBuffers][kWarpgroups];
    Stage stages[kStages];
    cute::conditional_t<kDqInShared, Dq, NoDq> dq;
    cute::conditional_t<kDqInGlobal, DqGlobalTiles, NoDq> dq_global;
    // -delta of queries, owned or walked over, and what it is multiplied with (sm90/mma/rank1_mma.h).
    alignas(256) uint8_t ones[Rank1Terms::kOnesBytes];
    alignas(256) uint8_t products[kKeys ? kStages * kRows : kBuffers * kWarpgroups][kProductsBytes];
    // The other terms: of owned keys log2(e) bias1, of owned queries -log2(e) lse, for the exponents; of queries walked
    // over -lse / scale, of keys bias1 / scale, for the accumulators to begin with.
    float exponents[kBuffers][kWarpgroups][kOwned];
    alignas(8) float scores[kStages][kRows][kColumns];
    Visible visible[kBuffers];
    FullBarrier owned_full[kBuffers], full[kStages];
    EmptyBarrier owned_empty[kBuffers], empty[kStages];
    cute::conditional_t<kDqInGlobal, DqGlobalBarriers, NoDq> dq_global_barriers;
    cute::conditional_t<kDqInGlobal, Queue, NoDq> tile_queue;
  };
  static constexpr int kSharedBytes = int(sizeof(Shared));
  static_assert(kSharedBytes <= 227 * 1024, "a multiprocessor of 9.0 has 227 KiB for blocks");
  using Pipe = PipelineState<kStages>;
  using OwnedPipe = PipelineState<kBuffers>;

  // What a block walks over: everything, or its part in whole steps.
  struct Columns {
    int begin, end;
    CUTLASS_DEVICE int num_steps() const { return (end - begin + kColumns - 1) / kColumns; }
  };
  CUTLASS_DEVICE static Columns columns(const BackwardArgs& args) {
    int all = kKeys ? args.Lq : args.Lk;
    if (kClusterBlocks == 1) return {0, all};
    int part = (all + kClusterBlocks * kColumns - 1) / (kClusterBlocks * kColumns) * kColumns, begin = rank() * part;
    return {begin, min(begin + part, all)};
  }
  CUTLASS_DEVICE static int rank() { return kClusterBlocks == 1 ? 0 : int(cute::block_rank_in_cluster()); }
  CUTLASS_DEVICE static int num_owned(const BackwardArgs& args) { return kKeys ? args.Lk : args.Lq; }

  CUTLASS_DEVICE static Coordinates locate(const BackwardArgs& args, int tile) {
    Coordinates at;
    at.owned = tile % args.num_blocks * (kTiles * kOwned), tile /= args.num_blocks;
    if constexpr (kDqInGlobal) {  // bias2 of one head after another, and dbias2, stay in L2
      at.row = tile % args.N, tile /= args.N;
      at.head = tile % args.H, at.batch = tile / args.H;
      return at;
    }
    at.head = tile % args.H, tile /= args.H;
    at.row = tile % args.num_row_groups * kRows;
    at.batch = tile / args.num_row_groups;
    return at;
  }
  // What a tile walks over: all queries, or the steps with visible keys.
  struct QuerySteps {
    int column;
    CUTLASS_DEVICE int next() {
      column += kColumns;
      return column - kColumns;
    }
  };
  using KeySteps = VisibleSteps<kRows>;
  CUTLASS_DEVICE static auto steps(const BackwardArgs& args, const Coordinates& at) {
    if constexpr (kKeys) {
      return QuerySteps{columns(args).begin};
    } else {
      return KeySteps(args.mask, args.row_index(at.batch, at.row), min(kRows, args.N - at.row), args.Lk);
    }
  }
  CUTLASS_DEVICE static Visible visible(const BackwardArgs& args, const Coordinates& at) {
    Visible x{};
    for (int t = 0; t < kWarpgroups; ++t) {
      const int n = at.row + t / kTiles, l = at.owned + t % kTiles * kOwned;
      if (n >= args.N || l >= num_owned(args)) continue;
      const int64_t bn = args.row_index(at.batch, n);
      const bool sees = kKeys ? args.mask.units(bn, l, kOwned / KeyMask::kUnit) != 0 : !args.mask.sees_nothing(bn);
      x.warpgroups |= uint32_t(sees) << t;
    }
    if (x.warpgroups == 0) return x;
    if constexpr (kKeys) {
      x.num_steps = columns(args).num_steps();
    } else {
      x.num_steps = steps(args, at).count();
    }
    return x;
  }
  template <TileReader kReader>
  using Scheduler =
      cute::conditional_t<!kDqInShared, TileScheduler<DqDkdvConfig, kReader>,
                          cute::conditional_t<kReader == TileReader::kConsumer, PublishedTileScheduler<DqDkdvConfig>,
                                              GroupedTileScheduler<DqDkdvConfig>>>;
};

template <int kQueryTiles_,  // warpgroups one below the other: 64 queries each; they share keys and values
          int kKeyTiles_,    // warpgroups side by side; they share queries and gradients
          int kKeys_,        // keys of each: 64 or 128
          int kScores_,      // keys of one product Q K^T
          int kColumns_,     // keys of one product dO V^T: 64, or 32 to save registers
          int kStages_>      // products in flight: of each row n two
struct Dbias2Tiles {
  static constexpr int kQueryTiles = kQueryTiles_, kKeyTiles = kKeyTiles_, kKeys = kKeys_, kScores = kScores_;
  static constexpr int kColumns = kColumns_, kStages = kStages_;
};

// dbias2 of 64 queries by 64 or 128 keys for each warpgroup, walking over the rows n that see one of the keys.
template <typename Element_, int kHeadDim_, typename Tiles>
struct Dbias2Config {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kQueries = 64, kKeys = Tiles::kKeys;  // of a warpgroup
  static constexpr int kScores = Tiles::kScores, kColumns = Tiles::kColumns, kStages = Tiles::kStages;
  static constexpr int kQueryTiles = Tiles::kQueryTiles, kKeyTiles = Tiles::kKeyTiles;
  static constexpr int kBlockQueries = kQueries * kQueryTiles, kBlockKeys = kKeys * kKeyTiles;
  static constexpr int kWarpgroups = kQueryTiles * kKeyTiles;           // consumers
  static constexpr int kNumThreads = 128 * (kWarpgroups + 1);           // the last warpgroup produces
  static constexpr int kProducerRegisters = kWarpgroups < 4 ? 56 : 32;  // statistics are many: where there is room
  using Registers = RegisterShares<kWarpgroups, /*kBlocksPerSm=*/1, kProducerRegisters>;

  // No more than rows n in flight, so that none is a whole round of stages ahead: a barrier could not tell that.
  static constexpr int kStatisticsWarps = kStages / 2 < 3 ? kStages / 2 : 3;

  using QueryTile = SwizzledTile<kBlockQueries, kHeadDim>;
  using KeyTile = SwizzledTile<kBlockKeys, kHeadDim>;
  static constexpr int kHeadSteps = (kHeadDim + 15) / 16;

  // The operands of one product: Q and K of an n, or dO and V; and what enters it by sm90/mma/rank1_mma.h: -lse / scale
  // and bias1 / scale, or -delta.
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
    EmptyBarrier partner_empty[kStages];  // of a cluster: there the stage is free too
    int num_rows[kStages];                // of Q and K of a tile's first row n: how many there are
    ClusterTileQueue tile_queue;
  };
  static constexpr int kSharedBytes = int(sizeof(Shared));
  static_assert(kSharedBytes <= 227 * 1024, "a multiprocessor of 9.0 has 227 KiB for blocks");
  using Pipe = PipelineState<kStages>;

  // What a block works on at a time: kBlockQueries queries, kBlockKeys keys, a slice of the rows n.
  struct Coordinates {
    int query, key, head, batch, slice;
  };
  // A cluster of two blocks has the same keys: one block brings K to both, the other V.
  CUTLASS_DEVICE static int rank() { return int(cute::block_rank_in_cluster()); }
  CUTLASS_DEVICE static int num_blocks() { return int(cute::cluster_shape().x); }
  CUTLASS_DEVICE static Coordinates locate(const BackwardArgs& args, int tile) {
    Coordinates at;
    args.by_key_blocks(tile, at.key, tile);
    args.by_query_blocks(tile, at.query, tile);
    args.by_heads(tile, at.head, tile);
    args.by_batches(at.slice, at.batch, tile);
    at.key *= kBlockKeys, at.query = (at.query * num_blocks() + rank()) * kBlockQueries;
    return at;
  }
  // The rows n of a tile that see one of its keys, by their index in the list. There is always one: where none sees a
  // key it is N, of which the tensor memory accelerator reads zeros.
  struct Rows {
    const int32_t* list;  // from the first one on; null: they are neighbours
    int first, count;

    CUTLASS_DEVICE Rows(const BackwardArgs& args, const Coordinates& at) {
      const RowLists& lists = args.row_lists;
      int rest;  // one more for the first slices
      args.by_slices(count, rest, lists.count(at.batch, at.key / kBlockKeys));
      first = at.slice * count + min(at.slice, rest), count += at.slice < rest;
      list = lists.rows == nullptr || count == 0 ? nullptr : lists.list(at.batch, at.key / kBlockKeys) + first;
      if (count == 0) first = args.N, count = 1;
    }
    CUTLASS_DEVICE bool exist(const BackwardArgs& args) const { return first < args.N; }
    // Does not wait for what it loads.
    CUTLASS_DEVICE void load(int& row, int i) const {
      row = first + i;
      if (list != nullptr) ptx::load_int(row, list + i);
    }
  };
};

}  // namespace ds4s::sm90
