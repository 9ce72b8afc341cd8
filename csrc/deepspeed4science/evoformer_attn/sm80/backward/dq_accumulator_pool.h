// The float32 accumulators of dq in the fused kernel: which one each pair (b n, h) uses, and its address.
//
// Some lie in the workspace; where these are too few, others lie in the memory of dk and dv of the last rows n, which
// form groups, the hosts:
//
//   rows n         0 .........................| group 1 | group 2 | group 3 |
//   accumulators   the workspace's, then those in group 3, 2 and 1
//
// A pair may use accumulators in groups after its own (S4, dq_accumulator.h); group 3 uses the workspace's only. So a
// row n of a group can write its dk and dv when the last pairs of the accumulators there are done, all of them of
// groups before, and until then nearly as many of the group's pairs are under way as in other groups.
#pragma once

#include <cutlass/detail/helper_macros.hpp>

#include "sm80/backward/dq_accumulator_group.h"

namespace ds4s {

// The layout of an accumulator is that of the matrix instruction's: for each 16 queries and 8 channels, four values of
// each lane, of queries lane / 4 and lane / 4 + 8. So a warp adds to 512 neighbouring bytes at a time.
template <int kHeadDim>
struct DqAccumulatorLayout {
  static constexpr int kRows = 16, kTile = kRows * 8;
  CUTLASS_HOST_DEVICE static constexpr int tile_offset(int tile) { return tile * kTile; }
  CUTLASS_HOST_DEVICE static constexpr int lane_offset(int lane) { return 4 * lane; }
};

struct DqAccumulatorPool {
  float* own;              // the accumulators in the workspace; zeros while no pair uses them
  float *in_dk, *in_dv;    // dk and dv of row n = 0
  int64_t dk_row, dv_row;  // floats of a row n
  int64_t size;            // floats of an accumulator: padded_queries kHeadDim
  DqAccumulatorGroup groups[kMaxAccumulatorGroups];
  int32_t num_groups;
  int32_t* progress;       // [B N H], in the order of the blocks: blocks that have added, or kDone or kSeesNothing
  uint32_t* ticket;        // the next block's number
  int32_t padded_queries;  // Lq and Lk in whole tiles: additions need no bounds checks, since dS is 0 past the ends
  int32_t padded_keys;
  float* dbias2;  // [B, H, padded_queries, padded_keys]; null where it is not wanted

  static constexpr int32_t kDone = -1;         // dq is written, the accumulator zeros again
  static constexpr int32_t kSeesNothing = -2;  // the pair has no accumulator

  CUTLASS_DEVICE int group_of(uint32_t pair) const {
    int group = 0;
    while (group + 1 < num_groups && pair >= groups[group + 1].first_pair) ++group;
    return group;
  }
  CUTLASS_DEVICE uint32_t index_of(uint32_t pair, const DqAccumulatorGroup& group) const {
    const uint32_t down = (pair - group.first_pair) % group.count;
    return down <= group.first ? group.first - down : group.first + group.count - down;
  }
  CUTLASS_DEVICE float* accumulator(uint32_t pair) const {
    int group = group_of(pair);
    const uint32_t index = index_of(pair, groups[group]);
    if (index < groups[num_groups - 1].count) return own + index * size;
    for (group = num_groups - 1; index >= groups[group - 1].count; --group) {
    }
    const DqAccumulatorGroup& host = groups[group];
    const uint32_t index_in_host = index - host.count;
    if (index_in_host < host.in_dk) return in_dk + host.first_row * dk_row + index_in_host * size;
    return in_dv + host.first_row * dv_row + (index_in_host - host.in_dk) * size;
  }
  // The previous pair with the same accumulator as `pair`; negative: none.
  CUTLASS_DEVICE int32_t before(uint32_t pair) const {
    const int group = group_of(pair);
    if (pair - groups[group].first_pair >= groups[group].count) return int32_t(pair - groups[group].count);
    return last_before(group, index_of(pair, groups[group]));
  }
  // The last pair before a group that uses this accumulator; negative: none.
  CUTLASS_DEVICE int32_t last_before(int group, uint32_t index) const {
    while (--group >= 0) {
      const DqAccumulatorGroup& other = groups[group];
      const uint32_t size = groups[group + 1].first_pair - other.first_pair;
      // The first pair of `other` that uses this accumulator, counted from the group's first pair.
      const uint32_t first = index <= other.first ? other.first - index : other.first + other.count - index;
      if (first < size) return int32_t(other.first_pair + first + (size - 1 - first) / other.count * other.count);
    }
    return -1;
  }
  // The accumulators that reach into a row n of a group with accumulators: so many in its dk or its dv.
  struct Hosted {
    uint32_t first, count;
  };
  CUTLASS_DEVICE Hosted hosted_in_dk(int group, uint32_t row) const {
    return hosted(group, row, dk_row, 0, groups[group].in_dk);
  }
  CUTLASS_DEVICE Hosted hosted_in_dv(int group, uint32_t row) const {
    return hosted(group, row, dv_row, groups[group].in_dk, groups[group - 1].count - groups[group].count);
  }

 private:
  // begin, end: the group's accumulators in the same tensor.
  CUTLASS_DEVICE Hosted hosted(int group, uint32_t row, int64_t row_size, uint32_t begin, uint32_t end) const {
    const DqAccumulatorGroup& host = groups[group];
    const int64_t at = (row - host.first_row) * row_size, num = end - begin;
    const int64_t first = at / size, past = (at + row_size + size - 1) / size;
    if (first >= num) return {0, 0};
    return {host.count + begin + uint32_t(first), uint32_t((past < num ? past : num) - first)};
  }
};

}  // namespace ds4s
