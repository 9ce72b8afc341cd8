// The loads of a forward block: K, V and biases, of a stage or of the beginning of a segment of keys. K below is the
// AttentionKernel.
#pragma once

#include "../../transform/bias_broadcast.h"
#include "key_segments.h"
#include "warp_tile.h"

namespace ds4s {

template <typename K>
struct ForwardLoads : ForwardWarp<K> {
  using Base = ForwardWarp<K>;
  using Params = typename K::Params;
  using scalar_t = typename K::scalar_t;
  using output_t = typename K::output_t;
  using KTile = typename K::KTile;
  using VTile = typename K::VTile;
  using Frag1 = typename K::Bias1::Matrix::Fragment;
  using Frag2 = typename K::Bias2::Matrix::Fragment;
  template <typename TileT>
  using Loader = typename Base::template Loader<TileT>;
  using Base::inv_scale;
  using Base::kKeys;
  using Base::p;
  using Base::shared;
  using Base::thread;

  scalar_t *bias1_ptr, *bias2_ptr;  // of a matrix: the lane's first element of the next key block
  cutlass::MatrixCoord bias_start;
  // K::kReadsTiles: bias2_ptr is the first of this lane's rows, from key 0 on, and these are vectors of 16 bytes from
  // there to its other rows.
  uint32_t further_rows[Base::Mma::kLaneRows - 1];

  CUTLASS_DEVICE ForwardLoads(const Params& params, char* shared_)
      : Base(params, shared_), bias1_ptr(nullptr), bias2_ptr(nullptr) {
    auto start = K::MatrixMap::initial_offset(thread);
    bias_start = cutlass::MatrixCoord(start.strided(), start.contiguous());
  }

 protected:
  // This thread's element of a row bias: its load is issued early; it is converted and stored when it has arrived.
  struct RowElement {
    ElementBits<scalar_t> bias1, bias2;
  };
  // Pointers to the first key of a row n and head.
  struct RowPointers {
    const scalar_t *key, *value;
    scalar_t *bias1, *bias2;
  };
  // Values that the loop reads once a stage and for which it has no registers.
  struct Constants {
    RowPointers pointers;
    output_t* output;
    float* logsumexp;
    KeySegments segments;
    float shift;
    int num_queries;
  };
  static_assert(sizeof(Constants) <= K::kConstantsBytes || !K::kSingleValueIteration, "K::kConstantsBytes");
  CUTLASS_DEVICE Constants* sConstants() const {
    return reinterpret_cast<Constants*>(shared + K::kSharedBytes - K::kConstantsBytes);
  }

  // The state at the beginning of a segment: the addresses of its keys, and the loads of the first ones.
  struct SegmentStart {
    Loader<KTile> k;
    Loader<VTile> v;
    Frag1 bias1;
    Frag2 bias2;
    RowElement element;
    float shift;
  };
  CUTLASS_DEVICE void locate(SegmentStart& start, const RowPointers& from, int key) {
    start.k = Loader<KTile>(from.key + key * p.k_strideM, p.k_strideM, p.head_dim, thread);
    start.v = Loader<VTile>(from.value + key * p.v_strideM, p.v_strideM, p.head_dim_value, thread);
    int64_t offset = bias_start.row() * p.bias2_strideM + bias_start.column() + key;
    if constexpr (K::Bias1::kIsMatrix) bias1_ptr = from.bias1 + offset;
    if constexpr (K::kReadsTiles) {
      locate_bias2(from.bias2);
    } else if constexpr (K::Bias2::kIsMatrix) {
      bias2_ptr = from.bias2 + offset;
    }
  }
  // kInRegisters: from start.k and start.v; else the addresses are computed again from constants in shared memory.
  template <bool kInRegisters, bool kWhole>
  CUTLASS_DEVICE void send(SegmentStart& start, const KeySegment& segment, float shift) {
    start.shift = shift;
    if constexpr (K::kAsync) {
      load_keys<kInRegisters>(start, segment, segment.begin, 0);
      start.element = load_row<kWhole>(segment, segment.begin);
    }
    if constexpr (K::kStagesBias2) {
      CUTLASS_PRAGMA_UNROLL
      for (int t = 0; t < K::kStripes; ++t) send_bias2(t, segment, segment.begin + t * K::kKeysPerBlock);
      return;
    }
    load_matrices(start.bias1, start.bias2, segment, segment.begin);
  }

  // A loader whose address was kept. Multiples of its stride, and unless kKeepsPlaces its place in a tile, would be
  // kept in registers too.
  template <typename LoaderT>
  CUTLASS_DEVICE static LoaderT again(LoaderT loader, int64_t stride, int cols) {
    ptx::keep(stride);
    if constexpr (!K::kKeepsPlaces) return LoaderT::at(loader.g, stride, cols, int(ptx::thread_x()));
    loader.stride = stride;
    return loader;
  }

  template <bool kInRegisters>
  CUTLASS_DEVICE void load_keys(SegmentStart& start, const KeySegment& segment, int first, int stage) {
    int left = segment.end - first;
    if constexpr (kInRegisters) {
      start.k = again(start.k, p.k_strideM, p.head_dim);
      start.k.load(this->sK(stage), left);
      start.k.advance();
      start.v = again(start.v, p.v_strideM, p.head_dim_value);
      start.v.load(this->sV(stage), left);
      start.v.advance();
    } else {
      const RowPointers& from = sConstants()->pointers;
      const int thread_x = int(ptx::thread_x());
      Loader<KTile>(from.key + first * p.k_strideM, p.k_strideM, p.head_dim, thread_x).load(this->sK(stage), left);
      Loader<VTile>(from.value + first * p.v_strideM, p.v_strideM, p.head_dim_value, thread_x)
          .load(this->sV(stage), left);
    }
    if constexpr (K::kAsync) ptx::cp_async_commit();
  }

  template <bool kWhole>
  CUTLASS_DEVICE RowElement load_row(const KeySegment& segment, int first) const {
    RowElement x;
    const int key = first + int(ptx::thread_x() % kKeys);
    const cutlass::MatrixCoord extent(1, segment.end);
    if constexpr (K::Bias1::kIsRow)
      K::Bias1::Row::load(x.bias1, kWhole ? p.bias1_ptr : sConstants()->pointers.bias1, key, extent, 0);
    if constexpr (K::Bias2::kIsRow)
      K::Bias2::Row::load(x.bias2, kWhole ? p.bias2_ptr : sConstants()->pointers.bias2, key, extent, 0);
    return x;
  }
  // bias1 - shift in raw units; -inf past the last key, which masks the tail.
  CUTLASS_DEVICE void store_row(const KeySegment& segment, int first, int stage, const RowElement& element,
                                float shift) const {
    if constexpr (K::kHasRowBias) {
      float x = element.bias1.value();
      if constexpr (K::Bias1::kIsRow) x -= shift;
      if constexpr (K::Bias1::kIsRow && K::Bias2::kIsRow) x += element.bias2.value();
      if constexpr (!K::Bias1::kIsRow) x = element.bias2.value();
      float raw = x * inv_scale;
      const uint32_t thread_x = ptx::thread_x();
      if (first + int(thread_x % kKeys) >= segment.end) raw = -infinity();
      if (thread_x < kKeys) {
        const int place = K::Mma::place_of_pair(int(thread_x) / 2);
        float* s = reinterpret_cast<float*>(this->sRowBias(stage) + place) + thread_x % 2;
        s[0] = raw;
        s[2] = raw;
      }
    }
  }

  // kStagesBias2: a lane copies the elements that it adds to its own scores, so no barrier is needed. key: the key to
  // which bias2_ptr points; stripe: its index in the stage.
  CUTLASS_DEVICE void send_bias2(int stripe, const KeySegment& segment, int key) {
    const int rows = segment.end - key - bias_start.column() > 0 ? p.num_queries - bias_start.row() : 0;
    uint4* const s = sBias2(stripe);
    CUTLASS_PRAGMA_UNROLL
    for (int lane_row = 0; lane_row < kBias2Chunks; ++lane_row) {
      ptx::cp_async_16(s + 32 * lane_row, bias2_ptr + lane_row * K::Mma::kRowStep * p.bias2_strideM,
                       lane_row * K::Mma::kRowStep < rows);
    }
    bias2_ptr += K::kKeysPerBlock;
  }
  CUTLASS_DEVICE void fetch_bias2(Frag2& fragment, int stripe) const {
    const uint4* const s = sBias2(stripe);
    CUTLASS_PRAGMA_UNROLL
    for (int lane_row = 0; lane_row < kBias2Chunks; ++lane_row)
      reinterpret_cast<uint4*>(&fragment)[lane_row] = s[32 * lane_row];
  }

  // Loads the biases of the keys from `key` on. Pointers and extent include the lane's offset, so the policy gets
  // thread id 0.
  CUTLASS_DEVICE void load_matrices(Frag1& bias1, Frag2& bias2, const KeySegment& segment, int key) {
    cutlass::MatrixCoord extent(p.num_queries - bias_start.row(), segment.end - key - bias_start.column());
    if constexpr (K::Bias1::kIsMatrix) {
      K::Bias1::Matrix::load(bias1, bias1_ptr, 0, extent, p.bias2_strideM);
      bias1_ptr += K::kKeysPerBlock;
    }
    if constexpr (K::kReadsTiles) {
      // Of keys past the end, the last ones are read.
      load_vectors(bias2, bias2_ptr + offset_of(min(key + bias_start.column(), (segment.end - 1) / kVec * kVec)),
                   [this](int i) { return further_rows[i]; });
    } else if constexpr (K::Bias2::kIsMatrix) {
      K::Bias2::Matrix::load(bias2, bias2_ptr, 0, extent, p.bias2_strideM);
      bias2_ptr += K::kKeysPerBlock;
    }
  }

  // This lane's elements of bias2 in tiles, of one tile after another from `key` on. No bounds: a tile is whole, and
  // memory for one more follows the last. Addresses are known before the loads, and constant distances apart; otherwise
  // ptxas places the exponentials of the stripe behind one another: (1,768,768,4,32) 0.98 instead of 0.925 of the time.
  struct TileSequence {
    const scalar_t* next;
    CUTLASS_DEVICE void load(Frag2& fragment) {
      load_vectors(fragment, next, [](int i) { return 32u * uint32_t(i + 1); });
      next += K::kKeysPerBlock * 32;
    }
  };
  CUTLASS_DEVICE TileSequence tiles_from(int key) const { return {bias2_ptr + offset_of(key + bias_start.column())}; }

 private:
  static constexpr int kVec = K::Mma::kVec;

  // Of rows past the last query, the last one is read.
  CUTLASS_DEVICE void locate_bias2(scalar_t* matrix) {
    const int warp_row = min(this->warp_m * 32, (p.num_queries - 1) & ~31), last = p.num_queries - 1 - warp_row;
    const int row = K::Mma::row_of_lane(this->lane), first = min(row, last);
    bias2_ptr = matrix + warp_row * p.bias2_strideM + int64_t(first) * p.bias2_row_vectors * kVec;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < K::Mma::kLaneRows - 1; ++i) {
      further_rows[i] = uint32_t(min(row + (i + 1) * K::Mma::kRowStep, last) - first) * p.bias2_row_vectors;
    }
  }
  // From the first key of a row to this one.
  CUTLASS_DEVICE int offset_of(int key) const { return (key & ~31) * p.bias2_key_stride + (key & 31); }
  // further(i): from the first of the lane's vectors to the next ones.
  template <typename Further>
  CUTLASS_DEVICE static void load_vectors(Frag2& fragment, const scalar_t* first, Further further) {
    const uint4* const g = reinterpret_cast<const uint4*>(first);
    uint4* const vectors = reinterpret_cast<uint4*>(&fragment);
    vectors[0] = __ldg(g);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < K::Mma::kLaneRows - 1; ++i) vectors[i + 1] = __ldg(g + further(i));
  }

  static constexpr int kBias2Chunks = int(sizeof(Frag2)) / 16;  // one for each of a lane's rows
  CUTLASS_DEVICE uint4* sBias2(int stripe) const {
    static_assert(!K::kStagesBias2 || kBias2Chunks == K::Mma::kLaneRows, "a row of a lane is 16 bytes");
    return reinterpret_cast<uint4*>(this->stage_begin(K::kStages)) + stripe * kBias2Chunks * K::kNumThreads +
           thread / 32 * (32 * kBias2Chunks) + thread % 32;
  }
};

}  // namespace ds4s
