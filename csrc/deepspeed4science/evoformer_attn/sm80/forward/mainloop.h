// What one block of kernel_forward.h does: prologue, loop over the key blocks, epilogue. K below is the
// AttentionKernel: its types and numbers. The loop's state lives in run().
#pragma once

#include "../../transform/bias_broadcast.h"
#include "epilogue.h"
#include "key_segments.h"
#include "warp_tile.h"

namespace ds4s {

template <typename K>
struct ForwardBlock : ForwardWarp<K> {
  using Base = ForwardWarp<K>;
  using Params = typename K::Params;
  using scalar_t = typename K::scalar_t;
  using output_t = typename K::output_t;
  using Mma = typename K::Mma;
  using Softmax = typename K::Softmax;
  using Row = typename K::Row;
  using QTile = typename K::QTile;
  using KTile = typename K::KTile;
  using VTile = typename K::VTile;
  using FragA = typename Mma::FragA;
  using Frag1 = typename K::Bias1::Matrix::Fragment;
  using Frag2 = typename K::Bias2::Matrix::Fragment;
  template <typename TileT>
  using Loader = typename Base::template Loader<TileT>;
  using Base::inv_scale;
  using Base::kKeys;
  using Base::lane;
  using Base::p;
  using Base::shared;
  using Base::thread;

  scalar_t *bias1_ptr, *bias2_ptr;  // of a matrix: the lane's first element of the next key block
  cutlass::MatrixCoord bias_start;

  CUTLASS_DEVICE ForwardBlock(const Params& params, char* shared_)
      : Base(params, shared_), bias1_ptr(nullptr), bias2_ptr(nullptr) {
    auto start = K::MatrixMap::initial_offset(thread);
    bias_start = cutlass::MatrixCoord(start.strided(), start.contiguous());
  }

  // mask: of the row n, which sees something.
  CUTLASS_DEVICE void run(const RowMask& mask) {
    Loader<QTile>(p.query_ptr, p.q_strideM, p.head_dim, thread).load(this->sQ(), p.num_queries);
    const KeySegments segments(mask, p.num_keys);
    if (thread == 0) {
      *sConstants() = {p.key_ptr,       p.value_ptr, p.bias1_ptr, p.bias2_ptr,  p.output_ptr,
                       p.logsumexp_ptr, segments,    mask.shift,  p.num_queries};
    }
    __syncthreads();
    Softmax softmax(this->softmax_scale());
    float o[K::kTilesO][8];
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < K::kTilesO; ++j) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 8; ++i) o[j][i] = 0.f;
    }

    // Most rows n see all keys. Bounds that come from memory keep ptxas from using uniform registers in the loop:
    // another loop has them, at 5 % more time.
    KeySegment segment = K::kSkips ? segments.first(mask) : KeySegment{0, p.num_keys};
    if (K::kHasWholeLoop && segment.begin == 0 && segment.end == p.num_keys) {
      add_segment</*kWhole=*/true>(o, softmax, {0, p.num_keys}, /*is_first=*/true);
    } else {
      bool is_first = true;
      CUTLASS_PRAGMA_NO_UNROLL
      do {
        add_segment</*kWhole=*/false>(o, softmax, segment, is_first);
        is_first = false;
      } while (next_segment(segment));
    }

    softmax.finish();
    __syncthreads();  // the last reads of K and V
    const ForwardEpilogue<K> epilogue{*this};
    epilogue.merge_warps(o, softmax);
    const Constants& block = *sConstants();
    epilogue.store({block.output, block.logsumexp, p.o_strideM, block.num_queries, p.head_dim_value}, o, softmax);
  }

 protected:
  // This thread's element of a row bias: loaded early, converted and stored when it is there.
  struct RowElement {
    ElementBits<scalar_t> bias1, bias2;
  };
  struct Loaders {
    Loader<KTile> k;
    Loader<VTile> v;
  };
  // O += P V for the keys of a segment. kWhole: for all of them.
  template <bool kWhole>
  CUTLASS_DEVICE void add_segment(float (&o)[K::kTilesO][8], Softmax& softmax, const KeySegment& segment,
                                  bool is_first) {
    Frag1 bias1[K::kInFlight];
    Frag2 bias2[K::kInFlight];
    RowElement element;
    Loaders loaders{{sConstants()->key, p.k_strideM, p.head_dim, thread},
                    {sConstants()->value, p.v_strideM, p.head_dim_value, thread}};
    seek_matrices(segment.begin);
    if constexpr (K::kAsync) {
      load_keys<kWhole>(loaders, segment, segment.begin, 0), element = load_row<kWhole>(segment, segment.begin);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int t = 0; t < K::kInFlight; ++t) {
      load_matrices(bias1[t], bias2[t], segment, segment.begin + t * K::kKeysPerBlock);
    }
    if constexpr (K::kAsync) store_row(segment, segment.begin, 0, element);
    FragA q[K::kQInRegisters ? K::kStepsD : 1];
    this->prepare_q(q, is_first);

    CUTLASS_PRAGMA_NO_UNROLL
    for (int first = segment.begin, turn = 0; first < segment.end; first += kKeys, ++turn) {
      // These keys' K, V and row bias arrive; the next ones' set out.
      int stage = (kWhole ? first / kKeys : turn) % K::kStages, next = first + kKeys;
      RowElement next_row;
      if constexpr (K::kAsync) {
        this->wait_for_loads();
        if (next < segment.end) {
          load_keys<kWhole>(loaders, segment, next, stage ^ 1), next_row = load_row<kWhole>(segment, next);
        }
      } else {
        __syncthreads();
        load_keys<kWhole>(loaders, segment, first, 0);
        store_row(segment, first, 0, load_row<kWhole>(segment, first));
        __syncthreads();
      }

      // Stripes without keys are left out. The test, always true at first, also keeps ptxas from reordering across it:
      // 1.25 instead of 1.38 ms at D = 64, 1.20 instead of 1.31 at D = 128.
      int keys_left = segment.end - first;
      CUTLASS_PRAGMA_NO_UNROLL
      for (int stripe = 0; stripe < K::kStripes; stripe += K::kInFlight) {
        if (stripe * K::kKeysPerBlock >= keys_left) break;
        // Scores.
        float s[K::kInFlight][4][8];
        int key = first + stripe * K::kKeysPerBlock;
        CUTLASS_PRAGMA_UNROLL
        for (int t = 0; t < K::kInFlight; ++t) {
          this->init_scores(s[t], stage, stripe + t);
          this->multiply_qk(s[t], q, stage, stripe + t);
          this->scale_scores(s[t], stage, stripe + t);
        }
        CUTLASS_PRAGMA_UNROLL
        for (int t = 0; t < K::kInFlight; ++t) {
          add_matrices(s[t], bias1[t], bias2[t]);
          load_matrices(bias1[t], bias2[t], segment, key + (K::kInFlight + t) * K::kKeysPerBlock);
          if constexpr (!K::kHasRowBias) this->mask_past_end(s[t], key + t * K::kKeysPerBlock);
        }

        // Probabilities, and O += P V.
        Row largest[K::kInFlight];
        bool moves = false;
        CUTLASS_PRAGMA_UNROLL
        for (int t = 0; t < K::kInFlight; ++t) moves |= softmax.must_move(largest[t], s[t]);
        if (moves) {
          softmax.move(largest_of(largest));
          softmax.rescale(o, softmax.m_prime);
        }
        CUTLASS_PRAGMA_UNROLL
        for (int t = 0; t < K::kInFlight; ++t) {
          softmax.exponentiate(s[t]);
          CUTLASS_PRAGMA_UNROLL
          for (int step = 0; step < K::kStepsKeys; ++step) this->multiply_pv(o, s[t], step, stage, stripe + t);
        }
      }

      if constexpr (K::kAsync) {
        if (next < segment.end) store_row(segment, next, stage ^ 1, next_row);
      }
    }
  }

  // What the loop asks for once a stage, and has no registers for.
  struct Constants {
    const scalar_t *key, *value;
    scalar_t *bias1, *bias2;
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

  CUTLASS_DEVICE bool next_segment(KeySegment& segment) const {
    const KeySegments segments = sConstants()->segments;
    if (!segments.has_more(segment)) return false;
    segment = segments.from(segment.end);
    __syncthreads();  // the last reads of K and V
    return true;
  }
  CUTLASS_DEVICE void seek_matrices(int key) {
    const Constants& block = *sConstants();
    int64_t offset = bias_start.row() * p.bias2_strideM + bias_start.column() + key;
    if constexpr (K::Bias1::kIsMatrix) bias1_ptr = block.bias1 + offset;
    if constexpr (K::Bias2::kIsMatrix) bias2_ptr = block.bias2 + offset;
  }

  template <bool kWhole>
  CUTLASS_DEVICE void load_keys(Loaders& loaders, const KeySegment& segment, int first, int stage) {
    int left = segment.end - first;
    if constexpr (kWhole && K::kKeepsLoaders) {
      // Multiples of the strides would be kept in registers too.
      loaders.k.stride = p.k_strideM, loaders.v.stride = p.v_strideM;
      ptx::keep(loaders.k.stride);
      loaders.k.load(this->sK(stage), left);
      loaders.k.advance();
      ptx::keep(loaders.v.stride);
      loaders.v.load(this->sV(stage), left);
      loaders.v.advance();
    } else {
      const Constants& block = *sConstants();
      const int thread_x = int(ptx::thread_x());
      Loader<KTile>(block.key + first * p.k_strideM, p.k_strideM, p.head_dim, thread_x).load(this->sK(stage), left);
      Loader<VTile>(block.value + first * p.v_strideM, p.v_strideM, p.head_dim_value, thread_x)
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
      K::Bias1::Row::load(x.bias1, kWhole ? p.bias1_ptr : sConstants()->bias1, key, extent, 0);
    if constexpr (K::Bias2::kIsRow) K::Bias2::Row::load(x.bias2, sConstants()->bias2, key, extent, 0);
    return x;
  }
  // In raw units, bias1 shifted; -inf past the last key, which masks the tail.
  CUTLASS_DEVICE void store_row(const KeySegment& segment, int first, int stage, const RowElement& element) const {
    if constexpr (K::kHasRowBias) {
      float x = element.bias1.value();
      if constexpr (K::Bias1::kIsRow) x -= sConstants()->shift;
      if constexpr (K::Bias1::kIsRow && K::Bias2::kIsRow) x += element.bias2.value();
      if constexpr (!K::Bias1::kIsRow) x = element.bias2.value();
      float raw = x * inv_scale;
      const uint32_t thread_x = ptx::thread_x();
      if (first + int(thread_x % kKeys) >= segment.end) raw = -infinity();
      if (thread_x < kKeys) {
        float* s = reinterpret_cast<float*>(this->sRowBias(stage) + thread_x / 2) + thread_x % 2;
        s[0] = raw;
        s[2] = raw;
      }
    }
  }

  // Keys from `key` on, where the pointers stand. They and the extent contain the lane's part: the policy sees the
  // first thread of its map.
  CUTLASS_DEVICE void load_matrices(Frag1& bias1, Frag2& bias2, const KeySegment& segment, int key) {
    cutlass::MatrixCoord extent(p.num_queries - bias_start.row(), segment.end - key - bias_start.column());
    if constexpr (K::Bias1::kIsMatrix) {
      K::Bias1::Matrix::load(bias1, bias1_ptr, 0, extent, p.bias2_strideM);
      bias1_ptr += K::kKeysPerBlock;
    }
    if constexpr (K::Bias2::kIsMatrix) {
      K::Bias2::Matrix::load(bias2, bias2_ptr, 0, extent, p.bias2_strideM);
      bias2_ptr += K::kKeysPerBlock;
    }
  }
  CUTLASS_DEVICE void add_matrices(float (&s)[4][8], const Frag1& bias1, const Frag2& bias2) const {
    if constexpr (K::Bias1::kIsMatrix) this->add_fragment(s, reinterpret_cast<const scalar_t*>(&bias1));
    if constexpr (K::Bias2::kIsMatrix) this->add_fragment(s, reinterpret_cast<const scalar_t*>(&bias2));
  }
  CUTLASS_DEVICE static Row largest_of(const Row (&rows)[K::kInFlight]) {
    Row largest = rows[0];
    CUTLASS_PRAGMA_UNROLL
    for (int t = 1; t < K::kInFlight; ++t) {
      CUTLASS_PRAGMA_UNROLL
      for (int slot = 0; slot < Mma::kSlots; ++slot) largest[slot] = fmaxf(largest[slot], rows[t][slot]);
    }
    return largest;
  }
};

}  // namespace ds4s
