// What one block of kernel_forward.h does: prologue, loop over the key blocks, merge of its warps, store.
// K below is the AttentionKernel: its types and numbers. Members are a lane's constants, the loop's state lives in
// run().
#pragma once

#include "../../transform/bias_broadcast.h"
#include "key_segments.h"
#include "softmax.h"

namespace ds4s {

template <typename K>
struct ForwardBlock {
  using Params = typename K::Params;
  using scalar_t = typename K::scalar_t;
  using output_t = typename K::output_t;
  using Mma = typename K::Mma;
  using Softmax = typename K::Softmax;
  using Row = typename K::Row;
  using QTile = typename K::QTile;
  using KTile = typename K::KTile;
  using VTile = typename K::VTile;
  using OTile = typename K::OTile;
  using FragA = typename Mma::FragA;
  using Frag1 = typename K::Bias1::Matrix::Fragment;
  using Frag2 = typename K::Bias2::Matrix::Fragment;
  template <typename TileT>
  using Loader = TileLoader<scalar_t, TileT, K::kNumThreads, K::kIsAligned, K::kAsync>;

  static constexpr int kQueries = K::QTile::kRows;
  static constexpr int kKeys = K::kKeysPerStage;

  const Params& p;
  char* const shared;
  const int thread, lane, warp_m, warp_n;
  const float inv_scale;  // biases enter the accumulator in raw units, those of kQFactor Q K^T; full precision: 1
  int lane_q, lane_k, lane_v, lane_row;  // this lane's offsets in the tiles
  scalar_t *bias1_ptr, *bias2_ptr;       // of a matrix: the lane's first element of the next key block
  cutlass::MatrixCoord bias_start;

  CUTLASS_DEVICE ForwardBlock(const Params& params, char* shared_)
      : p(params),
        shared(shared_),
        thread(int(threadIdx.x)),
        lane(int(threadIdx.x) & 31),
        warp_m(int(threadIdx.x) / 32 % K::kWarpsM),
        warp_n(int(threadIdx.x) / 32 / K::kWarpsM),
        inv_scale(K::kExact ? 1.f : K::kQFactor / scale_of(params)),
        lane_q(Mma::template lane_a<QTile>(lane) + QTile::offset(warp_m * 32)),
        lane_k(Mma::template lane_b_nk<KTile>(lane) + KTile::offset(warp_n * 32)),
        lane_v(Mma::template lane_b_kn<VTile>(lane) + VTile::offset(warp_n * 32)),
        lane_row((warp_n * 32 + Mma::Permuted::at(0, Mma::column_of(lane, 0))) / 2),
        bias1_ptr(nullptr),
        bias2_ptr(nullptr) {
    ptx::keep(lane_q), ptx::keep(lane_k), ptx::keep(lane_v), ptx::keep(lane_row);
    auto start = K::MatrixMap::initial_offset(thread);
    bias_start = cutlass::MatrixCoord(start.strided(), start.contiguous());
  }

  // The scores' factor, which is positive: Q takes its sign.
  CUTLASS_DEVICE static float scale_of(const Params& params) {
    if constexpr (K::kIsComplete) return params.scale;
    return params.scale == 0.f ? 1.f : fabsf(params.scale);
  }
  CUTLASS_DEVICE float q_factor() const {
    if constexpr (K::kIsComplete) return K::kQFactor;
    return p.scale == 0.f ? 0.f : copysignf(K::kQFactor, p.scale);
  }

  CUTLASS_DEVICE float softmax_scale() const { return K::kExact ? 1.f : scale_of(p) / K::kQFactor; }

  // mask: of the row n, which sees something.
  CUTLASS_DEVICE void run(const RowMask& mask) {
    Loader<QTile>(p.query_ptr, p.q_strideM, p.head_dim, thread).load(sQ(), p.num_queries);
    const KeySegments segments(mask, p.num_keys);
    if (thread == 0) {
      *sConstants() = {p.key_ptr,       p.value_ptr, p.bias1_ptr, p.bias2_ptr,  p.output_ptr,
                       p.logsumexp_ptr, segments,    mask.shift,  p.num_queries};
    }
    __syncthreads();
    Softmax softmax(softmax_scale());
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
    merge_warps(o, softmax);
    const Constants& block = *sConstants();
    store({block.output, block.logsumexp, block.num_queries, p.head_dim_value}, o, softmax);
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
    prepare_q(q, is_first);

    CUTLASS_PRAGMA_NO_UNROLL
    for (int first = segment.begin, turn = 0; first < segment.end; first += kKeys, ++turn) {
      // These keys' K, V and row bias arrive; the next ones' set out.
      int stage = (kWhole ? first / kKeys : turn) % K::kStages, next = first + kKeys;
      RowElement next_row;
      if constexpr (K::kAsync) {
        wait_for_loads();
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
          init_scores(s[t], stage, stripe + t);
          multiply_qk(s[t], q, stage, stripe + t);
          scale_scores(s[t], stage, stripe + t);
        }
        CUTLASS_PRAGMA_UNROLL
        for (int t = 0; t < K::kInFlight; ++t) {
          add_matrices(s[t], bias1[t], bias2[t]);
          load_matrices(bias1[t], bias2[t], segment, key + (K::kInFlight + t) * K::kKeysPerBlock);
          if constexpr (!K::kHasRowBias) mask_past_end(s[t], key + t * K::kKeysPerBlock);
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
          for (int step = 0; step < K::kStepsKeys; ++step) multiply_pv(o, s[t], step, stage, stripe + t);
        }
      }

      if constexpr (K::kAsync) {
        if (next < segment.end) store_row(segment, next, stage ^ 1, next_row);
      }
    }
  }

  CUTLASS_DEVICE scalar_t* sQ() const { return reinterpret_cast<scalar_t*>(shared); }
  CUTLASS_DEVICE char* stage_begin(int stage) const { return shared + QTile::kBytes + stage * K::kStageBytes; }
  CUTLASS_DEVICE scalar_t* sK(int stage) const { return reinterpret_cast<scalar_t*>(stage_begin(stage)); }
  CUTLASS_DEVICE scalar_t* sV(int stage) const {
    return reinterpret_cast<scalar_t*>(stage_begin(stage) + KTile::kBytes);
  }
  // One float4 (x, y, x, y) for each pair of keys: the C operand of two rows.
  CUTLASS_DEVICE float4* sRowBias(int stage) const {
    return reinterpret_cast<float4*>(stage_begin(stage) + KTile::kBytes + VTile::kBytes);
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

  // Everything this thread loaded is there, and every warp is done with what it read before.
  CUTLASS_DEVICE static void wait_for_loads() {
    if constexpr (K::kAsync) ptx::cp_async_wait<0>();
    __syncthreads();
  }

  // Q, which has been sent for, times kQFactor, in registers or where it is.
  template <int kCount>
  CUTLASS_DEVICE void prepare_q(FragA (&q)[kCount], bool is_first = true) const {
    if constexpr (K::kQInRegisters) {
      wait_for_loads();
      CUTLASS_PRAGMA_UNROLL
      for (int step = 0; step < K::kStepsD; ++step) {
        load_q(q[step], step);
        scale_q<int(sizeof(FragA)) / 4, /*kStep=*/1>(reinterpret_cast<uint32_t*>(&q[step]), /*first=*/0);
      }
    } else if (K::kScalesQ && is_first) {
      wait_for_loads();
      scale_q<QTile::kBytes / 4, K::kNumThreads>(reinterpret_cast<uint32_t*>(sQ()), thread);
      __syncthreads();
    }
  }
  // Words first, first + kStep, .. below kCount.
  template <int kCount, int kStep>
  CUTLASS_DEVICE void scale_q(uint32_t* words, int first) const {
    if constexpr (K::kScalesQ) {
      words += first;
      CUTLASS_PRAGMA_UNROLL
      for (int x = 0; x < kCount; x += kStep) {
        if (kCount % kStep == 0 || first + x < kCount) words[x] = ptx::scale_word<scalar_t>(words[x], q_factor());
      }
    }
  }

  template <bool kWhole>
  CUTLASS_DEVICE void load_keys(Loaders& loaders, const KeySegment& segment, int first, int stage) {
    int left = segment.end - first;
    if constexpr (kWhole && K::kKeepsLoaders) {
      // Multiples of the strides would be kept in registers too.
      loaders.k.stride = p.k_strideM, loaders.v.stride = p.v_strideM;
      ptx::keep(loaders.k.stride);
      loaders.k.load(sK(stage), left);
      loaders.k.advance();
      ptx::keep(loaders.v.stride);
      loaders.v.load(sV(stage), left);
      loaders.v.advance();
    } else {
      const Constants& block = *sConstants();
      const int thread_x = int(ptx::thread_x());
      Loader<KTile>(block.key + first * p.k_strideM, p.k_strideM, p.head_dim, thread_x).load(sK(stage), left);
      Loader<VTile>(block.value + first * p.v_strideM, p.v_strideM, p.head_dim_value, thread_x).load(sV(stage), left);
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
        float* s = reinterpret_cast<float*>(sRowBias(stage) + thread_x / 2) + thread_x % 2;
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
    if constexpr (K::Bias1::kIsMatrix) add_fragment(s, reinterpret_cast<const scalar_t*>(&bias1));
    if constexpr (K::Bias2::kIsMatrix) add_fragment(s, reinterpret_cast<const scalar_t*>(&bias2));
  }
  CUTLASS_DEVICE void add_fragment(float (&s)[4][8], const scalar_t* fragment) const {
    CUTLASS_PRAGMA_UNROLL
    for (int slot = 0; slot < Mma::kSlots; ++slot) {
      CUTLASS_PRAGMA_UNROLL
      for (int group = 0; group < Mma::kGroups; ++group) {
        const scalar_t* vec = fragment + (slot * Mma::kGroups + group) * Mma::kVec;
        CUTLASS_PRAGMA_UNROLL
        for (int e = 0; e < Mma::kVec; e += 2) {
          float2 x = ptx::load_pair(vec + e);
          float* score = &s[Mma::tile_of(group, e)][Mma::value_of(slot, e)];
          score[0] = fmaf(x.x, inv_scale, score[0]);
          score[1] = fmaf(x.y, inv_scale, score[1]);
        }
      }
    }
  }

  // The product's accumulator begins with the row bias, in raw units. In full precision it would be rounded at the size
  // of the bias, which a finite mask makes large, in every step; there the finished product is scaled and biases are
  // added.
  CUTLASS_DEVICE void init_scores(float (&s)[4][8], int stage, int stripe) const {
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 4; ++j) {
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < 2; ++half) {
        float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
        if constexpr (K::kHasRowBias && !K::kExact) x = row_bias(stage, stripe, j, half);
        s[j][4 * half] = x.x, s[j][4 * half + 1] = x.y, s[j][4 * half + 2] = x.z, s[j][4 * half + 3] = x.w;
      }
    }
  }
  CUTLASS_DEVICE void scale_scores(float (&s)[4][8], int stage, int stripe) const {
    if constexpr (K::kExact) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < 4; ++j) {
        CUTLASS_PRAGMA_UNROLL
        for (int half = 0; half < 2; ++half) {
          float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
          if constexpr (K::kHasRowBias) x = row_bias(stage, stripe, j, half);
          float* tile = &s[j][4 * half];
          tile[0] = fmaf(tile[0], p.scale, x.x), tile[1] = fmaf(tile[1], p.scale, x.y);
          tile[2] = fmaf(tile[2], p.scale, x.z), tile[3] = fmaf(tile[3], p.scale, x.w);
        }
      }
    }
  }
  CUTLASS_DEVICE float4 row_bias(int stage, int stripe, int j, int half) const {
    int pair = lane_row + stripe * K::kKeysPerBlock / 2 + Mma::Permuted::at(j, Mma::column_of(0, 4 * half)) / 2;
    return sRowBias(stage)[pair];
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

  CUTLASS_DEVICE void load_q(FragA& a, int step) const {
    Mma::template load_a<QTile>(a, sQ() + lane_q, 0, step * Mma::kStepK);
  }
  CUTLASS_DEVICE void multiply_qk(float (&s)[4][8], const FragA* q, int stage, int stripe) const {
    // FFMA's many short steps one by one: all in flight at once they do not fit in the registers.
    constexpr int kUnroll = Mma::kStepK < 8 ? 1 : K::kStepsD;
#pragma unroll kUnroll
    for (int step = 0; step < K::kStepsD; ++step) {
      FragA a;
      if constexpr (K::kQInRegisters) {
        a = q[step];
      } else {
        load_q(a, step);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int pair = 0; pair < 2; ++pair) {
        typename Mma::FragBnk b;
        Mma::template load_b_nk<KTile>(b, sK(stage) + lane_k, stripe * K::kKeysPerBlock, pair, step * Mma::kStepK);
        Mma::mma(s[2 * pair], s[2 * pair + 1], a, b);
      }
    }
  }
  CUTLASS_DEVICE void multiply_pv(float (&o)[K::kTilesO][8], const float (&s)[4][8], int step, int stage,
                                  int stripe) const {
    FragA a;
    Mma::from_scores(a, s, step, lane);
    CUTLASS_PRAGMA_UNROLL
    for (int n = 0; n < K::kTilesO; n += 2) {
      typename Mma::FragBkn b;
      Mma::template load_b_kn<VTile>(b, sV(stage) + lane_v, stripe * K::kKeysPerBlock, step, 8 * n);
      Mma::mma(o[n], o[n + 1], a, b);
    }
  }

  // Without a row bias nothing masks the keys past the end: only the last block has any.
  CUTLASS_DEVICE void mask_past_end(float (&s)[4][8], int key) const {
    int left = p.num_keys - key - warp_n * 32;
    if (left >= 32) return;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 4; ++j) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 8; ++i) {
        if (Mma::Permuted::at(j, Mma::column_of(lane, i)) >= left) s[j][i] = -infinity();
      }
    }
  }

  // Warps with the same rows and other keys: warp_n = 0 takes in the others, one after another, always in this order.
  CUTLASS_DEVICE void merge_warps(float (&o)[K::kTilesO][8], Softmax& softmax) const {
    constexpr int kValues = K::kTilesO * 8;
    float* s = reinterpret_cast<float*>(shared) + warp_m * 32 * (kValues + 2 * Mma::kSlots) + lane;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int other = 1; other < K::kWarpsN; ++other) {
      if (warp_n == other) {
        CUTLASS_PRAGMA_UNROLL
        for (int x = 0; x < kValues; ++x) s[32 * x] = o[x / 8][x % 8];
        CUTLASS_PRAGMA_UNROLL
        for (int slot = 0; slot < Mma::kSlots; ++slot) {
          s[32 * (kValues + slot)] = softmax.cm[slot];
          s[32 * (kValues + Mma::kSlots + slot)] = softmax.l[slot];
        }
      }
      __syncthreads();
      if (warp_n == 0) {
        Row mine, theirs;
        CUTLASS_PRAGMA_UNROLL
        for (int slot = 0; slot < Mma::kSlots; ++slot) {
          theirs[slot] = softmax.join(slot, s[32 * (kValues + slot)], s[32 * (kValues + Mma::kSlots + slot)]);
          mine[slot] = softmax.m_prime[slot];
        }
        softmax.rescale(o, mine);
        CUTLASS_PRAGMA_UNROLL
        for (int x = 0; x < kValues; ++x) {
          o[x / 8][x % 8] = fmaf(s[32 * x], theirs[Mma::slot_of(x % 8)], o[x / 8][x % 8]);
        }
      }
      __syncthreads();
    }
  }

  // O / l through shared memory, so that rows leave in 16-byte chunks; lse.
  struct Output {
    output_t* ptr;
    float* logsumexp;  // or null
    int num_queries, num_columns;
  };
  CUTLASS_DEVICE void store(const Output& out, const float (&o)[K::kTilesO][8], Softmax& softmax) const {
    using Normalize = MemoryEfficientAttentionNormalize<output_t, float, Softmax::kPerSlot, float, float,
                                                        /*isFirst=*/true, /*isLast=*/true, Row>;
    output_t* sO = reinterpret_cast<output_t*>(shared);
    if (warp_n == 0) {
      int row = warp_m * 32 + Mma::row_of_lane(lane);
      Row sums;
      CUTLASS_PRAGMA_UNROLL
      for (int slot = 0; slot < Mma::kSlots; ++slot) {
        int r = row + slot * Mma::kRowStep;
        if (out.logsumexp && Mma::leads_row(lane) && r < out.num_queries) {
          out.logsumexp[r] = softmax.logsumexp(slot);
        }
        sums[slot] = softmax.l[slot] == 0.f ? 1.f : softmax.l[slot];  // nothing visible: 0 / 1
      }
      Normalize normalize(sums, softmax.m_prime);
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < K::kTilesO; ++j) {
        CUTLASS_PRAGMA_UNROLL
        for (int slot = 0; slot < Mma::kSlots; ++slot) {
          auto x = normalize(slot, Softmax::get(o[j], slot));
          CUTLASS_PRAGMA_UNROLL
          for (int pair = 0; pair < Softmax::kPerSlot / 2; ++pair) {
            int column = 8 * j + Mma::column_of(lane, 4 * pair);
            output_t* dst = sO + OTile::offset(row) + OTile::offset(slot * Mma::kRowStep, column);
            dst[0] = x[2 * pair];
            dst[1] = x[2 * pair + 1];
          }
        }
      }
    }
    __syncthreads();
    TileStorer<output_t, OTile, K::kNumThreads, K::kIsAligned>::store(out.ptr, p.o_strideM, sO, thread, out.num_queries,
                                                                      out.num_columns);
  }
};

}  // namespace ds4s
