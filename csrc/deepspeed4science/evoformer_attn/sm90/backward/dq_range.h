// The range of dq's sums where they are float16 (dq_sums.h). A sum of shares of dq, math.md (13), is at most
//
//   M = 2 scale max (sum over channels of |dO|) max|V| max|K|        of one (b, n, h)
//
// Shares are multiplied by a power of two that takes M below 2^15, and dq is divided by it. preprocess finds the
// maxima: of all queries, of K and V in some keys, of what is finite. So sums may still overflow, or be so small that
// float16 has few bits for them. find_wrong_dq looks for both, and recompute_dq computes dq of such a (b, n, h) again.
//
//   preprocess -> find_dq_exponents -> kernel_dq_dkdv -> ... -> find_wrong_dq -> recompute_dq
#pragma once

#include "common/postprocess.h"
#include "common/preprocess.h"
#include "sm90/backward/dq_range_args.h"

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

// Maxima of positive numbers, one for each head, in the shared memory of a block of preprocess.
class HeadMaxima {
 public:
  // All threads, before all other calls.
  CUTLASS_DEVICE void clear() {
    static_assert(DqRangeArgs::kMostHeads <= kPrepareThreads, "a thread for each head");
    if (threadIdx.x < DqRangeArgs::kMostHeads) bits_[threadIdx.x] = 0;
    __syncthreads();
  }
  CUTLASS_DEVICE void add(uint32_t head, float x) {
    if (head < DqRangeArgs::kMostHeads) atomicMax(bits_ + head, __float_as_uint(x));
  }
  // All threads, after all other calls. to: [heads]
  CUTLASS_DEVICE void store(float* to, int heads) const {
    __syncthreads();
    if (threadIdx.x < heads) to[threadIdx.x] = __uint_as_float(bits_[threadIdx.x]);
  }

 private:
  uint32_t bits_[DqRangeArgs::kMostHeads];
};

// What a group of lanes sees of dO in PrepareRows: maxima of the sum of |dO| over channels. If all of its rows are of
// one head, each lane takes the maximum of its own channels first, and the sum of these is no less.
template <typename Config>
class DoMaxima {
  using Rows = PrepareRows<Config>;

 public:
  CUTLASS_DEVICE DoMaxima(HeadMaxima& maxima, uint32_t num_heads)
      : maxima_(maxima), one_head_(Rows::kRowsAtOnce % num_heads == 0) {}
  CUTLASS_DEVICE void add(const typename Rows::Share& x, uint32_t head) {
    float sum = 0.f;
    CUTLASS_PRAGMA_UNROLL
    for (int e = 0; e < Rows::Share::kElements; ++e) sum += fabsf(float(x[e]));
    head_ = head;
    if (sum < infinity()) of_lane_ = fmaxf(of_lane_, sum);
    if (!one_head_) finish();
  }
  CUTLASS_DEVICE void finish() {
    const float sum = Rows::reduce(of_lane_);
    if (threadIdx.x % Rows::kGroup == 0) maxima_.add(head_, fminf(sum, largest_finite()));
    of_lane_ = 0.f;
  }

 private:
  CUTLASS_DEVICE static float largest_finite() { return __uint_as_float(0x7f7fffff); }

  HeadMaxima& maxima_;
  const bool one_head_;
  uint32_t head_ = 0;
  float of_lane_ = 0.f;
};

// The largest finite |x| of a row of PrepareRows, which a group of lanes has, found for two elements at a time. Twice
// the bits have no sign, and with one added to the exponent an infinity overflows to 0, NaN nearly so. What the lower
// element leaves in the last place of the upper one makes that larger by one unit at most.
template <typename Config>
CUTLASS_DEVICE float largest_of_row(const typename PrepareRows<Config>::Share& x) {
  using scalar_t = typename Config::scalar_t;
  constexpr uint32_t kNext = std::is_same_v<scalar_t, cutlass::bfloat16_t> ? 0x0100 : 0x0800;
  uint32_t words = 0;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < x.kElements / 2; ++i) {
    words = __vmaxu2(words, 2 * reinterpret_cast<const uint32_t*>(&x)[i] + (kNext << 16 | kNext));
  }
  uint32_t largest = max(words >> 16, words & 0xffff);
  CUTLASS_PRAGMA_UNROLL
  for (int mask = PrepareRows<Config>::kGroup / 2; mask > 0; mask /= 2)
    largest = max(largest, ptx::shfl_xor(largest, mask));
  return largest < kNext ? 0.f : float(scalar_t::bitcast(uint16_t((largest - kNext) / 2)));
}

// Maxima of K and V of one key in kKeysApart, by a block of preprocess for kKeyRows keys and heads of a row n. Which
// key differs, in case the data are periodic. Hidden keys are left out, which may hold anything.
template <typename Config>
struct KeyMaxima {
  using Rows = PrepareRows<Config>;
  using scalar_t = typename Config::scalar_t;
  static constexpr int kKeysApart = DqRangeArgs::kKeysApart, kKeyRows = DqRangeArgs::kKeyRows;
  static constexpr int kAtOnce = 2;  // keys of a lane whose loads are in flight together

  CUTLASS_DEVICE static void run(const BwdParams& p, const DqRangeArgs& args, uint32_t block) {
    __shared__ HeadMaxima of_k, of_v;
    of_k.clear(), of_v.clear();
    const uint32_t H = uint32_t(p.H), bn = block / uint32_t(args.key_blocks), part = block - bn * args.key_blocks;
    const uint32_t num_rows = (uint32_t(p.Lk) + kKeysApart - 1) / kKeysApart * H;
    const uint32_t end = min(num_rows, (part + 1) * kKeyRows);
    const int64_t b = bn / uint32_t(p.N), n = bn - b * p.N;
    const int lane = threadIdx.x % Rows::kGroup;
    CUTLASS_PRAGMA_NO_UNROLL
    for (uint32_t begin = part * kKeyRows; begin < end; begin += kAtOnce * Rows::kRowsAtOnce) {
      typename Rows::Share k[kAtOnce], v[kAtOnce];
      scalar_t bias1[kAtOnce];
      uint32_t head[kAtOnce];
      CUTLASS_PRAGMA_UNROLL
      for (int x = 0; x < kAtOnce; ++x) {
        const uint32_t row = min(begin + x * Rows::kRowsAtOnce + threadIdx.x / Rows::kGroup, end - 1), i = row / H;
        head[x] = row - i * H;
        const int64_t key = min(int64_t(kKeysApart * i + (5 * i + bn) % kKeysApart), p.Lk - 1);
        k[x] = load_share<Config>(element<const scalar_t>(p.k, p.k_stride, b, n, key, head[x]), int(p.D), lane);
        v[x] = load_share<Config>(element<const scalar_t>(p.v, p.v_stride, b, n, key, head[x]), int(p.Dv), lane);
        const int64_t at = b * p.bias1_stride[0] + n * p.bias1_stride[1] + key * p.bias1_stride[2];
        bias1[x] = p.bias1 != nullptr ? static_cast<const scalar_t*>(p.bias1)[at] : scalar_t(0);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int x = 0; x < kAtOnce; ++x) {
        const bool hidden = float(bias1[x]) <= -MaskRule<scalar_t>::kThreshold;
        const float largest_k = largest_of_row<Config>(k[x]), largest_v = largest_of_row<Config>(v[x]);
        if (!hidden && lane == 0) of_k.add(head[x], largest_k), of_v.add(head[x], largest_v);
      }
    }
    of_k.store(args.key_maxima + (2 * int64_t(block) + 0) * args.heads, args.heads);
    of_v.store(args.key_maxima + (2 * int64_t(block) + 1) * args.heads, args.heads);
  }
};

// A warp for each (b, n, h).
static __global__ void __launch_bounds__(kPrepareThreads) find_dq_exponents(const DqRangeArgs args) {
  ptx::wait_for_kernel_before();
  ptx::let_next_kernel_start();
  const int64_t bnh = int64_t(blockIdx.x) * (kPrepareThreads / 32) + threadIdx.x / 32;
  if (bnh >= int64_t(args.rows) * args.heads) return;
  const int64_t bn = bnh / args.heads;
  const int h = int(bnh - bn * args.heads), lane = threadIdx.x % 32;
  auto largest = [&](const float* maxima, int first, int step, int count) {
    float x = 0.f;
    for (int i = lane; i < count; i += 32) x = fmaxf(x, maxima[((bn * count + i) * step + first) * args.heads + h]);
    return DqRange::warp_max(x);
  };
  const float of_do = largest(args.do_maxima, 0, 1, args.do_blocks);
  float of_k = largest(args.key_maxima, 0, 2, args.key_blocks), of_v = largest(args.key_maxima, 1, 2, args.key_blocks);
  int exponent = DqRange::kNone;
  if (of_do > 0.f) {  // K and V of some keys may all be 0, or hidden
    of_k = of_k > 0.f ? of_k : 1.f, of_v = of_v > 0.f ? of_v : 1.f;
    exponent = 15 - args.bound - DqRange::above(of_do) - DqRange::above(of_k) - DqRange::above(of_v);
    exponent = max(-126, min(126, exponent));
  }
  if (lane == 0) args.exponents[bnh] = exponent;
}

// A thread for each (b, n, h). Stores it, and in the uppermost bit whether its sums are small.
static __global__ void __launch_bounds__(kPrepareThreads) find_wrong_dq(const DqRangeArgs args) {
  ptx::wait_for_kernel_before();
  ptx::let_next_kernel_start();
  const int64_t bnh = int64_t(blockIdx.x) * kPrepareThreads + threadIdx.x;
  if (bnh >= int64_t(args.rows) * args.heads) return;
  uint32_t largest = 0;
  for (int i = 0; i < args.writers; ++i) {
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
