// Tile sizes of the Hopper backward's passes.
#pragma once

#include "sm90/backward/config.h"

namespace ds4s::sm90 {

// For each tier; docs/kernels-sm90.md has what was measured.
template <int kHeadDim>
struct BackwardChoice {
  using Keys = cute::conditional_t<
      kHeadDim <= 32, DqDkdvTiles<3, 1, 64, 4, 2>,
      cute::conditional_t<kHeadDim <= 64, DqDkdvTiles<1, 2, 64, 4, 2>, DqDkdvTiles<1, 2, 32, 6, 1>>>;
  using Queries = cute::conditional_t<
      kHeadDim <= 32, DqDkdvTiles<3, 1, 64, 4, 2>,
      cute::conditional_t<kHeadDim <= 64, DqDkdvTiles<3, 1, 64, 3, 1>, DqDkdvTiles<1, 2, 64, 3, 1>>>;
  // The same for so few rows that blocks for several would stay empty: (1,1,768,16,24).
  using FewKeys = cute::conditional_t<kHeadDim <= 32, DqDkdvTiles<1, 2, 64, 4, 2>, Keys>;
  using FewQueries = cute::conditional_t<kHeadDim <= 32, DqDkdvTiles<1, 2, 64, 4, 2>,
                                         cute::conditional_t<kHeadDim <= 64, DqDkdvTiles<1, 2, 64, 3, 1>, Queries>>;
  // dk, dv and dq in one pass: where dq of a row and head fits into shared memory, or one half of it.
  static constexpr bool kHasDqShared = kHeadDim <= 48;
  using Fused = cute::conditional_t<kHeadDim <= 32, DqDkdvTiles<1, 3, 64, 3, 2, 512>, DqDkdvTiles<1, 2, 64, 3, 1, 384>>;
  using LongFused = cute::conditional_t<kHeadDim <= 32, DqDkdvTiles<1, 3, 64, 3, 1, 768>, Fused>;
  using SplitFused =
      cute::conditional_t<kHeadDim <= 32, DqDkdvTiles<1, 3, 64, 3, 1, 768, 2>, DqDkdvTiles<1, 2, 64, 3, 1, 384, 2>>;
  // dk, dv and dq in one pass, dq by additions; where a score costs more than its addition, dbias2 as well.
  static constexpr bool kHasDqGlobal = kHeadDim > 32;
  using DqGlobal = cute::conditional_t<kHeadDim <= 64, DqDkdvTiles<1, 2, 64, 3, 1, 0, 1, true>,
                                       DqDkdvTiles<1, 2, 32, 4, 1, 0, 1, true, true>>;
  using Bias = cute::conditional_t<
      kHeadDim <= 32, Dbias2Tiles<1, 3, 64, 64, 64, 8>,
      cute::conditional_t<kHeadDim <= 64, Dbias2Tiles<2, 1, 128, 128, 64, 4>, Dbias2Tiles<2, 1, 128, 128, 64, 3>>>;
  // Where it leaves less of its tiles empty: (1,256,256,4,32) 0.045 instead of 0.055; (1,768,768,4,32) 0.90 for 0.83.
  using SquareBias = cute::conditional_t<kHeadDim <= 32, Dbias2Tiles<2, 2, 64, 32, 32, 8>, Bias>;
};

}  // namespace ds4s::sm90
