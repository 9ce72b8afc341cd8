// Tile sizes of the Hopper forward for each tier, with measurements (H200, bf16, both biases, ms;
// docs/history/sm90-design.md has more). Constants only, since plan.h includes them on the host.
#pragma once

#include <type_traits>

namespace ds4s::sm90 {

template <int kRows_,         // rows n of a block, with bias1 one or two; they share tiles of bias2
          int kQueryTiles_,   // tiles of 64 queries of a block; they share K and V
          int kStages_,       // pipeline stages
          int kBlocksPerSm_,  // blocks resident on one multiprocessor
          bool kPipelined_,   // O += P V of a step runs beside the exponentials of the next
          int kSplits_ = 1>   // warpgroups that divide the keys of a tile
struct ForwardTiles {
  static constexpr int kRows = kRows_, kQueryTiles = kQueryTiles_, kStages = kStages_, kBlocksPerSm = kBlocksPerSm_;
  static constexpr bool kPipelined = kPipelined_;
  static constexpr int kSplits = kSplits_;
};

template <int kHeadDim>
struct ForwardChoice {
  // (1,768,768,4,32): 0.90; not pipelined 0.99, 1 x 4 tiles 0.95, 3 x 1 1.28, three stages 0.95; five 0.994 of four.
  // (1,48,768,16,48): 0.288 (0.259 since); pipelined 0.306 (spills).
  // (1,256,1024,4,64): 0.648 (0.595 since); pipelined 0.82 (spills), 1 x 2 0.76.
  // (1,64,1024,8,128): 0.507; not pipelined 0.64, 1 x 3 tiles 0.78.
  using ManyRows = std::conditional_t<kHeadDim <= 32, ForwardTiles<2, 2, 5, 1, /*kPipelined=*/true>,
                                      std::conditional_t<kHeadDim <= 64, ForwardTiles<2, 2, 3, 1, /*kPipelined=*/false>,
                                                         ForwardTiles<1, 2, 3, 1, /*kPipelined=*/true>>>;
  // For N = 1, where no second row n shares bias2. ms, caches warm, a blank where a kernel does not run:
  //                          OneRow  FewTiles  FewestTiles   (1 x 1 tile, no splits, 2 blocks a multiprocessor)
  //   (1,1,384,16,24)                 0.0070    0.0057        0.0068
  //   (1,1,768,16,24)                 0.0102    0.0139        0.0115
  //   (1,1,2048,16,24)       0.0623   0.0479
  //   (5,1,768,16,24)        0.0345   0.0378
  using OneRow = std::conditional_t<kHeadDim <= 64, ForwardTiles<1, 4, 3, 1, /*kPipelined=*/kHeadDim <= 32>, ManyRows>;
  using FewTiles =
      std::conditional_t<kHeadDim <= 32, ForwardTiles<1, 2, 6, 1, /*kPipelined=*/true, /*kSplits=*/2>,
                         std::conditional_t<kHeadDim <= 64, ForwardTiles<1, 1, 3, 2, /*kPipelined=*/true>, ManyRows>>;
  using FewestTiles =
      std::conditional_t<kHeadDim <= 32, ForwardTiles<1, 1, 8, 1, /*kPipelined=*/true, /*kSplits=*/4>, FewTiles>;
  // They run where each multiprocessor would have fewer tiles of them than this.
  static constexpr int kMostFewTiles = kHeadDim <= 32 ? 2 : 4, kMostFewestTiles = kHeadDim <= 32 ? 1 : 0;
};

}  // namespace ds4s::sm90
