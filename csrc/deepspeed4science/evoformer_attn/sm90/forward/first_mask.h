// The visible keys of a block's first tile. All consumers find them together, since they have nothing to do yet. One
// warp (RowScan) would take 2 us, a sixth of the forward of (1,1,768,16,24).
#pragma once

#include "sm90/forward/config.h"

namespace ds4s::sm90 {

template <typename Config>
class FirstMask {
 public:
  // Whether the consumers find the first mask; otherwise the scanning warps do.
  CUTLASS_DEVICE static bool is_found(const ForwardArgs& args) { return args.has_mask() && args.Lk <= kFirstMaskKeys; }

  // Called by all consumers.
  CUTLASS_DEVICE static void find(typename Config::Shared& shared, const ForwardArgs& args) {
    auto& parts = shared.first_mask;
    const int lane = int(threadIdx.x) % 32, row = int(threadIdx.x) / 32 / kWarps, warp = int(threadIdx.x) / 32 % kWarps;
    const typename Config::Coordinates at = Config::locate(args, int(blockIdx.x));
    const int n = min(at.row + row, args.N - 1);
    const bool is_read = at.has_row(row, args) && args.is_read(at.batch, n);
    const scalar_t* bias1 =
        static_cast<const scalar_t*>(args.bias1) + at.batch * args.bias1_stride[0] + n * args.bias1_stride[1];
    float x[kSteps][2], largest = -infinity();
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2 * kSteps; ++i) {
      const int key = step_of(warp, i / 2) * kStepKeys + 32 * (i % 2) + lane;
      x[i / 2][i % 2] = key < args.Lk ? 0.f : -infinity();
      if (Config::kHasBias1 && key < args.Lk) x[i / 2][i % 2] = float(bias1[key * args.bias1_stride[2]]);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2 * kSteps; ++i) {
      if (x[i / 2][i % 2] < infinity()) largest = fmaxf(largest, x[i / 2][i % 2]);
    }
    largest = warp_max(largest);
    if (lane == 0) parts.largest[row][warp] = largest;
    sync();
    largest = warp_max(parts.largest[row][lane % kWarps]);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kSteps; ++i) {
      uint32_t votes[2];
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < 2; ++j) votes[j] = __ballot_sync(0xffffffffu, Rule::is_visible(x[i][j], largest));
      const int step = step_of(warp, i);
      const bool seen = is_read && (votes[0] | votes[1]) != 0;
      if (lane == 0) parts.end[row][step] = seen ? step * kStepKeys + end_of_votes(votes) : 0;
    }
    sync();
    // All warps of a row n combine its parts. If only one warp did, the others would lose their uniform registers.
    const int end = lane < kMostSteps ? parts.end[row][lane] : 0;
    const uint32_t steps = __ballot_sync(0xffffffffu, end != 0);
    const int last = __reduce_max_sync(0xffffffffu, end);
    if (warp == 0 && lane == 0) {
      typename Config::Mask& mask = shared.mask[0];
      mask.steps[row][0] = steps | Config::num_ahead(args, int(blockIdx.x)), mask.end[row] = last;
      mask.sees_first[row] = steps & 1, mask.sees_any[row] = steps != 0, mask.shift[row] = Rule::shift(largest);
    }
    if (warp == 0) shared.mask_full[0].arrive();  // each lane arrives for its own writes
  }

 private:
  using scalar_t = typename Config::scalar_t;
  using Rule = MaskRule<scalar_t>;
  static constexpr int kWarps = Config::kFirstWarps;  // for each row n
  static constexpr int kMostSteps = kFirstMaskKeys / kStepKeys;
  static constexpr int kSteps = kMostSteps / kWarps;
  static_assert(Config::kRows == Config::kScanningWarps, "one warp of each row n arrives");
  static_assert(kMostSteps <= 32, "a lane for each step, a word for all");

  CUTLASS_DEVICE static int step_of(int warp, int i) { return i * kWarps + warp; }
  CUTLASS_DEVICE static void sync() {
    cutlass::arch::NamedBarrier::sync(128 * Config::kWarpgroups, 1 + Config::kWarpgroups);
  }
};

}  // namespace ds4s::sm90
