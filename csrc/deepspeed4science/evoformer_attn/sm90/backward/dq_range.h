// The range of dq's sums where they are float16 (dq_sums.h). A sum of shares of dq, math.md (13), is at most
//
//   M = 2 scale max (sum over channels of |dO|) max|V| max|K|        of one (b, n, h)
//
// Shares are multiplied by a power of two that takes M below 2^15, and dq is divided by it. delta_pieces.h finds the
// maxima: of all queries, of K and V in some keys, of what is finite. So sums may still overflow, or be so small that
// float16 has few bits for them. find_wrong_dq looks for both, and recompute_dq computes dq of such a (b, n, h) again.
//
//   preprocess -> find_exponents_and_tiles -> kernel_dq_dkdv -> ... -> find_wrong_dq -> recompute_dq
//                                     later_delta.h, beside it
#pragma once

#include "common/postprocess.h"
#include "common/preprocess.h"
#include "sm90/backward/dq_range_args.h"
#include "sm90/backward/seen_tiles.h"

namespace ds4s::sm90 {

struct DqRange {
  static constexpr uint32_t kSmallest = 0x1400, kInfinity = 0x7c00;  // float16: 2^-10, infinity
  static constexpr int kNone = -1024;                                // the exponent where dO is 0

  // 2^exponent, and its inverse.
  CUTLASS_DEVICE static float factor(int exponent) {
    return exponent == kNone ? 1.f : __uint_as_float(uint32_t(127 + exponent) << 23);
  }
  CUTLASS_DEVICE static float inverse_factor(int exponent) { return factor(exponent == kNone ? kNone : -exponent); }
  // The smallest power of two above x >= 0, as an exponent.
  CUTLASS_DEVICE static int above(float x) { return int(__float_as_uint(x) >> 23) - 126; }
  CUTLASS_DEVICE static float warp_max(float x) {  // x >= 0
    return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(x)));
  }
};

// One (b, n, h).
struct DqPair {
  int b, n, h;

  // In the order of kernel_dq_dkdv's tiles.
  CUTLASS_DEVICE static DqPair at(int number, int num_rows, int num_heads) {
    const int bh = number / num_rows, b = bh / num_heads;
    return {b, number - bh * num_rows, bh - b * num_heads};
  }
};

// By all lanes of a warp, from the maxima of all pieces of a (b, n, h), number bn heads + h.
static CUTLASS_DEVICE void find_dq_exponent(const DqRangeArgs& args, int64_t bnh) {
  const int64_t bn = bnh / args.heads, h = bnh - bn * args.heads;
  const int lane = threadIdx.x % 32;
  auto largest = [&](int which) {
    float x = 0.f;
    for (int i = lane; i < args.pieces; i += 32) {
      x = fmaxf(x, ptx::load_written(args.maxima + ((bn * args.pieces + i) * 3 + which) * args.heads + h));
    }
    return DqRange::warp_max(x);
  };
  const float of_do = largest(0);
  float of_k = largest(1), of_v = largest(2);
  int exponent = DqRange::kNone;
  if (of_do > 0.f) {  // K and V of some keys may all be 0, or hidden
    of_k = of_k > 0.f ? of_k : 1.f, of_v = of_v > 0.f ? of_v : 1.f;
    exponent = 15 - args.bound - DqRange::above(of_do) - DqRange::above(of_k) - DqRange::above(of_v);
    exponent = max(-126, min(126, exponent));
  }
  if (lane == 0) args.exponents[bnh] = exponent;
}
// What kernel_dq_dkdv needs that preprocess cannot know before its end: a warp for each of the first num_pairs
// (b, n, h), in the order of the tiles, and a last block for the tiles of keys that are seen, where these are wanted.
static __global__ void __launch_bounds__(kPrepareThreads)
    find_exponents_and_tiles(const DqRangeArgs args, int num_rows, int num_pairs, const FindSeenTilesArgs tiles) {
  ptx::wait_for_kernel_before();
  ptx::let_next_kernel_start();
  __shared__ int2 keys;
  if (tiles.tiles != nullptr && blockIdx.x == gridDim.x - 1) return find_seen_tiles(tiles, keys);
  const int number = int(blockIdx.x) * (kPrepareThreads / 32) + int(threadIdx.x) / 32;
  if (number >= num_pairs) return;
  const DqPair at = DqPair::at(number, num_rows, args.heads);
  find_dq_exponent(args, (int64_t(at.b) * num_rows + at.n) * args.heads + at.h);
}

// A thread for each (b, n, h). Stores it, and in the uppermost bit whether its sums are small.
static __global__ void __launch_bounds__(kPrepareThreads) find_wrong_dq(const DqRangeArgs args) {
  ptx::wait_for_kernel_before();
  ptx::let_next_kernel_start();
  const int64_t bnh = int64_t(blockIdx.x) * kPrepareThreads + threadIdx.x;
  if (bnh >= int64_t(args.rows) * args.heads) return;
  uint32_t largest = 0;
  const int writers = args.num_writers == nullptr ? args.writers : int(ptx::load_written(args.num_writers));
  for (int i = 0; i < writers; ++i) {
    largest = max(largest, ptx::load_written(args.largest + bnh * args.writers + i));
  }
  const bool has_factor = args.exponents[bnh] != DqRange::kNone;
  const bool is_small = largest < DqRange::kSmallest && (largest != 0 || has_factor);
  if (!is_small && largest < DqRange::kInfinity) return;
  args.wrong[atomicAdd(args.num_wrong, 1u)] = uint32_t(bnh) | uint32_t(is_small) << 31;
}

// A warp for each query.
template <typename scalar_t, int kHeadDim>
__global__ void __launch_bounds__(kPostprocessThreads, kPostprocessBlocks)
    recompute_dq(const __grid_constant__ PostprocessArgs args, const __grid_constant__ DqRangeArgs range) {
  ptx::wait_for_kernel_before();
  ptx::let_next_kernel_start();
  const BwdParams& p = args.p;
  const int64_t warp = int64_t(blockIdx.x) * (kPostprocessThreads / 32) + threadIdx.x / 32;
  const int64_t num_warps = int64_t(gridDim.x) * (kPostprocessThreads / 32);
  const int64_t count = int64_t(ptx::load_written(range.num_wrong)) * p.Lq;
  for (int64_t x = warp; x < count; x += num_warps) {
    const uint32_t wrong = ptx::load_written(range.wrong + x / p.Lq), bnh = wrong & 0x7fffffff;
    Postprocess<scalar_t, kHeadDim>(args).recompute_dq(bnh / p.H, bnh % p.H, x % p.Lq, wrong >> 31);
  }
}

}  // namespace ds4s::sm90
