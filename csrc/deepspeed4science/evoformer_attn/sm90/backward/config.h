// The configuration of kernel_dq_dkdv: tile sizes, the layout of shared memory, the registers of each warpgroup.
#pragma once

#include "common/arch.h"
#include "sm90/backward/args.h"
#include "sm90/backward/seen_tiles.h"
#include "sm90/backward/tile_scheduler.h"
#include "sm90/backward/tile_sizes.h"
#include "sm90/mma/rank1_mma.h"

namespace ds4s::sm90 {

// kernel_dq_dkdv computes dk and dv of owned keys and streams queries (kKeys), or dq of owned queries and streams keys.
//
//                 owned: first, second    streamed: first, second    results for the owned rows
//   kKeys         K, V                    Q, dO                      dk, dv
//   not kKeys     Q, dO                   K, V                       dq, -
//   kDqInShared   as kKeys                as kKeys                   dk, dv; and dq from dS, in shared memory
//   kDqInGlobal   as kKeys                as kKeys                   dk, dv; and dq from dS, by additions in L2
template <typename scalar_t_,  // half_t, bfloat16_t
          int kHeadDim_,       // tier of D and Dv
          bool kKeys_,         // a warpgroup owns keys, not queries
          bool kHasBias2_,     // bias2 is given
          typename Tiles>      // DqDkdvTiles
struct DqDkdvConfig {
  using scalar_t = scalar_t_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kKeys = kKeys_, kHasBias2 = kHasBias2_;
  static constexpr int kRows = Tiles::kRows, kTiles = Tiles::kTiles, kColumns = Tiles::kColumns;
  static constexpr int kStages = Tiles::kStages, kBuffers = Tiles::kBuffers;

  static constexpr int kOwned = sm90::kOwned;
  static constexpr int kWarpgroups = kRows * kTiles;  // consumers
  static constexpr bool kDqInShared = Tiles::kQueries > 0;
  static constexpr bool kSplitsKeys = Tiles::kSplitsKeys;
  static constexpr int kQueries = Tiles::kQueries, kClusterBlocks = Tiles::kClusterBlocks;  // kDqInShared
  static constexpr bool kDqInGlobal = Tiles::kDqInGlobal, kAddsDbias2 = Tiles::kAddsDbias2;
  // A single buffer for owned tiles is released as soon as the last product has read them; results then leave from
  // registers instead of through the buffer. Not measured with dq in shared memory at D = 48.
  static constexpr bool kReleasesEarly = kBuffers == 1 && !kDqInShared;
  static_assert(kClusterBlocks <= 2, "1, or 2: a launch says how many");
  static constexpr bool kHasDqWarpgroup = Tiles::kHasDqWarpgroup;  // the one after the consumers (dq_warpgroup.h)
  static constexpr bool kPairsRows = Tiles::kPairsRows;            // and another one for dbias2 (row_pairs.h)
  static constexpr bool kHasQueryParts = Tiles::kHasQueryParts;    // one part of the queries after another
  // dk and dv leave through a buffer of their own. Otherwise, and without a warpgroup for dq, through that of K and V
  // or, with kStoresFromRegisters, without one.
  static constexpr bool kHasResultsBuffer = kHasDqWarpgroup && !kPairsRows;
  static constexpr bool kStoresFromRegisters = kReleasesEarly || (kHasDqWarpgroup && !kHasResultsBuffer);
  static constexpr bool kTakesTurns = kDqInShared && !kHasDqWarpgroup;  // each consumer computes dq of some steps
  // delta may be in dq.
  static constexpr bool kDeltaInDq = kDqInGlobal && kPairsRows;
  // The producers' warpgroup, which is the last one.
  static constexpr int kProducers = kWarpgroups + kHasDqWarpgroup + kPairsRows;
  static constexpr int kNumThreads = 128 * (kProducers + 1);
  // Warps of the producers compute delta (row_delta.h): two, which keep its terms in shared memory, or one, which
  // stores it in memory.
  static constexpr bool kComputesDelta = Tiles::kComputesDelta, kDeltaInMemory = Tiles::kDeltaInMemory;
  static constexpr bool kHasDeltaTerms = kComputesDelta && !kDeltaInMemory;
  static constexpr int kDeltaWarps = kDeltaInMemory ? 1 : sm90::kDeltaWarps;
  static constexpr bool kDenseProducts = kComputesDelta || kPairsRows;
  static constexpr bool kHalfDqSums = std::is_same_v<scalar_t, cutlass::bfloat16_t>;  // dq_sums.h
  // Writing dq from accumulators takes many.
  static constexpr int kProducerRegisters =
      kDqInGlobal ? (kHalfDqSums && kHeadDim <= 64 ? 64 : 56) : usual_producer_registers(kWarpgroups);
  static constexpr int kDqRegisters = 56, kDbias2Registers = 48;
  using Registers = RegisterShares<kWarpgroups, /*kBlocksPerSm=*/1, kProducerRegisters,
                                   kHasDqWarpgroup ? kDqRegisters : 0, kPairsRows ? kDbias2Registers : 0>;
  static_assert(!kDqInShared || (kKeys && kRows == 1), "a block has all keys of a row n, one after another");
  static_assert(!kComputesDelta || (kDqInShared && kClusterBlocks == 1), "a block has all queries of a row n");
  static_assert(!kPairsRows || (kHasBias2 && kRows == 1 && kTiles == 2 && kClusterBlocks == 1), "row_pairs.h");
  static_assert(!kPairsRows || kHasDqWarpgroup || kDqInGlobal, "row_pairs.h");
  static_assert(!kHasDqWarpgroup || (kDqInShared && !kSplitsKeys), "consumers store parts of dq together");
  static_assert(!kHasQueryParts || (kPairsRows && kStoresFromRegisters && !kComputesDelta), "partial_sums.h");
  static_assert(kKeys || kColumns == Rank1Tile::kRows, "the product of -delta and ones");
  static_assert(!kDqInGlobal || (kKeys && kRows == 1 && kReleasesEarly), "two more warps of the producers");
  static_assert(kRows <= 3, "a warp of the producers for each row n, and one for tiles");

  using OwnedTile = SwizzledTile<kOwned, kHeadDim>;
  using StreamedTile = SwizzledTile<kColumns, kHeadDim>;
  using BiasTile = SwizzledTile<kKeys ? kColumns : kOwned, kKeys ? kOwned : kColumns>;  // queries by keys, as it came
  static constexpr int kHeadSteps = (kHeadDim + 15) / 16, kColumnSteps = kColumns / 16;
  static_assert(StreamedTile::kBytes % 1024 == 0, "tiles lie one behind the other");

  // One tile of a block: kRows rows n from `row` on, kTiles owned tiles from `owned` on, and a part of the queries.
  struct Coordinates {
    int owned, head, row, batch, part;
  };
  template <typename Tile>
  struct Pair {
    alignas(1024) uint8_t first[Tile::kBytes];
    alignas(1024) uint8_t second[Tile::kBytes];
  };
  struct Stage {
    Pair<StreamedTile> streamed[kRows];
    // kDqInShared: dS overwrites bias2.
    alignas(
        1024) uint8_t bias2[kHasBias2 || kDqInShared ? kTiles : 1][kHasBias2 || kDqInShared ? BiasTile::kBytes : 16];
  };
  static constexpr int kProductsBytes = (kKeys ? kColumns : kOwned) * (kDenseProducts ? 16 : Rank1Tile::kRowBytes);
  // The terms of -delta, of streamed or owned queries, in 16 bytes each (kDenseProducts) or 32.
  struct alignas(256) Products {
    uint8_t tiles[kKeys ? kStages * kRows : kBuffers * kWarpgroups][kProductsBytes];
  };
  // kDqInShared: dq of all queries in the order of a warpgroup's accumulators.
  struct DqTile {
    float x[kHeadDim / 8][128][4];
  };
  struct DqClusterBarriers {
    EmptyBarrier ready[3][kTiles];
    FullBarrier received[2][kTiles];
  };
  // kPairsRows (row_pairs.h): half of a step's queries.
  struct RowPairTiles {
    static constexpr int kQueries = kColumns / 2, kWarpQueries = kQueries / 4;
    static constexpr int kSlots = 2, kTileBytes = kQueries * BiasTile::kRowBytes, kSlotBytes = kTiles * kTileBytes;
    uint8_t ds[kSlots][kTiles][kTileBytes];  // from the other block
    FullBarrier full[kSlots];                // the other block's dS has arrived
    EmptyBarrier empty[kSlots];              // the other block has read what this one has sent
    EmptyBarrier ready[kStages];             // the other block's stage may be filled
  };
  struct Nothing {};
  struct Dq {
    DqTile tiles[kQueries / kColumns];
    // dk and dv on their way to memory.
    cute::conditional_t<kHasResultsBuffer, uint8_t[kTiles][2][OwnedTile::kBytes], Nothing> results;
    EmptyBarrier full[kStages];        // dS of all tiles is stored
    EmptyBarrier keys_read[kBuffers];  // kTakesTurns: by the products of all warpgroups
    cute::conditional_t<(kClusterBlocks > 1), DqClusterBarriers, Nothing> cluster;  // cluster_reduce.h
  };
  // kComputesDelta: parts of O and dO of which warps compute delta. kHasDeltaTerms: the terms of -delta of all queries
  // of a (b, n, h).
  struct DeltaTiles {
    static constexpr int kSlots = 2;
    using Tile = SwizzledTile<16, kHeadDim>;
    uint8_t o[kDeltaWarps][kSlots][Tile::kBytes], do_[kDeltaWarps][kSlots][Tile::kBytes];
    cute::conditional_t<kHasDeltaTerms, uint4[kQueries], Nothing> terms;
  };
  // As many steps have barriers: all of a (b, n, h), or a ring.
  static constexpr int kDeltaSteps = kDeltaInMemory ? kDeltaRing : kQueries / kColumns;
  struct DeltaBarriers {
    FullBarrier loaded[kDeltaWarps][DeltaTiles::kSlots];
    EmptyBarrier full[kDeltaSteps];  // a step's delta is stored
    // kHasDeltaTerms: and has been read by the products of the last tile of the (b, n, h). Otherwise: `full` may be
    // used again.
    EmptyBarrier empty[kDeltaSteps];
  };
  // kDqInGlobal: dS, which one warpgroup stores and all read; and parts of dq between an accumulator and the result.
  struct DqGlobalTiles {
    static constexpr int kDsStages = kPairsRows ? 3 : 4, kSums = kHalfDqSums ? 8 : 4;
    alignas(1024) uint8_t ds[kDsStages][kTiles][BiasTile::kBytes];
    uint4 sums[kSums][64 * 16 / (kHalfDqSums ? 8 : 4)];
  };
  struct DqGlobalBarriers {
    EmptyBarrier full[DqGlobalTiles::kDsStages];   // dS of all tiles is stored
    EmptyBarrier empty[DqGlobalTiles::kDsStages];  // and has been read
    // Of every second section of the queries. accumulators: what accumulator_free announces.
    EmptyBarrier accumulator_free[2], added[2];
    int accumulators[2];
    float factor;  // of the tile, of float16 sums (dq_range.h)
  };
  // Elsewhere a block's tiles are known beforehand (tile_scheduler.h).
  static constexpr bool kTakesTiles = kDqInGlobal && !kPairsRows;
  using Queue =
      TileQueue</*kReaders=*/4 * kWarpgroups + 3>;  // kDqInGlobal: read by all warps but the one that fills it
  // What the producer publishes to the consumers about a tile.
  struct UnlocatedVisible {
    int tile;  // `tile`, `first` and `end` are unused; see LocatedVisible
    bool first;
    int end;
    int num_steps;        // 0: nothing
    uint32_t warpgroups;  // a bit for each warpgroup whose queries see a key, or whose keys are seen
  };
  // kDqInShared: also which tile it is; consumers read this together with the tile's operands.
  struct alignas(16) LocatedVisible {
    Coordinates at;
    int tile;       // at least args.num_tiles: there is no more tile
    bool first;     // the first tile of its (b, n, h)
    int end;        // the last tile of its (b, n, h), + 1
    int num_steps;  // 0: nothing
    uint32_t warpgroups;
  };
  using Visible = cute::conditional_t<kDqInShared, LocatedVisible, UnlocatedVisible>;
  struct Shared {
    Pair<OwnedTile> owned[kBuffers][kWarpgroups];
    Stage stages[kStages];
    // Aligned as members, so that their sizes are not rounded up: at D = 32 kNarrowPaired has 46 bytes left, kFused 62.
    alignas(kComputesDelta ? 1024 : 1) cute::conditional_t<kComputesDelta, DeltaTiles, Nothing> delta;
    alignas(kDqInShared ? 1024 : 1) cute::conditional_t<kDqInShared, Dq, Nothing> dq;
    cute::conditional_t<kComputesDelta, DeltaBarriers, Nothing> delta_barriers;
    cute::conditional_t<kDqInGlobal, DqGlobalTiles, Nothing> dq_global;
    alignas(kPairsRows ? 128 : 1) cute::conditional_t<kPairsRows, RowPairTiles, Nothing> pairs;
    // The ones that -delta is multiplied by (sm90/mma/rank1_mma.h).
    alignas(256) uint8_t ones[Rank1Terms::kOnesBytes];
    cute::conditional_t<kHasDeltaTerms, Nothing, Products> products;
    // The other terms. Exponents: log2(e) bias1 of owned keys, -log2(e) lse of owned queries. Initial values of the
    // accumulators (scores): -lse / scale of streamed queries, bias1 / scale of streamed keys.
    float exponents[kBuffers][kWarpgroups][kOwned];
    alignas(8) float scores[kStages][kRows][kColumns];
    Visible visible[kBuffers];
    FullBarrier owned_full[kBuffers], full[kStages];
    EmptyBarrier owned_empty[kBuffers], empty[kStages];
    cute::conditional_t<kDqInGlobal, DqGlobalBarriers, Nothing> dq_global_barriers;
    cute::conditional_t<kTakesTiles, Queue, Nothing> tile_queue;
    cute::conditional_t<kTakesTiles, SeenTiles, Nothing> seen_tiles;
    cute::conditional_t<kKeys, Nothing, int[kStages]> first_key;  // of the streamed keys
  };
  static constexpr int kSharedBytes = int(sizeof(Shared));
  static_assert(kSharedBytes <= 227 * 1024, "a multiprocessor of 9.0 has 227 KiB for blocks");
  using Pipe = PipelineState<kStages>;
  using OwnedPipe = PipelineState<kBuffers>;
  using DeltaRing = PipelineState<kDeltaSteps>;  // of DeltaBarriers (kDeltaInMemory)

  // The columns that a block streams for a tile: all or, in whole steps, its part of a cluster's or the tile's part.
  struct Columns {
    int begin, end;
    CUTLASS_DEVICE int num_steps() const { return (end - begin + kColumns - 1) / kColumns; }
  };
  CUTLASS_DEVICE static Columns columns(const BackwardArgs& args, int part) {
    int all = kKeys ? args.Lq : args.Lk;
    if (kClusterBlocks == 1 && !kHasQueryParts) return {0, all};
    const int begin = kSplitsKeys ? 0 : (kHasQueryParts ? part : rank()) * args.queries_of_part;
    return {begin, min(begin + args.queries_of_part, all)};
  }
  CUTLASS_DEVICE static int rank() { return kClusterBlocks == 1 ? 0 : int(cute::block_rank_in_cluster()); }
  CUTLASS_DEVICE static int num_owned(const BackwardArgs& args) { return kKeys ? args.Lk : args.Lq; }

  CUTLASS_DEVICE static Coordinates locate(const BackwardArgs& args, int tile, int part = 0) {
    Coordinates at;
    at.part = part;
    if constexpr (kPairsRows && kDqInGlobal) {  // the blocks of a cluster have neighbouring tiles
      int pair;
      args.by_blocks(pair, at.owned, tile / 2);
      // A cluster takes every so many-th tile: not always the same keys, which may be hidden in all rows n.
      at.owned = args.by_blocks.rem(at.owned + pair) * kTiles * kOwned;
      const int block = tile % 2;
      args.by_row_groups(tile, at.row, pair);
      args.by_heads(at.batch, at.head, tile);
      at.row = 2 * at.row + block;
      return at;
    }
    args.by_blocks(tile, at.owned, tile);
    at.owned *= kTiles * kOwned;
    const int block = kPairsRows ? tile % 2 : 0;  // the blocks of a cluster have neighbouring tiles
    if constexpr (kPairsRows) tile /= 2;
    // One head after another, so that its bias2 (kDqInGlobal and kPairsRows: and dbias2) stays in L2.
    const bool heads_outside = kDqInGlobal || ((kClusterBlocks > 1 || kHasQueryParts) && args.heads_outside);
    int inner, outer;
    (heads_outside ? args.by_row_groups : args.by_heads)(tile, inner, tile);
    (heads_outside ? args.by_heads : args.by_row_groups)(at.batch, outer, tile);
    at.head = heads_outside ? outer : inner;
    at.row = (kPairsRows ? 2 : kRows) * (heads_outside ? inner : outer) + block;
    return at;
  }
  // The steps of a tile: all queries, or the steps with visible keys.
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
      return QuerySteps{columns(args, at.part).begin};
    } else {
      return KeySteps(args.mask, args.row_index(at.batch, at.row), min(kRows, args.N - at.row), args.Lk);
    }
  }
  CUTLASS_DEVICE static Visible visible(const BackwardArgs& args, const Coordinates& at) {
    Visible x{};
    for (int r = 0; r < kRows; ++r) {
      const int n = at.row + r;
      if (n >= args.N) continue;
      const int64_t bn = args.row_index(at.batch, n);
      constexpr int kUnits = kOwned / KeyMask::kUnit;
      const uint32_t seen = kKeys                        ? args.mask.units(bn, at.owned, kTiles * kUnits)
                            : args.mask.sees_nothing(bn) ? 0
                                                         : ~0u;
      for (int t = 0; t < kTiles; ++t) {
        const bool sees = (seen >> t * kUnits & ((1u << kUnits) - 1)) != 0 && at.owned + t * kOwned < num_owned(args);
        x.warpgroups |= uint32_t(sees) << (r * kTiles + t);
      }
    }
    if constexpr (kPairsRows) {  // the blocks of a cluster take the same tiles
      const int other = at.row ^ 1;
      const bool other_sees = other < args.N && args.mask.units(args.row_index(at.batch, other), at.owned,
                                                                kTiles * kOwned / KeyMask::kUnit) != 0;
      if (x.warpgroups == 0 && !other_sees) return x;
      x.num_steps = columns(args, at.part).num_steps();
      return x;
    }
    if (x.warpgroups == 0 && !kSplitsKeys) return x;  // with split keys this block must add zeros to dq
    if constexpr (kKeys) {
      x.num_steps = columns(args, at.part).num_steps();
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

}  // namespace ds4s::sm90
