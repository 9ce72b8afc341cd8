// The forward's block with kSingleValueIteration = false, math.md (1) to (7): Q, K and V pass through shared memory in
// pieces of channels, so that any D and Dv fit. AttentionBiasEpilogue adds up the biases of a block of keys in shared
// memory.
//
// Without output_accum_ptr the columns of O are computed kHeadDimValue at a time, in registers, each in a pass over all
// keys. With it there is one pass, and each block of keys' part of O goes through that buffer:
//
//   first block: P V     then: P V + m_prime * old     last block: (P V + m_prime * old) / s_prime
//
// by MemoryEfficientAttentionNormalize. There is shared memory for one block of keys only, with plain barriers: this
// form serves head dimensions beyond the tiers.
#pragma once

#include "../visible_keys.h"
#include "mainloop.h"

namespace ds4s {

template <typename K>
struct ForwardBlockMultiValue : ForwardBlock<K> {
  using Base = ForwardBlock<K>;
  using Params = typename K::Params;
  using scalar_t = typename K::scalar_t;
  using output_t = typename K::output_t;
  using Mma = typename K::Mma;
  using Softmax = typename K::Softmax;
  using Row = typename K::Row;
  using FragA = typename Mma::FragA;
  using Shared = typename K::MultiValue;
  using BiasEpilogue = AttentionBiasEpilogue<cutlass::MatrixShape<32, 32>, scalar_t, /*kThreads=*/32,
                                             K::template Broadcast1, K::template Broadcast2>;
  using Base::kKeys;
  using Base::lane;
  using Base::p;
  using Base::shared;
  using Base::thread;
  using Base::warp_m;
  using Base::warp_n;
  using Keys = VisibleKeys<Base::kKeys, K::kKeysPerBlock, K::kSkips>;
  template <bool kYes>
  struct Flag {
    static constexpr bool kValue = kYes;
  };

  const Keys keys;    // that the row n sees
  const float shift;  // of its bias1
  FragA q[K::kQInRegisters ? K::kStepsD : 1];

  CUTLASS_DEVICE ForwardBlockMultiValue(const Params& params, char* shared_)
      : Base(params, shared_), keys{params.key_mask, 0, params.num_keys}, shift(params.key_mask.shift_of(0)) {}

  CUTLASS_DEVICE void run() {
    if (p.output_accum_ptr != nullptr) return run_through_buffer();
    CUTLASS_PRAGMA_NO_UNROLL
    for (int column = 0; column < p.head_dim_value; column += K::kHeadDimValue) run_in_registers(column);
  }

 private:
  // O[:, column .. column + kHeadDimValue), and lse with the first of them.
  CUTLASS_DEVICE void run_in_registers(int column) {
    if (p.head_dim <= K::kHeadDim) load_q(0);
    Softmax softmax(this->softmax_scale());
    float o[K::kTilesO][8];
    clear(o);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int block = seek(0); keys.has(block); block = seek(block + 1)) {
      float s[4][8];
      compute_scores(s, block);
      Row largest;
      if (softmax.must_move(largest, s)) {
        softmax.move(largest);
        softmax.rescale(o, softmax.m_prime);
      }
      softmax.to_exponents(s);
      softmax.exponentiate(s);
      add_pv(o, s, block, column);
    }
    softmax.finish();
    __syncthreads();  // the last reads of V
    const ForwardEpilogue<K> epilogue{*this};
    epilogue.merge_warps(o, softmax);
    float* logsumexp = column > 0 ? nullptr : p.logsumexp_ptr;
    epilogue.store({p.output_ptr + column, logsumexp, p.o_strideM, p.num_queries, p.head_dim_value - column}, o,
                   softmax);
    __syncthreads();  // O is stored through the buffer of Q
  }

  CUTLASS_DEVICE void run_through_buffer() {
    if (p.head_dim <= K::kHeadDim) load_q(0);
    Softmax softmax(this->softmax_scale());
    const int first_block = seek(0);
    int next;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int block = first_block; keys.has(block); block = next) {
      next = seek(block + 1);
      float s[4][8];
      compute_scores(s, block);
      // The warps of a row of warps share one buffer, hence one reference maximum.
      Row largest;
      softmax.must_move(largest, s);
      share_max(largest);
      softmax.move(largest);
      softmax.to_exponents(s);
      softmax.exponentiate(s);

      bool first = block == first_block, last = !keys.has(next);
      Row sums;
      sums.fill(1.f);
      if (last) finish(softmax, sums);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int column = 0; column < p.head_dim_value; column += K::kHeadDimValue) {
        float o[K::kTilesO][8];
        clear(o);
        add_pv(o, s, block, column);
        add_warps(o);
        if (warp_n != 0) continue;
        if (first && last) {
          put<Flag<true>, Flag<true>>(o, sums, softmax.m_prime, column);
        } else if (first) {
          put<Flag<true>, Flag<false>>(o, sums, softmax.m_prime, column);
        } else if (last) {
          put<Flag<false>, Flag<true>>(o, sums, softmax.m_prime, column);
        } else {
          put<Flag<false>, Flag<false>>(o, sums, softmax.m_prime, column);
        }
      }
    }
  }

  CUTLASS_DEVICE int seek(int block) const {
    return keys.seek(block, [] {});
  }
  CUTLASS_DEVICE static void clear(float (&o)[K::kTilesO][8]) {
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < K::kTilesO * 8; ++x) o[x / 8][x % 8] = 0.f;
  }

  // Loads rows of a matrix from `column` on into a tile; complete after Base::wait_for_loads().
  template <typename TileT>
  CUTLASS_DEVICE void load(const scalar_t* g, int64_t stride, int rows, int column, int columns, scalar_t* s) const {
    typename Base::template Loader<TileT>(g + column, stride, columns - column, thread).load(s, rows);
    if constexpr (K::kAsync) ptx::cp_async_commit();
  }
  CUTLASS_DEVICE void load_q(int channel) {
    load<typename K::QTile>(p.query_ptr, p.q_strideM, p.num_queries, channel, p.head_dim, this->sQ());
    this->prepare_q(q);
  }

  // Scores of this warp's 32 x 32, in the softmax's units, with biases; -inf past the last key.
  CUTLASS_DEVICE void compute_scores(float (&s)[4][8], int block) {
    const int key = block * kKeys;
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < 32; ++x) s[x / 8][x % 8] = 0.f;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int channel = 0; channel < p.head_dim; channel += K::kHeadDim) {
      __syncthreads();  // the last reads of K, and of Q
      load<typename K::KTile>(p.key_ptr + key * p.k_strideM, p.k_strideM, p.num_keys - key, channel, p.head_dim,
                              this->sK(0));
      if (p.head_dim > K::kHeadDim) load_q(channel);
      Base::wait_for_loads();
      this->multiply_qk(s, q, this->first_stripe(0));
    }
    if constexpr (K::kExact) {
      CUTLASS_PRAGMA_UNROLL
      for (int x = 0; x < 32; ++x) s[x / 8][x % 8] *= Base::scale_of(p);
    }
    if constexpr (BiasEpilogue::Broadcast1::kEnable || BiasEpilogue::Broadcast2::kEnable) add_biases(s, key);
    this->mask_past_end(s, key);
  }

  // There is space for the biases of one row of warps at a time.
  CUTLASS_DEVICE void add_biases(float (&s)[4][8], int key) const {
    float* sBias = reinterpret_cast<float*>(shared + Shared::kBegin + warp_m * Shared::kBiasBytes);
    const int first = key + warp_n * 32, rows = p.num_queries - warp_m * 32;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int w = 0; w < K::kWarpsN; ++w) {
      if (w > 0) __syncthreads();
      if (w != warp_n) continue;
      scalar_t *ptr1 = p.bias1_ptr + first, *ptr2 = p.bias2_ptr + first;
      if constexpr (K::Bias1::kIsMatrix) ptr1 += warp_m * 32 * p.bias2_strideM;
      if constexpr (K::Bias2::kIsMatrix) ptr2 += warp_m * 32 * p.bias2_strideM;
      BiasEpilogue()({sBias, Shared::kBiasPitch}, ptr1, ptr2, lane, {rows, p.num_keys - first}, p.bias2_strideM, shift);
      __syncwarp();
      CUTLASS_PRAGMA_UNROLL
      for (int x = 0; x < 32; ++x) {
        int r = Mma::row_of_lane(lane) + Mma::lane_row_of(x % 8) * Mma::kRowStep;
        float bias = sBias[r * Shared::kBiasPitch + Mma::Permuted::at(x / 8, Mma::column_of(lane, x % 8))];
        s[x / 8][x % 8] = fmaf(bias, this->inv_scale, s[x / 8][x % 8]);
      }
    }
  }

  // o += P V[:, column ..] of this warp's keys.
  CUTLASS_DEVICE void add_pv(float (&o)[K::kTilesO][8], const float (&s)[4][8], int block, int column) const {
    const int key = block * kKeys;
    __syncthreads();  // the last reads of V, and of biases
    load<typename K::VTile>(p.value_ptr + key * p.v_strideM, p.v_strideM, p.num_keys - key, column, p.head_dim_value,
                            this->sV(0));
    Base::wait_for_loads();
    CUTLASS_PRAGMA_UNROLL
    for (int step = 0; step < K::kStepsKeys; ++step) this->multiply_pv(o, s, step, this->first_stripe(0));
  }

  // o of warp_n = 0 becomes the sum over the warps of a row.
  CUTLASS_DEVICE void add_warps(float (&o)[K::kTilesO][8]) const {
    float* mine = reinterpret_cast<float*>(shared + Shared::kBegin) + warp_m * 32 * K::kTilesO * 8 + lane;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int other = 1; other < K::kWarpsN; ++other) {
      if (warp_n == other) {
        CUTLASS_PRAGMA_UNROLL
        for (int x = 0; x < K::kTilesO * 8; ++x) mine[32 * x] = o[x / 8][x % 8];
      }
      __syncthreads();
      if (warp_n == 0) {
        CUTLASS_PRAGMA_UNROLL
        for (int x = 0; x < K::kTilesO * 8; ++x) o[x / 8][x % 8] += mine[32 * x];
      }
      __syncthreads();
    }
  }

  CUTLASS_DEVICE int row_in_block(int lane_row) const {
    return warp_m * 32 + Mma::row_of_lane(lane) + lane_row * Mma::kRowStep;
  }

  // x[lane_row] becomes the largest (or the sum) over the warps that have the row.
  template <typename Combine>
  CUTLASS_DEVICE void share(Row& x, Combine combine) const {
    if constexpr (K::kWarpsN > 1) {
      constexpr int kQueries = K::QTile::kRows;
      float* sRows = reinterpret_cast<float*>(shared + Shared::kRowsBegin);
      __syncthreads();
      CUTLASS_PRAGMA_UNROLL
      for (int lane_row = 0; lane_row < Mma::kLaneRows; ++lane_row) {
        if (Mma::leads_row(lane)) sRows[warp_n * kQueries + row_in_block(lane_row)] = x[lane_row];
      }
      __syncthreads();
      CUTLASS_PRAGMA_UNROLL
      for (int lane_row = 0; lane_row < Mma::kLaneRows; ++lane_row) {
        x[lane_row] = sRows[row_in_block(lane_row)];
        for (int w = 1; w < K::kWarpsN; ++w)
          x[lane_row] = combine(x[lane_row], sRows[w * kQueries + row_in_block(lane_row)]);
      }
    }
  }
  CUTLASS_DEVICE void share_max(Row& largest) const {
    CUTLASS_PRAGMA_UNROLL
    for (int lane_row = 0; lane_row < Mma::kLaneRows; ++lane_row)
      largest[lane_row] = Mma::reduce_max(largest[lane_row]);
    share(largest, [](float a, float b) { return fmaxf(a, b); });
  }

  // The rows' sums, infinity where no key is visible; writes lse, math.md (6).
  CUTLASS_DEVICE void finish(Softmax& softmax, Row& sums) const {
    softmax.finish();
    share(softmax.l, [](float a, float b) { return a + b; });
    CUTLASS_PRAGMA_UNROLL
    for (int lane_row = 0; lane_row < Mma::kLaneRows; ++lane_row) {
      int r = row_in_block(lane_row);
      if (p.logsumexp_ptr && warp_n == 0 && Mma::leads_row(lane) && r < p.num_queries) {
        p.logsumexp_ptr[r] = softmax.logsumexp(lane_row);
      }
      sums[lane_row] = softmax.l[lane_row] == 0.f ? infinity() : softmax.l[lane_row];
    }
  }

  // Adds to the buffer, or stores O.
  template <typename First, typename Last>
  CUTLASS_DEVICE void put(const float (&o)[K::kTilesO][8], const Row& sums, const Row& m_prime, int column) const {
    using result_t = typename cutlass::platform::conditional<Last::kValue, output_t, float>::type;
    using Normalize = MemoryEfficientAttentionNormalize<result_t, float, Softmax::kPerSlot, float, float, First::kValue,
                                                        Last::kValue, Row>;
    Normalize normalize(sums, m_prime);
    CUTLASS_PRAGMA_UNROLL
    for (int lane_row = 0; lane_row < Mma::kLaneRows; ++lane_row) {
      int r = row_in_block(lane_row);
      if (r >= p.num_queries) continue;
      float* buffer = p.output_accum_ptr + int64_t(r) * p.head_dim_value;
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < K::kTilesO; ++j) {
        cutlass::Array<float, Softmax::kPerSlot> source;
        CUTLASS_PRAGMA_UNROLL
        for (int e = 0; e < Softmax::kPerSlot; ++e) {
          int c = column + 8 * j + column_of_element(e);
          source[e] = !First::kValue && c < p.head_dim_value ? buffer[c] : 0.f;
        }
        auto x = normalize(lane_row, Softmax::get(o[j], lane_row), source);
        if (Last::kValue && sums[lane_row] == infinity()) x.clear();  // whatever V holds
        CUTLASS_PRAGMA_UNROLL
        for (int e = 0; e < Softmax::kPerSlot; ++e) {
          int c = column + 8 * j + column_of_element(e);
          if (c >= p.head_dim_value) continue;
          if constexpr (Last::kValue) {
            p.output_ptr[int64_t(r) * p.o_strideM + c] = x[e];
          } else {
            buffer[c] = x[e];
          }
        }
      }
    }
  }
  // Element e of the result of Softmax::get.
  CUTLASS_DEVICE int column_of_element(int e) const { return Mma::column_of(lane, 4 * (e / 2)) + e % 2; }
};

}  // namespace ds4s
