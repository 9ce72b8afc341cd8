// What bias1 and row_mask leave visible (params.h), found once before the kernels that read it: for each row n the
// shift of bias1, a bit for every 16 keys, and the range of keys in which visible ones lie. One pass over B N Lk
// elements; the host never sees the result.
//
//   find_visible_keys   one block for each (b, n)
//   KeyMask             the result, for kernels (the host side: common/key_mask_buffers.h)
#pragma once

#include "core/ptx.h"
#include "params.h"

namespace ds4s {

struct KeyMask {
  static constexpr int kUnit = 16;              // keys of one bit
  static constexpr int kWordKeys = 32 * kUnit;  // of one word
  static constexpr int num_words(int64_t Lk) { return int((Lk + kWordKeys - 1) / kWordKeys); }

  // Null, all three: nothing is hidden and nothing is shifted.
  const float* shift;       // [B N]
  const uint32_t* visible;  // [B N, words]; 0 past the last key
  const int2* range;        // [B N] keys from x to below y, in whole units; x >= y: the row sees nothing
  int32_t words;

  CUTLASS_DEVICE float shift_of(int64_t bn) const { return shift == nullptr ? 0.f : __ldg(shift + bn); }
  // The same from (b, n) on, which counts as 0.
  CUTLASS_DEVICE KeyMask from(int64_t bn) const {
    if (range == nullptr) return *this;
    return {shift + bn, visible + bn * words, range + bn, words};
  }
  CUTLASS_DEVICE int2 keys(int64_t bn) const { return __ldg(range + bn); }
  CUTLASS_DEVICE bool sees_nothing(int64_t bn) const {
    if (range == nullptr) return false;
    int2 seen = keys(bn);
    return seen.x >= seen.y;
  }
  // Bit i: keys from key + 16 i on have a visible one. `key` is a multiple of 16; at most 32 units.
  CUTLASS_DEVICE uint32_t units(int64_t bn, int key, int num_units) const {
    const uint32_t all = num_units < 32 ? (1u << num_units) - 1 : ~0u;
    if (visible == nullptr) return all;
    const uint32_t* row = visible + bn * words;
    const uint32_t word = uint32_t(key) / kWordKeys, bit = uint32_t(key) / kUnit % 32;
    uint32_t low = word < uint32_t(words) ? __ldg(row + word) : 0, high = 0;
    if (bit + num_units > 32 && word + 1 < uint32_t(words)) high = __ldg(row + word + 1);
    return __funnelshift_r(low, high, bit) & all;
  }
};

// What find_visible_keys reads and writes.
struct KeyMaskArgs {
  const void* bias1;        // [B, N, Lk], or null
  int64_t bias1_stride[3];  // B, N, Lk
  const uint8_t* row_mask;  // [B, N], or null
  int64_t row_mask_stride[2];
  uint32_t N;
  int64_t Lk;
  float* shift;
  uint32_t* visible;
  int2* range;
  int32_t words;
  void* copy;  // bias1 again with neighbours side by side, [B, N, Lk], or null
};

constexpr int kKeyMaskThreads = 128;

template <typename scalar_t>
__global__ void __launch_bounds__(kKeyMaskThreads) find_visible_keys(const __grid_constant__ KeyMaskArgs args) {
  constexpr bool kHalf = cutlass::platform::is_same<scalar_t, cutlass::half_t>::value;
  constexpr float kThreshold = kMaskThreshold[kHalf ? kFloat16 : kFloat32];
  constexpr int kWarps = kKeyMaskThreads / 32, kAtOnce = 8;  // loads of a lane that are under way together
  ptx::let_next_kernel_start();
  const int64_t bn = blockIdx.x, b = uint32_t(bn) / args.N, n = bn - b * args.N;
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  const scalar_t* row = static_cast<const scalar_t*>(args.bias1);
  if (row != nullptr) row += b * args.bias1_stride[0] + n * args.bias1_stride[1];
  const bool is_read =
      args.row_mask == nullptr || args.row_mask[b * args.row_mask_stride[0] + n * args.row_mask_stride[1]] != 0;
  auto load = [&](int64_t k) { return k < args.Lk ? float(row[k * args.bias1_stride[2]]) : -infinity(); };

  // The largest finite one.
  __shared__ float sLargest[kWarps];
  __shared__ int sFirst, sEnd;
  if (threadIdx.x == 0) sFirst = 0x7fffffff, sEnd = 0;
  float largest = -infinity();
  for (int64_t first = threadIdx.x; row != nullptr && first < args.Lk; first += kAtOnce * kKeyMaskThreads) {
    float x[kAtOnce];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kAtOnce; ++i) x[i] = load(first + i * kKeyMaskThreads);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      int64_t k = first + i * kKeyMaskThreads;
      if (x[i] < infinity()) largest = fmaxf(largest, x[i]);
      if (args.copy != nullptr && k < args.Lk) static_cast<scalar_t*>(args.copy)[bn * args.Lk + k] = scalar_t(x[i]);
    }
  }
  CUTLASS_PRAGMA_UNROLL
  for (int mask = 16; mask > 0; mask /= 2) largest = fmaxf(largest, ptx::shfl_xor(largest, mask));
  if (lane == 0) sLargest[warp] = largest;
  __syncthreads();
  CUTLASS_PRAGMA_UNROLL
  for (int w = 0; w < kWarps; ++w) largest = fmaxf(largest, sLargest[w]);

  // Hidden: -inf, or so far below it. NaN is visible, and so is +inf.
  const float limit = largest - kThreshold;  // of a huge `largest`, itself
  auto is_visible = [&](float x) { return !(x <= limit) || (x == largest && x > -infinity()); };
  for (int word = warp; word < args.words; word += kWarps) {
    uint32_t bits = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 16; ++i) {
      const int64_t k = int64_t(word) * KeyMask::kWordKeys + 32 * i + lane;
      const bool visible = is_read && k < args.Lk && (row == nullptr || is_visible(load(k)));
      const uint32_t votes = __ballot_sync(0xffffffffu, visible);
      bits |= ((votes & 0xffffu) != 0 ? 1u : 0u) << 2 * i | (votes >> 16 != 0 ? 1u : 0u) << (2 * i + 1);
    }
    if (lane != 0) continue;
    args.visible[bn * args.words + word] = bits;
    if (bits == 0) continue;
    atomicMin(&sFirst, word * KeyMask::kWordKeys + (__ffs(int(bits)) - 1) * KeyMask::kUnit);
    atomicMax(&sEnd, word * KeyMask::kWordKeys + (32 - __clz(int(bits))) * KeyMask::kUnit);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  args.shift[bn] = largest > -infinity() ? largest : 0.f;
  args.range[bn] = make_int2(sFirst, sEnd);
}

}  // namespace ds4s
