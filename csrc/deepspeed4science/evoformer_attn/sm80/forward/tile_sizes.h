// Tile sizes of the forward for Sm70, Sm75 and Sm80, each with the limit or measurement that chose it (H200, bf16, both
// biases; docs/history/sm80-forward-design.md, Outcome).
#pragma once

#include "kernel_forward.h"

namespace ds4s {

// AttentionKernel's template arguments, whose limits kernel_forward.h has.
struct ForwardTileSizes {
  int queries, keys;             // of a block: kQueriesPerBlock, kKeysPerBlock_
  int stripes;                   // kStripes_: blocks of keys that arrive together
  int warps;                     // kWarpsWanted_: resident on a multiprocessor, not in a block
  int head_dim, head_dim_value;  // tiers of D and Dv; past kLargestTier, the number of channels computed at a time
  bool stages_bias2 = false;     // kStagesBias2_
};

// Up to this head dimension a block holds Q, K, V and O whole; beyond it kSingleValueIteration is false.
constexpr int kLargestTier = 128;

// Whether a multiprocessor has shared memory for so many blocks, each with two stages of kKeys keys and a row bias.
// Every block also takes 1 KiB for itself.
template <typename scalar_t, int kBlocks, int kQueries, int kKeys, int kHeadDim, int kHeadDimValue>
constexpr bool blocks_fit() {
  constexpr int kStage = PermutedTile<scalar_t, kKeys, kHeadDim, true>::kBytes +
                         PermutedTile<scalar_t, kKeys, kHeadDimValue, true>::kBytes + kKeys * 8;
  constexpr int kBlock = Tile<scalar_t, kQueries, kHeadDim>::kBytes + 2 * kStage + kForwardConstantsBytes + 1024;
  return kBlocks * kBlock <= shared_kib_of_multiprocessor() * 1024;
}

template <typename scalar_t, typename ArchTag, bool kAligned, int kHeadDim, int kHeadDimValue, bool kHasBias1,
          bool kHasBias2>
constexpr ForwardTileSizes forward_tiles() {
  constexpr int kLargest = kHeadDim > kHeadDimValue ? kHeadDim : kHeadDimValue;
  constexpr int kWarps = getWarpsPerSm<scalar_t, ArchTag>() - (kHeadDimValue > 32 ? 4 : 0);
  constexpr int D = kHeadDim, Dv = kHeadDimValue;
  constexpr bool kHasBias = kHasBias1 || kHasBias2;
  // Not timed; chosen for 44 KiB of shared memory, which compute capability 7.5 has, and no spills.
  if (kLargest > kLargestTier) return {64, sizeof(scalar_t) == 4 ? 32 : 64, 1, 8, 64, 64};
  // One key block at a time where shared memory is short, K and V pass through registers, or S is wide (float).
  constexpr bool kRoomy = sizeof(scalar_t) == 2 && kAligned && ArchTraits<ArchTag>::kHasCpAsync;
  constexpr bool kStaged = kRoomy && shared_kib_of_multiprocessor() >= 228;
  if (sizeof(scalar_t) == 4) return {kLargest > 64 ? 32 : 64, 32, 1, kWarps, D, Dv};
  // With two, one, five and six stripes instead of four: (1,768,768,4,32) 1.09, 1.13, 1.02 and 1.01 of the time; with
  // 16 warps 1.20, with the scores of two stripes at a time 1.17. Without biases 1.09 ms with one stripe and 1.14 with
  // four: the loop then waits for K and V only.
  if (kLargest <= 32) {
    constexpr int kStripes = kRoomy && kHasBias && blocks_fit<scalar_t, 3, 128, 128, D, Dv>() ? 4 : 1;
    // Without bias2 128 registers are enough for 16 warps: (1,256,512,8,32) 0.90, with bias1 0.91 of the time.
    constexpr bool kFits = kRoomy && !kHasBias2 && blocks_fit<scalar_t, 4, 128, 32 * kStripes, D, Dv>();
    return {128, 32, kStripes, kFits ? 16 : kWarps, D, Dv};
  }
  // Loading bias2 through shared memory takes no registers: (1,48,768,16,48) 0.476 instead of 0.517 ms, with one stripe
  // 0.492; (1,256,1024,4,64) 1.16 instead of 1.26, because 12 warps fit. Wider heads have no shared memory left; at
  // D <= 32 it is slower.
  constexpr bool kStagesBias2 = kStaged && kHasBias2 && kLargest > 32 && kLargest <= 64;
  if (kStagesBias2) return {128, 32, 2, 12, D, Dv, kStagesBias2};
  // (1,48,768,16,48): 0.52 ms, with one stripe 0.57, and 8 warps 0.67. (1,256,1024,4,64) with bias1 alone: 8 warps,
  // with 64 queries a block and the scores of two stripes at a time, take 1.04 of the time, at 384 1.08.
  if (kRoomy && (kLargest <= 48 || (kStaged && kLargest <= 64))) return {128, 32, kStaged ? 2 : 1, 12, D, Dv};
  if (kLargest <= 64) return {64, 32, 1, kWarps, D, Dv};
  // (1,64,1024,8,128): 1.20 ms, with one stripe 1.30. Two stripes take 106 KiB; 12.0, which runs PTX for 9.0, has 99.
  return {128, 32, kStaged && !has_ptx() ? 2 : 1, kWarps, D, Dv};
}

}  // namespace ds4s
