// The steps of 64 keys that the rows n of a forward tile see, math.md (6a). Two warps of the forward's own producers
// find them a tile ahead: a separate kernel (common/key_mask.h) would take 5 us, a tenth of the forward of
// (1,256,256,4,32).
//
//   TileMask   the mask of a tile, in shared memory
//   RowScan    a warp's scan of bias1 of one row n
//   TileSteps  the steps in which a row n of the tile sees a key, one after another
#pragma once

#include "common/mask_rule.h"
#include "sm90/forward/args.h"

namespace ds4s::sm90 {

constexpr int kStepKeys = 64;

template <int kRows>
struct TileMask {
  static constexpr int kWordKeys = 32 * kStepKeys;  // keys of one word
  static constexpr int kWords = 32;                 // keys past 65536 count as visible, which only costs time
  static_assert(kWords == 32, "cleared by a warp");

  uint32_t steps[kRows][kWords];            // bit i of word w: the row sees a key of step 32 w + i
  int end[kRows];                           // last key that the row sees, + 1
  bool sees_first[kRows], sees_any[kRows];  // a key of the first step, of any
  float shift[kRows];                       // of bias1
};

// The first tile's mask while it is computed (first_mask.h).
constexpr int kFirstMaskKeys = 1024;
template <int kRows, int kWarps>
struct FirstMaskParts {
  float largest[kRows][kWarps];
  int end[kRows][kFirstMaskKeys / kStepKeys];  // last visible key of each step, + 1; 0: there is none
};

// Floats as integers in the same order; NaN, which max.NaN makes positive, is above infinity.
CUTLASS_DEVICE int flip_ordered(int bits) { return bits ^ (bits >> 31 & 0x7fffffff); }
CUTLASS_DEVICE int ordered(float x) { return flip_ordered(__float_as_int(x)); }
CUTLASS_DEVICE float from_ordered(int x) { return __int_as_float(flip_ordered(x)); }
CUTLASS_DEVICE float warp_max(float x) { return from_ordered(__reduce_max_sync(0xffffffffu, ordered(x))); }

// The last visible one of 64 keys, + 1.
CUTLASS_DEVICE int end_of_votes(const uint32_t (&votes)[2]) {
  return votes[1] != 0 ? 64 - __clz(int(votes[1])) : 32 - __clz(int(votes[0]));
}

// Run by one warp. The number of its instructions matters: a tile of (1,384,384,4,32) takes 16,000 on each scheduler of
// a multiprocessor, and 800 more cost 5 %.
template <typename scalar_t, bool kHasBias1>
class RowScan {
 public:
  CUTLASS_DEVICE RowScan(const ForwardArgs& args, int batch, int n)
      : bias1_(static_cast<const scalar_t*>(args.bias1)),
        stride_(args.bias1_stride[2]),
        Lk_(args.Lk),
        lane_(int(threadIdx.x) % 32),
        in_vectors_(args.bias1_in_vectors),
        sees_nothing_(n >= args.N || !args.is_read(batch, n)) {
    if constexpr (kHasBias1) bias1_ += batch * args.bias1_stride[0] + n * args.bias1_stride[1];
  }

  // num_ahead: 1 where the first step is loaded whatever the row sees.
  template <int kRows>
  CUTLASS_DEVICE void run(TileMask<kRows>& mask, int row, int num_ahead) const {
    using Mask = TileMask<kRows>;
    if (sees_nothing_) {
      mask.steps[row][lane_] = lane_ == 0 ? num_ahead : 0;
      if (lane_ == 0) mask.end[row] = 0, mask.sees_first[row] = mask.sees_any[row] = false, mask.shift[row] = 0.f;
      return;
    }
    // The largest bias1 of all words must be known before the first word is written; a single word is read only once.
    const int num_words = (Lk_ + Mask::kWordKeys - 1) / Mask::kWordKeys;
    float mine = -infinity(), largest = -infinity();
    int last = -1;  // the last visible step
    CUTLASS_PRAGMA_NO_UNROLL
    for (int word = num_words > 1 ? -num_words : 0; word < num_words; ++word) {
      const int first = (word < 0 ? word + num_words : word) * Mask::kWordKeys;
      const float top = read(first, mine);
      largest = warp_max(mine);
      const bool visible = first + lane_ * kStepKeys < Lk_ && MaskRule<scalar_t>::is_visible(top, largest);
      const uint32_t steps = __ballot_sync(0xffffffffu, visible);
      if (word < 0 || word >= Mask::kWords) continue;
      if (lane_ == 0) mask.steps[row][word] = word == 0 ? steps | num_ahead : steps;
      if (lane_ == 0 && word == 0) mask.sees_first[row] = steps & 1;
      if (steps != 0) last = 32 * word + 31 - __clz(int(steps));
    }
    const int end = kHasBias1 && num_words <= Mask::kWords ? end_of(last, largest) : Lk_;
    if (lane_ == 0) {
      mask.end[row] = end, mask.shift[row] = MaskRule<scalar_t>::shift(largest);
      mask.sees_any[row] = last >= 0 || num_words > Mask::kWords;
    }
  }

 private:
  // The end (last visible key + 1) of a step's visible keys.
  CUTLASS_DEVICE int end_of(int step, float largest) const {
    if (step < 0) return 0;
    uint32_t votes[2];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int k = step * kStepKeys + 32 * i + lane_;
      const float x = k < Lk_ ? float(bias1_[k * stride_]) : -infinity();
      votes[i] = __ballot_sync(0xffffffffu, MaskRule<scalar_t>::is_visible(x, largest));
    }
    return step * kStepKeys + end_of_votes(votes);
  }

  // Reads 32 steps from `key` on. Lane i gets the largest bias1 of step i, NaN if the step has one. largest: grows to
  // the largest finite bias1 that this lane has read.
  CUTLASS_DEVICE float read(int key, float& largest) const {
    if constexpr (!kHasBias1) {
      largest = 0.f;
      return 0.f;
    }
    return in_vectors_ ? read_vectors(key, largest) : read_elements(key, largest);
  }

  // Four lanes read a step, eight steps at a time, because latency decides where a tile sees nothing. Lk is a multiple
  // of 8.
  CUTLASS_DEVICE float read_vectors(int key, float& largest) const {
    constexpr int kLanes = 4, kAtOnce = 32 / kLanes, kVectors = kStepKeys / kLanes / 8;
    const uint32_t nothing = ptx::pack<scalar_t>(-infinity(), -infinity());
    uint32_t mine = nothing;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int first = 0; first < 32 && key + first * kStepKeys < Lk_; first += kAtOnce) {
      const int k = key + first * kStepKeys + lane_ * (kStepKeys / kLanes);
      uint32_t pairs = nothing;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kVectors; ++i) {
        if (k + 8 * i >= Lk_) continue;
        const uint4 x = __ldg(reinterpret_cast<const uint4*>(bias1_ + k + 8 * i));
        pairs =
            ptx::max_nan_pairs<scalar_t>(pairs, ptx::max_nan_pairs<scalar_t>(ptx::max_nan_pairs<scalar_t>(x.x, x.y),
                                                                             ptx::max_nan_pairs<scalar_t>(x.z, x.w)));
      }
      CUTLASS_PRAGMA_UNROLL
      for (int mask = 1; mask < kLanes; mask *= 2)
        pairs = ptx::max_nan_pairs<scalar_t>(pairs, ptx::shfl_xor(pairs, mask));
      pairs = __shfl_sync(0xffffffffu, pairs, lane_ % kAtOnce * kLanes);
      if (lane_ / kAtOnce * kAtOnce == first) mine = pairs;
    }
    const float2 pair = ptx::unpack<scalar_t>(mine);
    const float top = ptx::max_nan(pair.x, pair.y);
    if (top < infinity()) {
      largest = fmaxf(largest, top);
    } else {
      const int begin = key + lane_ * kStepKeys;
      CUTLASS_PRAGMA_NO_UNROLL
      for (int k = begin; k < min(begin + kStepKeys, Lk_); ++k) largest = larger_finite(largest, float(bias1_[k]));
    }
    return top;
  }

  // The warp reads a step together, in two halves.
  CUTLASS_DEVICE float read_elements(int key, float& largest) const {
    constexpr int kAtOnce = 4;  // steps
    int mine = ordered(-infinity());
    CUTLASS_PRAGMA_NO_UNROLL
    for (int first = 0; first < 32 && key + first * kStepKeys < Lk_; first += kAtOnce) {
      const int k = key + first * kStepKeys + lane_;
      uint32_t bits[2 * kAtOnce];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2 * kAtOnce; ++i) bits[i] = ptx::load_bits(bias1_ + min(k + 32 * i, Lk_ - 1) * stride_);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        float x[2];
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < 2; ++j) {
          x[j] = k + 64 * i + 32 * j < Lk_ ? ptx::bits_to_float<scalar_t>(bits[2 * i + j]) : -infinity();
          largest = larger_finite(largest, x[j]);
        }
        const int top = __reduce_max_sync(0xffffffffu, ordered(ptx::max_nan(x[0], x[1])));
        if (lane_ == first + i) mine = top;
      }
    }
    return from_ordered(mine);
  }
  CUTLASS_DEVICE static float larger_finite(float x, float y) { return y < infinity() ? fmaxf(x, y) : x; }

  const scalar_t* bias1_;  // this row's, or null
  int64_t stride_;
  int Lk_, lane_;
  bool in_vectors_;
  bool sees_nothing_;  // also for a row that does not exist
};

template <int kRows>
class TileSteps {
 public:
  // mask: null where every key is visible to every row.
  CUTLASS_DEVICE TileSteps(const TileMask<kRows>* mask, int Lk)
      : mask_(mask), num_words_((Lk + kWordKeys - 1) / kWordKeys), count_((Lk + kStepKeys - 1) / kStepKeys) {
    bits_ = load(0);
    if (mask_ == nullptr) return;
    const int unknown = num_words_ > kWords ? count_ - 32 * kWords : 0;
    count_ = __popc(bits_) + unknown;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int word = 1; word < num_words_ && word < kWords; ++word) count_ += __popc(load(word));
  }
  CUTLASS_DEVICE int count() const { return count_; }
  // Leaves out the first num_steps steps of the tile; all of them must be among the steps to come.
  CUTLASS_DEVICE void skip(int num_steps) { bits_ &= ~0u << num_steps; }
  // The first key of the next step; called at most count() times.
  CUTLASS_DEVICE int next() {
    CUTLASS_PRAGMA_NO_UNROLL
    while (bits_ == 0) bits_ = load(++word_);
    const int step = __ffs(int(bits_)) - 1;
    bits_ &= bits_ - 1;
    return word_ * kWordKeys + step * kStepKeys;
  }

 private:
  static constexpr int kWordKeys = TileMask<kRows>::kWordKeys, kWords = TileMask<kRows>::kWords;

  CUTLASS_DEVICE uint32_t load(int word) const {
    if (mask_ == nullptr || word >= kWords) return ~0u;
    uint32_t bits = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int row = 0; row < kRows; ++row) bits |= mask_->steps[row][word];
    return bits;
  }

  const TileMask<kRows>* mask_;
  int num_words_, count_, word_ = 0;
  uint32_t bits_;
};

}  // namespace ds4s::sm90
