// The keys that bias1 and row_mask leave visible, math.md (6a), found once before the kernels that use them: for each
// row n the shift of bias1, math.md (1a), a bit for every 16 keys, and the range of keys that contains all visible
// ones. One pass over B N Lk elements; the result stays on the device.
//
//   find_visible_keys   one block for each (b, n)
//   list_visible_rows   the inverse: for each tile of keys the rows n that see one of them, in order
//   KeyMask             the result as kernels read it (host side: common/key_mask_buffers.h)
#pragma once

#include "key_mask_layout.h"
#include "mask_rule.h"
#include "postprocess_flag.h"

namespace ds4s {

struct KeyMask {
  static constexpr int kUnit = KeyMaskLayout::kUnit, kWordKeys = KeyMaskLayout::kWordKeys;

  // All three are null where no key is hidden and bias1 is not shifted.
  const float* shift;       // [B N]
  const uint32_t* visible;  // [B N, words]; 0 past the last key
  const int2* range;        // [B N] keys from x to below y, in whole units; x >= y: the row sees nothing
  int32_t words;

  CUTLASS_DEVICE float shift_of(int64_t bn) const { return shift == nullptr ? 0.f : __ldg(shift + bn); }
  // The same mask, indexed from (b, n) on.
  CUTLASS_DEVICE KeyMask from(int64_t bn) const { return range == nullptr ? *this : row(bn); }
  // The same for a mask that is not null.
  CUTLASS_DEVICE KeyMask row(int64_t bn) const { return {shift + bn, visible + bn * words, range + bn, words}; }
  // All visible keys lie from x to below y.
  CUTLASS_DEVICE int2 keys(int64_t bn, int Lk) const { return range == nullptr ? make_int2(0, Lk) : __ldg(range + bn); }
  CUTLASS_DEVICE bool sees_nothing(int64_t bn) const {
    int2 seen = keys(bn, /*Lk=*/1);
    return seen.x >= seen.y;
  }
  // The same for a kernel that may begin before the mask is written, after ptx::wait_for_kernel_before(): ptxas moves
  // the loads of __ldg to before that.
  CUTLASS_DEVICE bool sees_nothing_now(int64_t bn) const {
    const int2 seen = keys_now(bn, /*Lk=*/1);
    return seen.x >= seen.y;
  }
  CUTLASS_DEVICE int2 keys_now(int64_t bn, int Lk) const {
    return range == nullptr ? make_int2(0, Lk) : ptx::load_written(range + bn);
  }
  // Bit i: one of the 16 keys from key + 16 i on is visible. `key` is a multiple of 16; at most 32 units.
  CUTLASS_DEVICE uint32_t units(int64_t bn, int key, int num_units) const {
    const uint32_t all = num_units < 32 ? (1u << num_units) - 1 : ~0u;
    if (visible == nullptr) return all;
    const uint32_t* row = visible + bn * words;
    const uint32_t word = uint32_t(key) / kWordKeys, bit = uint32_t(key) / kUnit % 32;
    uint32_t low = word < uint32_t(words) ? __ldg(row + word) : 0, high = 0;
    if (bit + num_units > 32 && word + 1 < uint32_t(words)) high = __ldg(row + word + 1);
    return __funnelshift_r(low, high, bit) & all;
  }
  // The units of kKeys keys from `key` on, a multiple of kKeys, in two steps: the first one only starts a load.
  template <int kKeys>
  CUTLASS_DEVICE uint32_t load_word(bool wanted, int64_t bn, int key) const {
    static_assert(kWordKeys % kKeys == 0, "a tile's units are in one word");
    uint32_t word = ~0u;
    ptx::load_if(wanted && visible != nullptr, visible + bn * words + key / kWordKeys, word);
    return word;
  }
  template <int kKeys>
  CUTLASS_DEVICE static uint32_t units_in(uint32_t word, int key) {
    return word >> (key / kUnit % 32) & ((1u << kKeys / kUnit) - 1);
  }
  // The tiles of kKeys keys that contain a visible one.
  struct Tiles {
    int count, last;
  };
  template <int kKeys>
  CUTLASS_DEVICE Tiles visible_tiles(int64_t bn, int Lk) const {
    static_assert(kWordKeys % kKeys == 0, "a tile's units are in one word");
    const int all = (Lk + kKeys - 1) / kKeys;
    if (visible == nullptr) return {all, all - 1};
    Tiles tiles{0, -1};
    CUTLASS_PRAGMA_NO_UNROLL
    for (int word = 0; word < words; ++word) {
      const uint32_t bits = __ldg(visible + bn * words + word);
      CUTLASS_PRAGMA_UNROLL
      for (int unit = 0; unit < 32; unit += kKeys / kUnit) {
        if ((bits >> unit & (kKeys / kUnit < 32 ? (1u << kKeys / kUnit % 32) - 1 : ~0u)) == 0) continue;
        ++tiles.count, tiles.last = (word * 32 + unit) / (kKeys / kUnit);
      }
    }
    return tiles;
  }
};

// Iterates over the steps of 64 keys in which at least one of up to kRows neighbouring rows n sees a key.
template <int kRows>
class VisibleSteps {
 public:
  static constexpr int kKeys = 64;

  VisibleSteps() = default;
  // first: the index of the first row n among all B N; num_rows: how many exist.
  CUTLASS_DEVICE VisibleSteps(const KeyMask& mask, int64_t first, int num_rows, int Lk)
      : rows_(mask.visible == nullptr ? nullptr : mask.visible + first * mask.words),
        words_(mask.words),
        num_rows_(num_rows),
        count_((Lk + kKeys - 1) / kKeys),
        bits_(load(0)) {
    if (rows_ == nullptr) return;
    count_ = __popc(bits_);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int word = 1; word < words_; ++word) count_ += __popc(load(word));
  }
  CUTLASS_DEVICE int count() const { return count_; }
  // The first key of the next step; called at most count() times.
  CUTLASS_DEVICE int next() {
    CUTLASS_PRAGMA_NO_UNROLL
    while (bits_ == 0) bits_ = load(++word_);
    const int unit = __ffs(int(bits_)) - 1;
    bits_ &= bits_ - 1;
    return word_ * KeyMask::kWordKeys + unit * KeyMask::kUnit;
  }

 private:
  // The lowest bit of every step in the word.
  CUTLASS_DEVICE uint32_t load(int word) const {
    if (rows_ == nullptr) return 0x11111111u;
    uint32_t x = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int row = 0; row < kRows; ++row) {
      if (row < num_rows_) x |= __ldg(rows_ + row * words_ + word);
    }
    x |= x >> 1;
    return (x | x >> 2) & 0x11111111u;
  }

  const uint32_t* rows_ = nullptr;
  int words_ = 0, num_rows_ = 0, count_ = 0, word_ = 0;
  uint32_t bits_ = 0;
};

// For kernels that own keys and iterate over rows n: for each tile of keys of a b, the rows n that see one of its keys.
struct RowLists {
  int32_t* rows;       // [B, tiles, N], the first `count` of each are valid; null: all rows n see all tiles
  int32_t* counts;     // [B, tiles]
  int32_t* tile_keys;  // the keys of a tile, at most `keys`; null where rows is
  int32_t N, tiles;
  int32_t keys;      // the most keys of a tile; all Lk are in `tiles` such tiles
  bool cuts_evenly;  // tiles may have fewer keys than that, if they contain all visible ones

  CUTLASS_DEVICE int count(int b, int tile) const {
    return rows == nullptr ? N : __ldg(counts + int64_t(b) * tiles + tile);
  }
  CUTLASS_DEVICE const int32_t* list(int b, int tile) const {
    return rows == nullptr ? nullptr : rows + (int64_t(b) * tiles + tile) * N;
  }
};

// Inputs and outputs of find_visible_keys.
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
  void* copy;            // a contiguous copy of bias1, [B, N, Lk], or null
  int32_t* counter;      // set to 0: tile scheduler of later kernels
  int32_t* only_key;     // [B N] the visible key of a row n that sees exactly one, else -1; or null
  PostprocessFlag flag;  // raised where a row n sees exactly one key; only with only_key
};

constexpr int kKeyMaskThreads = 128;

// Called by a block of kKeyMaskThreads threads, for the row n with this index among all B N.
template <typename scalar_t>
CUTLASS_DEVICE void find_visible_keys_of(const KeyMaskArgs& args, int64_t bn) {
  using Rule = MaskRule<scalar_t>;
  constexpr int kWarps = kKeyMaskThreads / 32;
  const int64_t b = uint32_t(bn) / args.N, n = bn - b * args.N;
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  const scalar_t* row = static_cast<const scalar_t*>(args.bias1);
  if (row != nullptr) row += b * args.bias1_stride[0] + n * args.bias1_stride[1];
  const bool is_read =
      args.row_mask == nullptr || args.row_mask[b * args.row_mask_stride[0] + n * args.row_mask_stride[1]] != 0;
  // A warp's share: words of 512 keys, 16 keys in each lane. The last word read stays in registers.
  constexpr int kPerLane = KeyMask::kWordKeys / 32;
  float x[kPerLane];
  auto load = [&](int word) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kPerLane; ++i) {
      const int64_t k = int64_t(word) * KeyMask::kWordKeys + 32 * i + lane;
      x[i] = row == nullptr ? 0.f : -infinity();
      if (row != nullptr && k < args.Lk) x[i] = float(row[k * args.bias1_stride[2]]);
    }
  };

  // The largest finite one.
  __shared__ float sLargest[kWarps];
  __shared__ int sFirst, sEnd;
  if (threadIdx.x == 0) sFirst = 0x7fffffff, sEnd = 0;
  float largest = -infinity();
  for (int word = warp; word < args.words; word += kWarps) {
    load(word);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kPerLane; ++i) {
      const int64_t k = int64_t(word) * KeyMask::kWordKeys + 32 * i + lane;
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

  for (int word = warp; word < args.words; word += kWarps) {
    if (args.words > kWarps) load(word);
    uint32_t bits = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kPerLane; ++i) {
      const int64_t k = int64_t(word) * KeyMask::kWordKeys + 32 * i + lane;
      const bool visible = is_read && k < args.Lk && Rule::is_visible(x[i], largest);
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
  args.shift[bn] = Rule::shift(largest);
  args.range[bn] = make_int2(sFirst, sEnd);
  if (bn == 0) *args.counter = 0;
  if (args.only_key == nullptr) return;
  int num_visible = 0, only_key = -1;
  for (int k = sFirst; sEnd - sFirst == KeyMask::kUnit && k < sEnd && k < args.Lk; ++k) {
    if (Rule::is_visible(float(row[k * args.bias1_stride[2]]), largest)) ++num_visible, only_key = k;
  }
  args.only_key[bn] = num_visible == 1 ? only_key : -1;
  if (num_visible == 1) args.flag.raise();
}

template <typename scalar_t>
__global__ void __launch_bounds__(kKeyMaskThreads) find_visible_keys(const __grid_constant__ KeyMaskArgs args) {
  ptx::wait_for_kernel_before();
  ptx::let_next_kernel_start();
  find_visible_keys_of<scalar_t>(args, blockIdx.x);
}

// Whether one row n sees no key, without the result of find_visible_keys: row_mask leaves it out, or all its bias1 are
// -inf (otherwise the largest finite one, or a NaN, is visible). Called by all threads of a block.
template <typename scalar_t, int kThreads, typename Params>
CUTLASS_DEVICE bool sees_nothing(const Params& p, int64_t b, int64_t n) {
  if (p.row_mask != nullptr && p.row_mask[b * p.row_mask_stride[0] + n * p.row_mask_stride[1]] == 0) return true;
  if (p.bias1 == nullptr) return false;
  const scalar_t* row = static_cast<const scalar_t*>(p.bias1) + b * p.bias1_stride[0] + n * p.bias1_stride[1];
  CUTLASS_PRAGMA_NO_UNROLL
  for (int64_t first = 0; first < p.Lk; first += kThreads) {
    const int64_t k = first + threadIdx.x;
    if (__syncthreads_or(k < p.Lk && float(row[k * p.bias1_stride[2]]) != -infinity())) return false;
  }
  return true;
}

// The end of the visible keys of all rows n, in whole units. Called by all kThreads threads of a block.
template <int kThreads>
CUTLASS_DEVICE int end_of_visible_keys(const KeyMask& mask, int64_t num_rows) {
  __shared__ int sEnd[kThreads / 32];
  int end = 0;
  CUTLASS_PRAGMA_NO_UNROLL
  for (int64_t bn = threadIdx.x; bn < num_rows; bn += kThreads) end = max(end, ptx::load_written(mask.range + bn).y);
  end = __reduce_max_sync(0xffffffffu, end);
  if (threadIdx.x % 32 == 0) sEnd[threadIdx.x / 32] = end;
  __syncthreads();
  CUTLASS_PRAGMA_UNROLL
  for (int w = 0; w < kThreads / 32; ++w) end = max(end, sEnd[w]);
  return end;
}

// Writes the list of rows n of one tile of keys of a b. Called by all kThreads threads of a block.
template <int kThreads>
CUTLASS_DEVICE void list_visible_rows(const KeyMask& mask, const RowLists& lists, int num_batches, int block) {
  constexpr int kWarps = kThreads / 32, kUnit = KeyMask::kUnit;
  int keys = lists.keys;
  if (lists.cuts_evenly)
    keys = even_tile_keys(end_of_visible_keys<kThreads>(mask, int64_t(num_batches) * lists.N), keys);
  if (block == 0 && threadIdx.x == 0) *lists.tile_keys = keys;
  const int b = block / lists.tiles, tile = block % lists.tiles;
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  __shared__ int sVotes[2][kWarps];
  int32_t* rows = lists.rows + int64_t(block) * lists.N;
  // A unit that two tiles share counts for both.
  const int begin = tile * keys / kUnit * kUnit, num_units = (tile * keys + keys - begin + kUnit - 1) / kUnit;
  int count = 0;
  CUTLASS_PRAGMA_NO_UNROLL
  for (int first = 0, buffer = 0; first < lists.N; first += kThreads, buffer ^= 1) {
    const int n = first + int(threadIdx.x);
    const bool sees = n < lists.N && mask.units(int64_t(b) * lists.N + n, begin, num_units) != 0;
    const uint32_t votes = __ballot_sync(0xffffffffu, sees);
    if (lane == 0) sVotes[buffer][warp] = __popc(votes);
    __syncthreads();
    int before = count;
    CUTLASS_PRAGMA_UNROLL
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) before += sVotes[buffer][w];
      count += sVotes[buffer][w];
    }
    if (sees) rows[before + __popc(votes & ((1u << lane) - 1))] = n;
  }
  if (threadIdx.x == 0) lists.counts[block] = count;
}

}  // namespace ds4s
