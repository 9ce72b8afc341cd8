// Shared memory of a forward block, before its types are defined: the head dimensions that fit, and the layout with
// kSingleValueIteration = false.
#pragma once

#include "../mma/smem_tile.h"

namespace ds4s {

// The largest size for one block (CUDA C++ Programming Guide, Technical Specifications per Compute
// Capability). 8.6, 8.9 and 12.0, which Sm80 serves too, have 101,376 bytes; the launch checks that.
template <typename ArchTag>
constexpr int max_shared_bytes() {
  return ArchTraits<ArchTag>::kCapability >= 80 ? 166912 : ArchTraits<ArchTag>::kCapability >= 75 ? 65536 : 98304;
}

template <int kNeededBytes, int kAvailableBytes>
struct FitsInSharedMemory {
  static constexpr bool kValue = kNeededBytes <= kAvailableBytes;
  static_assert(kValue,
                "this tile needs kNeededBytes of shared memory and its architecture has kAvailableBytes (both are in "
                "the name of this instantiation): take fewer queries or keys for a block, or a smaller kHeadDim");
};

constexpr int kForwardConstantsBytes = 96;  // ForwardLoads::Constants

// The layout after Q, K and V with kSingleValueIteration = false: for each row of warps the biases of 32 x 32 scores at
// a time, whose memory later holds parts of O; then for each warp the statistics of its rows.
template <int kNumWarps, int kWarpsM, int kBegin_, int kHeadDimValue>
struct MultiValueShared {
  static constexpr int kBiasPitch = 32 + 4;
  static constexpr int kBiasBytes = 32 * kBiasPitch * 4;  // of a warp
  static constexpr int kSumBytes = kNumWarps > kWarpsM ? 32 * kHeadDimValue * 4 : 0;
  static constexpr int kBegin = kBegin_;
  static constexpr int kRowsBegin = kBegin + kWarpsM * (kBiasBytes > kSumBytes ? kBiasBytes : kSumBytes);
  static constexpr int kBytes = kRowsBegin + kNumWarps * 32 * 4;
};

template <typename scalar_t, int kQueries, int kKeys>
constexpr int forward_shared_bytes(bool single_value_iteration, int head_dim) {
  auto tile = [](int rows, int cols) {  // Tile::kBytes; a SectorTile has at most 3 % more
    return (rows * ((cols * int(sizeof(scalar_t)) / 16) | 1) + rows / 8 * 2) * 16;
  };
  int columns = single_value_iteration || head_dim < 64 ? head_dim : 64;
  int loop = tile(kQueries, head_dim) + tile(kKeys, head_dim) + tile(kKeys, columns);
  int sums = kKeys > 32 ? kQueries * columns * 4 : 0, biases = kQueries * (32 + 4) * 4;
  int end = sums + kQueries * 8 * 4 > tile(kQueries, columns) ? sums + kQueries * 8 * 4 : tile(kQueries, columns);
  loop += single_value_iteration ? kKeys * 8 : (sums > biases ? sums : biases) + kQueries * kKeys / 8;
  return (loop > end ? loop : end) + (single_value_iteration ? kForwardConstantsBytes : 0);
}

// The default of AttentionKernel's kHeadDim_.
template <typename scalar_t, typename ArchTag, int kQueries, int kKeys>
constexpr int default_head_dim(bool single_value_iteration) {
  const int tiers[] = {128, 96, 64, 48, 32};
  for (int head_dim : tiers) {
    if (!single_value_iteration && head_dim > 64) continue;  // most heads have no more
    int bytes = forward_shared_bytes<scalar_t, kQueries, kKeys>(single_value_iteration, head_dim);
    if (bytes <= max_shared_bytes<ArchTag>()) return head_dim;
  }
  return 16;
}

}  // namespace ds4s
