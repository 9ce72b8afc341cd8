// Tile sizes of the Hopper backward's kernels for each tier of D, with the measurement or the limit that chose them
// (one H200, bf16, both biases, B, N, L, H, D, ms; docs/history/sm90-design.md has more). Constants only, since plan.h
// includes them on the host.
#pragma once

#include <type_traits>

namespace ds4s::sm90 {

constexpr int kOwned = 64;  // rows of one wgmma: keys or queries of a consumer warpgroup of kernel_dq_dkdv

// Depth of TileQueue (tile_scheduler.h): a warp that waits for other blocks may be so many tiles behind its producer. A
// (b, n, h) may have at most so many tiles for each block, or it would never be done (docs/kernels/dq-accumulators.md,
// H4).
constexpr int kTileQueueSize = 32;

// Resident blocks of preprocess on a multiprocessor, by its registers.
constexpr int kPreprocessBlocks = 7;

template <int kRows_,     // rows n of a block; they share tiles of bias2
          int kTiles_,    // owned tiles of 64 keys or queries, for each n; they share the streamed tiles
          int kColumns_,  // streamed queries or keys of a step
          int kStages_,   // pipeline stages
          int kBuffers_>  // buffers of owned tiles; with 2, the next tiles arrive during the last steps
struct DqDkdvTiles {
  static constexpr int kRows = kRows_, kTiles = kTiles_, kColumns = kColumns_, kStages = kStages_, kBuffers = kBuffers_;
  static constexpr int kQueries = 0, kClusterBlocks = 1;
  static constexpr bool kDqInGlobal = false, kAddsDbias2 = false, kSplitsKeys = false, kComputesDelta = false;
  static constexpr bool kDeltaInMemory = false;
  static constexpr bool kHasDqWarpgroup = false, kPairsRows = false, kHasQueryParts = false;
};

// For keys: the kernel also computes dq, in shared memory (dq_smem.h), of at most kQueries queries for each block of a
// cluster.
template <typename Tiles, int kQueries_, int kClusterBlocks_ = 1>
struct WithDqInShared : Tiles {
  static constexpr int kQueries = kQueries_, kClusterBlocks = kClusterBlocks_;
};

// The same in clusters of blocks that have all queries and a tile of keys each.
template <typename Tiles, int kQueries>
struct WithSplitKeys : WithDqInShared<Tiles, kQueries, /*kClusterBlocks=*/2> {
  static constexpr bool kSplitsKeys = true;
};

// WithDqInShared, and a warpgroup of its own computes dq (dq_warpgroup.h) instead of the consumers in turn. There are
// registers for two consumers then, not for three.
template <typename Tiles>
struct WithDqWarpgroup : Tiles {
  static constexpr bool kHasDqWarpgroup = true;
};

// WithDqWarpgroup, in clusters of two blocks for two neighbouring rows n, which add the sum of their dS to dbias2
// (row_pairs.h).
template <typename Tiles>
struct WithRowPairs : Tiles {
  static constexpr bool kPairsRows = true;
};

// WithRowPairs, for any number of queries: a block computes one part of these after another, each of at most kQueries
// and with all keys. dk and dv wait in memory for the next part (partial_sums.h).
template <typename Tiles>
struct WithQueryParts : Tiles {
  static constexpr bool kHasQueryParts = true;
};
constexpr int kTileExponents = 4;  // of a tile of keys: one for each warp (partial_sums.h)

constexpr int kDeltaWarps = 2;  // of the producers, where the kernel also computes delta and keeps its terms

// WithDqInShared, and the kernel also computes delta (row_delta.h). That takes 10 KiB of shared memory more, which are
// left up to 512 queries.
template <typename Tiles>
struct WithDelta : Tiles {
  static constexpr bool kComputesDelta = true;
};

// WithDelta, where its terms do not fit: delta passes through memory from one warp to another, which is kDeltaRing
// steps behind at most. A (b, n, h) has more steps. That takes 4 KiB of shared memory.
template <typename Tiles>
struct WithDeltaInMemory : WithDelta<Tiles> {
  static constexpr bool kDeltaInMemory = true;
};
constexpr int kDeltaRing = 8;

// For keys: the kernel also computes dq, by additions to accumulators in L2 (dq_global.h), and if kAddsDbias2 also
// dbias2 (dbias2_global.h).
template <typename Tiles, bool kAddsDbias2_>
struct WithDqInGlobal : Tiles {
  static constexpr bool kDqInGlobal = true, kAddsDbias2 = kAddsDbias2_;
};

// Steps of a section of the queries, which has an accumulator of its own where whole (b, n, h) would need too much
// memory (dq_global.h).
constexpr int kSectionSteps = 4;

template <int kQueryTiles_,  // warpgroups along the queries, 64 queries each; they share K and V
          int kKeyTiles_,    // warpgroups along the keys; they share Q and dO
          int kKeys_,        // keys of a warpgroup: 64 or 128
          int kColumns_,     // keys of one product: 64, or 32 to save registers
          int kStages_>      // pipeline stages; each row n takes two, one for each product
struct Dbias2Tiles {
  static constexpr int kQueryTiles = kQueryTiles_, kKeyTiles = kKeyTiles_, kKeys = kKeys_, kColumns = kColumns_;
  static constexpr int kStages = kStages_;
  static constexpr int kBlockQueries = 64 * kQueryTiles, kBlockKeys = kKeys * kKeyTiles;
  // The kernel also has mainloops for 56 and 48 keys of a warpgroup.
  static constexpr bool kCutsEvenly = kKeys == 64 && kColumns == 64;
};

// One of three types, by the tier of D.
template <int kHeadDim, typename UpTo32, typename UpTo64, typename UpTo128>
using ForTier = std::conditional_t<kHeadDim <= 32, UpTo32, std::conditional_t<kHeadDim <= 64, UpTo64, UpTo128>>;

template <int kHeadDim>
struct BackwardTiles {
  // (1,768,768,4,32): 1.11, four warpgroups with 32 columns a step 1.27. Above D = 32, dk and dv of three rows n would
  // take more registers than there are. Above D = 64, with 32 columns a step, s and dp leave room for dk and dv.
  using Keys = ForTier<kHeadDim, DqDkdvTiles<3, 1, 64, 4, 2>, DqDkdvTiles<1, 2, 64, 4, 2>, DqDkdvTiles<1, 2, 32, 6, 1>>;
  // (1,768,768,4,32): 0.99, two owned tiles for each warpgroup 1.10. At D = 128 no more than three stages fit.
  using Queries =
      ForTier<kHeadDim, DqDkdvTiles<3, 1, 64, 4, 2>, DqDkdvTiles<3, 1, 64, 3, 1>, DqDkdvTiles<1, 2, 64, 3, 1>>;
  // For few rows n, where warpgroups for three would stay idle. (1,1,768,16,24): 0.043, with the tiles above 0.075.
  using FewKeys = ForTier<kHeadDim, DqDkdvTiles<1, 2, 64, 4, 2>, Keys, Keys>;
  using FewQueries = ForTier<kHeadDim, DqDkdvTiles<1, 2, 64, 4, 2>, DqDkdvTiles<1, 2, 64, 3, 1>, Queries>;

  // dk, dv and dq in one kernel, where dq of a (b, n, h) fits into the shared memory of a block or cluster.
  // (1,384,384,4,32) 0.225, in two kernels 0.31; (1,768,768,4,32) 1.66, in two 2.10. At D = 48 two warpgroups fit.
  static constexpr bool kHasDqShared = kHeadDim <= 48;
  using Fused =
      std::conditional_t<kHeadDim <= 32, WithDelta<WithDqInShared<DqDkdvTiles<1, 3, 64, 3, 2>, /*kQueries=*/512>>,
                         WithDqInShared<DqDkdvTiles<1, 2, 64, 3, 1>, /*kQueries=*/384>>;
  // Where rounds of 128 keys are less than one and a half times as many as rounds of 192. All kernels of
  // (1,256,256,4,32), one H100: 0.136, with two consumers that compute dq 0.144, with three 0.161.
  using NarrowFused = std::conditional_t<
      kHeadDim <= 32, WithDqWarpgroup<WithDelta<WithDqInShared<DqDkdvTiles<1, 2, 64, 4, 2>, /*kQueries=*/512>>>, Fused>;
  // All kernels of (1,768,768,4,32), one H100: 2.47, with three consumers that compute dq 2.53; of
  // (1,640,640,4,32) 1.50 and 1.66.
  using LongFused =
      std::conditional_t<kHeadDim <= 32, WithDqWarpgroup<WithDqInShared<DqDkdvTiles<1, 2, 64, 3, 2>, /*kQueries=*/768>>,
                         Fused>;
  // All kernels of (1,384,384,4,32), one H100: 0.88 of the time with a kernel for dbias2. Of (1,768,768,4,32), one
  // H200: 2.09, with delta from a kernel before 2.11, with sums that leave by TMA as well 2.21.
  using NarrowPaired = std::conditional_t<kHeadDim <= 32, WithRowPairs<NarrowFused>, Fused>;
  using LongPaired = std::conditional_t<kHeadDim <= 32, WithRowPairs<WithDeltaInMemory<LongFused>>, Fused>;
  // (1,1536,1536,4,32), one H100: 17.7, as SplitFused with a kernel for dbias2 19.6. The code for parts costs
  // (1,768,768,4,32) a hundredth; delta in this kernel would cost 1.025.
  using PartsPaired = std::conditional_t<kHeadDim <= 32, WithQueryParts<WithRowPairs<LongFused>>, Fused>;
  using SplitFused = std::conditional_t<
      kHeadDim <= 32,
      WithDqWarpgroup<WithDqInShared<DqDkdvTiles<1, 2, 64, 3, 2>, /*kQueries=*/768, /*kClusterBlocks=*/2>>,
      WithDqInShared<DqDkdvTiles<1, 2, 64, 3, 1>, /*kQueries=*/384, /*kClusterBlocks=*/2>>;

  // Clusters of three and more blocks, and ClusterFused, whose clusters divide the keys; not measured at D = 48.
  // ClusterFused, (1,1,768,16,24), all kernels: 0.036, with three tiles and three stages 0.041.
  static constexpr bool kHasLargeClusters = kHeadDim <= 32;
  using ClusterFused =
      std::conditional_t<kHeadDim <= 32, WithSplitKeys<DqDkdvTiles<1, 2, 64, 4, 1>, /*kQueries=*/768>, SplitFused>;

  // dk, dv and dq in one kernel, dq by additions; dbias2 too, above D = 64, where computing a score again costs more
  // than adding its dS. All kernels: (1,256,1024,4,64) 2.23, with keys, queries and dbias2 in three 2.52;
  // (1,64,1024,8,128) 1.78, with dbias2 in a kernel of its own 2.08, in three 2.18; (1,48,768,16,48) 1.08, as
  // SplitFused 1.14.
  static constexpr bool kHasDqGlobal = kHeadDim > 32;
  using DqGlobal =
      std::conditional_t<kHeadDim <= 64, WithDqInGlobal<DqDkdvTiles<1, 2, 64, 3, 1>, /*kAddsDbias2=*/false>,
                         WithDqInGlobal<DqDkdvTiles<1, 2, 32, 4, 1>, /*kAddsDbias2=*/true>>;
  // (1,48,768,16,48), one H200: 0.91, with dbias2 in a kernel of its own 1.07.
  static constexpr bool kHasDqGlobalPaired = kHasDqGlobal && kHeadDim <= 64;
  using DqGlobalPaired = std::conditional_t<kHasDqGlobalPaired, WithRowPairs<DqGlobal>, DqGlobal>;

  // (1,768,768,4,32): 0.81, 128 x 128 tiles 0.94. (1,256,1024,4,64): 0.62, with products of 128 keys and packed bias2
  // 0.68, tiles of 64 keys 0.72. At D = 128 no more than three stages fit.
  using Dbias2 =
      ForTier<kHeadDim, Dbias2Tiles<1, 3, 64, 64, 8>, Dbias2Tiles<2, 1, 128, 64, 4>, Dbias2Tiles<2, 1, 128, 64, 3>>;
  // Where square tiles cover less beyond Lq and Lk: (1,256,256,4,32) 0.045 instead of 0.055. Where both cover the same,
  // Dbias2 is faster: (1,768,768,4,32) 0.83 instead of 0.90.
  using SquareDbias2 = ForTier<kHeadDim, Dbias2Tiles<2, 2, 64, 32, 8>, Dbias2, Dbias2>;
};

}  // namespace ds4s::sm90
