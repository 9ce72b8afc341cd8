// The forward's block when O does not fit in registers (kSingleValueIteration = false): for each key block the scores
// are computed once, then V passes in chunks of kHeadDimValue columns and each part of O goes through output_accum_ptr:
//
//   first block: P V     then: P V + m_prime * old     last block: (P V + m_prime * old) / s_prime, in the output's
//   type
//
// which is MemoryEfficientAttentionNormalize. Any Dv; shared memory for one block of keys, plain barriers: this form is
// for head dimensions beyond the tiers, not for speed.
#pragma once

#include "mainloop.h"

namespace ds4s {

template <typename K>
struct ForwardBlockBuffered : ForwardBlock<K> {
  using Base = ForwardBlock<K>;
  using Params = typename K::Params;
  using scalar_t = typename K::scalar_t;
  using output_t = typename K::output_t;
  using Mma = typename K::Mma;
  using Softmax = typename K::Softmax;
  using Row = typename K::Row;
  using VTile = typename K::VTile;
  using Base::kKeys;
  using Base::lane;
  using Base::p;
  using Base::shared;
  using Base::thread;
  using Base::warp_m;
  using Base::warp_n;
  template <bool kYes>
  struct Flag {
    static constexpr bool kValue = kYes;
  };

  CUTLASS_DEVICE ForwardBlockBuffered(const Params& params, char* shared_) : Base(params, shared_) {}

  CUTLASS_DEVICE void run() {
    typename Base::template Loader<typename K::QTile>(p.query_ptr, p.q_strideM, p.head_dim, thread)
        .load(this->sQ(), p.num_queries);
    if constexpr (K::kAsync) ptx::cp_async_commit();
    const int first_block = this->begin();
    typename Mma::FragA q[K::kQInRegisters ? K::kStepsD : 1];
    this->prepare_q(q);

    Softmax softmax(K::kExact ? 1.f : p.scale / K::kQFactor);
    int next;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int block = first_block; this->has_keys(block); block = next) {
      __syncthreads();
      this->load_keys(block, 0);
      this->store_row(block, 0, this->load_row(block, this->constants()), this->constants());
      typename Base::Frag1 bias1;
      typename Base::Frag2 bias2;
      this->load_matrices(bias1, bias2, block * kKeys);
      next = this->seek(block + 1, this->constants());
      Base::wait_for_loads();

      float s[4][8];
      this->init_scores(s, 0, 0);
      this->multiply_qk(s, q, 0, 0);
      this->scale_scores(s, 0, 0);
      this->add_matrices(s, bias1, bias2);
      if constexpr (!K::kHasRowBias) this->mask_past_end(s, block * kKeys);

      // The warps of a row share one buffer, hence one reference maximum.
      Row largest;
      softmax.must_move(largest, s);
      share_max(largest);
      softmax.move(largest);
      softmax.exponentiate(s);

      bool first = block == first_block, last = !this->has_keys(next);
      Row sums;
      sums.fill(1.f);
      if (last) finish(softmax, sums);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int column = 0; column < p.head_dim_value; column += K::kHeadDimValue) {
        float o[K::kTilesO][8];
        multiply_chunk(o, s, block, column);
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

 private:
  CUTLASS_DEVICE float* sMerge() const { return reinterpret_cast<float*>(shared + K::kLoopBytes); }
  CUTLASS_DEVICE float* sRowMax() const { return reinterpret_cast<float*>(shared + K::kLoopBytes + K::kMergeBytes); }
  CUTLASS_DEVICE int row_in_block(int slot) const {
    return warp_m * 32 + Mma::row_of_lane(lane) + slot * Mma::kRowStep;
  }

  // x[slot] becomes the largest (or the sum) over the warps that have the row.
  template <typename Combine>
  CUTLASS_DEVICE void share(Row& x, Combine combine) const {
    if constexpr (K::kWarpsN > 1) {
      constexpr int kQueries = K::QTile::kRows;
      __syncthreads();
      CUTLASS_PRAGMA_UNROLL
      for (int slot = 0; slot < Mma::kSlots; ++slot) {
        if (Mma::leads_row(lane)) sRowMax()[warp_n * kQueries + row_in_block(slot)] = x[slot];
      }
      __syncthreads();
      CUTLASS_PRAGMA_UNROLL
      for (int slot = 0; slot < Mma::kSlots; ++slot) {
        x[slot] = sRowMax()[row_in_block(slot)];
        for (int w = 1; w < K::kWarpsN; ++w) x[slot] = combine(x[slot], sRowMax()[w * kQueries + row_in_block(slot)]);
      }
    }
  }
  CUTLASS_DEVICE void share_max(Row& largest) const {
    CUTLASS_PRAGMA_UNROLL
    for (int slot = 0; slot < Mma::kSlots; ++slot) largest[slot] = Mma::reduce_max(largest[slot]);
    share(largest, [](float a, float b) { return fmaxf(a, b); });
  }

  // The rows' sums, 1 where nothing was visible; writes lse.
  CUTLASS_DEVICE void finish(Softmax& softmax, Row& sums) const {
    softmax.finish();
    share(softmax.l, [](float a, float b) { return a + b; });
    CUTLASS_PRAGMA_UNROLL
    for (int slot = 0; slot < Mma::kSlots; ++slot) {
      int row = row_in_block(slot);
      if (p.logsumexp_ptr && warp_n == 0 && Mma::leads_row(lane) && row < p.num_queries) {
        p.logsumexp_ptr[row] = softmax.logsumexp(slot);
      }
      sums[slot] = softmax.l[slot] == 0.f ? 1.f : softmax.l[slot];
    }
  }

  // o = P V[:, column ..], summed over the warps of a row into warp_n = 0.
  CUTLASS_DEVICE void multiply_chunk(float (&o)[K::kTilesO][8], const float (&s)[4][8], int block, int column) const {
    __syncthreads();
    typename Base::template Loader<VTile> loader(p.value_ptr + int64_t(block) * kKeys * p.v_strideM + column,
                                                 p.v_strideM, p.head_dim_value - column, thread);
    loader.load(this->sV(0), p.num_keys - block * kKeys);
    if constexpr (K::kAsync) ptx::cp_async_commit();
    Base::wait_for_loads();
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < K::kTilesO * 8; ++x) o[x / 8][x % 8] = 0.f;
    CUTLASS_PRAGMA_UNROLL
    for (int step = 0; step < K::kStepsKeys; ++step) this->multiply_pv(o, s, step, 0, 0);

    float* mine = sMerge() + warp_m * 32 * K::kTilesO * 8 + lane;
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

  template <typename First, typename Last>
  CUTLASS_DEVICE void put(const float (&o)[K::kTilesO][8], const Row& sums, const Row& m_prime, int column) const {
    using result_t = typename cutlass::platform::conditional<Last::kValue, output_t, float>::type;
    using Normalize = MemoryEfficientAttentionNormalize<result_t, float, Softmax::kPerSlot, float, float, First::kValue,
                                                        Last::kValue, Row>;
    Normalize normalize(sums, m_prime);
    CUTLASS_PRAGMA_UNROLL
    for (int slot = 0; slot < Mma::kSlots; ++slot) {
      int row = row_in_block(slot);
      if (row >= p.num_queries) continue;
      float* buffer = p.output_accum_ptr + int64_t(row) * p.head_dim_value;
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < K::kTilesO; ++j) {
        cutlass::Array<float, Softmax::kPerSlot> source;
        CUTLASS_PRAGMA_UNROLL
        for (int e = 0; e < Softmax::kPerSlot; ++e) {
          int c = column + 8 * j + column_of_element(e);
          source[e] = !First::kValue && c < p.head_dim_value ? buffer[c] : 0.f;
        }
        auto x = normalize(slot, Softmax::get(o[j], slot), source);
        CUTLASS_PRAGMA_UNROLL
        for (int e = 0; e < Softmax::kPerSlot; ++e) {
          int c = column + 8 * j + column_of_element(e);
          if (c >= p.head_dim_value) continue;
          if constexpr (Last::kValue) {
            p.output_ptr[int64_t(row) * p.o_strideM + c] = x[e];
          } else {
            buffer[c] = x[e];
          }
        }
      }
    }
  }
  // Element e of what Softmax::get returns.
  CUTLASS_DEVICE int column_of_element(int e) const { return Mma::column_of(lane, 4 * (e / 2)) + e % 2; }
};

}  // namespace ds4s
