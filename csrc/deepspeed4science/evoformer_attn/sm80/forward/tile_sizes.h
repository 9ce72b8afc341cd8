// Tile sizes of the forward for Sm70, Sm75 and Sm80, each with the limit or measurement that chose it (H200, bf16, both
// biases; docs/history/sm80-forward-design.md, Outcome).
#pragma once

#include "kernel_forward.h"

namespace ds4s {

// The fields are AttentionKernel's template parameters of the same names.
struct ForwardTileSizes {
  int queries, keys, stripes, in_flight, warps;
  int head_dim, head_dim_value;  // tiers of D and Dv; past kLargestTier, the number of channels computed at a time
  bool stages_bias2 = false;
};

// Up to this head dimension a block holds Q, K, V and O whole; beyond it kSingleValueIteration is false.
constexpr int kLargestTier = 128;

template <typename scalar_t, typename ArchTag, bool kAligned, int kHeadDim, int kHeadDimValue, bool kHasBias1,
          bool kHasBias2>
constexpr ForwardTileSizes forward_tiles() {
  constexpr int kLargest = kHeadDim > kHeadDimValue ? kHeadDim : kHeadDimValue;
  constexpr int kWarps = getWarpsPerSm<scalar_t, ArchTag>() - (kHeadDimValue > 32 ? 4 : 0);
  constexpr int D = kHeadDim, Dv = kHeadDimValue;
  constexpr bool kHasBias = kHasBias1 || kHasBias2;
  // Not timed; chosen for 44 KiB of shared memory, which compute capability 7.5 has, and no spills.
  if (kLargest > kLargestTier) return {64, sizeof(scalar_t) == 4 ? 32 : 64, 1, 1, 8, 64, 64};
  // One key block at a time where shared memory is short, K and V pass through registers, or S is wide (float).
  constexpr bool kRoomy = sizeof(scalar_t) == 2 && kAligned && ArchTraits<ArchTag>::kHasCpAsync;
  constexpr bool kStaged = kRoomy && has_large_shared_memory();
  if (sizeof(scalar_t) == 4) return {kLargest > 64 ? 32 : 64, 32, 1, 1, kWarps, D, Dv};
  // (1,768,768,4,32): 1.44 ms; with one stripe 1.58, with two 1.57, with 16 warps 1.73, with two stripes in flight
  // 1.69. Without biases 1.09 with one stripe and 1.14 with four: the loop then waits for K and V only.
  if (kLargest <= 32) return {128, 32, kStaged && kHasBias ? 4 : 1, 1, kWarps, D, Dv};
  // Loading bias2 through shared memory takes no registers: (1,48,768,16,48) 0.476 instead of 0.517 ms, with one stripe
  // 0.492; (1,256,1024,4,64) 1.16 instead of 1.26, because 12 warps fit. Wider heads have no shared memory left; at
  // D <= 32 it is slower.
  constexpr bool kStagesBias2 = kStaged && kHasBias2 && kLargest > 32 && kLargest <= 64;
  if (kStagesBias2) return {128, 32, 2, 1, 12, D, Dv, kStagesBias2};
  // (1,48,768,16,48): 0.52 ms, with one stripe 0.57, and 8 warps 0.67.
  if (kLargest <= 48 && kRoomy) return {128, 32, kStaged ? 2 : 1, 1, 12, D, Dv};
  // (1,256,1024,4,64): 1.25 ms, with one in flight 1.33 to 1.43, one stripe 1.37 to 1.42, 128 x 32 1.37.
  if (kLargest <= 64) return {64, 32, kStaged ? 2 : 1, kStaged ? 2 : 1, kWarps, D, Dv};
  // (1,64,1024,8,128): 1.20 ms, with one stripe 1.30.
  return {128, 32, kStaged ? 2 : 1, 1, kWarps, D, Dv};
}

}  // namespace ds4s
