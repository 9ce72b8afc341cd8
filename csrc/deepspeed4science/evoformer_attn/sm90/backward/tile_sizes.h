// Tile sizes of the Hopper backward's kernels for each tier of D, with the measurement or the limit that chose them
// (one H200, bf16, both biases, ms; docs/history/sm90-design.md has more). Numbers only: the plan of a call needs them,
// too.
#pragma once

#include <type_traits>

namespace ds4s::sm90 {

constexpr int kOwned = 64;  // rows of one wgmma: keys or queries of a consumer warpgroup of kernel_dq_dkdv

// Tiles that a warp which waits for other blocks may be behind (tile_scheduler.h): a (b, n, h) of more tiles than all
// blocks have together would never be done.
constexpr int kTileQueueSize = 32;

template <int kRows_,     // rows n of a block; they share tiles of bias2
          int kTiles_,    // owned tiles of 64 of each n; they share what is streamed
          int kColumns_,  // columns of a step
          int kStages_,   // steps in flight
          int kBuffers_>  // of owned tiles: 2, and the next ones arrive during the last steps
struct DqDkdvTiles {
  static constexpr int kRows = kRows_, kTiles = kTiles_, kColumns = kColumns_, kStages = kStages_, kBuffers = kBuffers_;
  static constexpr int kQueries = 0, kClusterBlocks = 1;
  static constexpr bool kDqInGlobal = false, kAddsDbias2 = false;
};

// Of keys: dq as well, of so many queries at most (dq_smem.h), or of so many for each block of a cluster.
template <typename Tiles, int kQueries_, int kClusterBlocks_ = 1>
struct WithDqInShared : Tiles {
  static constexpr int kQueries = kQueries_, kClusterBlocks = kClusterBlocks_;
};

// Of keys: dq as well, by additions to accumulators in L2 (dq_global.h), and dbias2 where it is asked for
// (dbias2_global.h).
template <typename Tiles, bool kAddsDbias2_>
struct WithDqInGlobal : Tiles {
  static constexpr bool kDqInGlobal = true, kAddsDbias2 = kAddsDbias2_;
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
  static constexpr int kBlockQueries = 64 * kQueryTiles, kBlockKeys = kKeys * kKeyTiles;
};

// One of three, by the tier.
template <int kHeadDim, typename UpTo32, typename UpTo64, typename UpTo128>
using ForTier = std::conditional_t<kHeadDim <= 32, UpTo32, std::conditional_t<kHeadDim <= 64, UpTo64, UpTo128>>;

template <int kHeadDim>
struct BackwardTiles {
  // (1,768,768,4,32): 1.11, four warpgroups with 32 columns a step 1.27. Above D = 32 one row n: dk and dv of three
  // take more registers than there are. Above D = 64 32 columns, so that s and dp leave room for both results.
  using Keys = ForTier<kHeadDim, DqDkdvTiles<3, 1, 64, 4, 2>, DqDkdvTiles<1, 2, 64, 4, 2>, DqDkdvTiles<1, 2, 32, 6, 1>>;
  // (1,768,768,4,32): 0.99, two owned tiles for each warpgroup 1.10. D = 128: three stages are what fits.
  using Queries =
      ForTier<kHeadDim, DqDkdvTiles<3, 1, 64, 4, 2>, DqDkdvTiles<3, 1, 64, 3, 1>, DqDkdvTiles<1, 2, 64, 3, 1>>;
  // The same for so few rows that blocks for several would stay empty. (1,1,768,16,24): 0.043, as above 0.075.
  using FewKeys = ForTier<kHeadDim, DqDkdvTiles<1, 2, 64, 4, 2>, Keys, Keys>;
  using FewQueries = ForTier<kHeadDim, DqDkdvTiles<1, 2, 64, 4, 2>, DqDkdvTiles<1, 2, 64, 3, 1>, Queries>;

  // dk, dv and dq in one kernel: where dq of a (b, n, h), or of one half of its queries, fits into shared memory.
  // (1,384,384,4,32) 0.225, keys and queries apart 0.31; (1,768,768,4,32) 1.66, apart 2.10. At D = 48 two warpgroups.
  static constexpr bool kHasDqShared = kHeadDim <= 48;
  using Fused = std::conditional_t<kHeadDim <= 32, WithDqInShared<DqDkdvTiles<1, 3, 64, 3, 2>, /*kQueries=*/512>,
                                   WithDqInShared<DqDkdvTiles<1, 2, 64, 3, 1>, /*kQueries=*/384>>;
  // (1,768,768,4,32): 1.66; with two stages, and room for the next K and V, 2.55.
  using LongFused =
      std::conditional_t<kHeadDim <= 32, WithDqInShared<DqDkdvTiles<1, 3, 64, 3, 1>, /*kQueries=*/768>, Fused>;
  using SplitFused =
      std::conditional_t<kHeadDim <= 32,
                         WithDqInShared<DqDkdvTiles<1, 3, 64, 3, 1>, /*kQueries=*/768, /*kClusterBlocks=*/2>,
                         WithDqInShared<DqDkdvTiles<1, 2, 64, 3, 1>, /*kQueries=*/384, /*kClusterBlocks=*/2>>;

  // The same in larger clusters, and where these split keys; not measured at D = 48. (1,1,768,16,24), all kernels:
  // 0.036, with three tiles and three stages 0.041.
  static constexpr bool kHasLargeClusters = kHeadDim <= 32;
  using ClusterFused = std::conditional_t<
      kHeadDim <= 32, WithDqInShared<DqDkdvTiles<1, 2, 64, 4, 1>, /*kQueries=*/768, /*kClusterBlocks=*/2>, SplitFused>;

  // dk, dv and dq in one kernel, dq by additions; where a score costs more than its addition, dbias2 as well.
  // All kernels: (1,256,1024,4,64) 2.23, apart 2.52; (1,64,1024,8,128) 1.78, without dbias2 2.08, apart 2.18;
  // (1,48,768,16,48) 1.08, as SplitFused 1.14.
  static constexpr bool kHasDqGlobal = kHeadDim > 32;
  using DqGlobal =
      std::conditional_t<kHeadDim <= 64, WithDqInGlobal<DqDkdvTiles<1, 2, 64, 3, 1>, /*kAddsDbias2=*/false>,
                         WithDqInGlobal<DqDkdvTiles<1, 2, 32, 4, 1>, /*kAddsDbias2=*/true>>;

  // (1,768,768,4,32): 0.81, 128 x 128 tiles 0.94. (1,256,1024,4,64): 0.69, tiles of 64 keys 0.72; (1,48,768,16,48):
  // 0.35, with five stages 0.385. D = 128: three stages are what fits.
  using Dbias2 = ForTier<kHeadDim, Dbias2Tiles<1, 3, 64, 64, 64, 8>, Dbias2Tiles<2, 1, 128, 128, 64, 4>,
                         Dbias2Tiles<2, 1, 128, 128, 64, 3>>;
  // Where it leaves less of its tiles empty: (1,256,256,4,32) 0.045 instead of 0.055; (1,768,768,4,32) 0.90 for 0.83.
  using SquareDbias2 = ForTier<kHeadDim, Dbias2Tiles<2, 2, 64, 32, 32, 8>, Dbias2, Dbias2>;
};

}  // namespace ds4s::sm90
