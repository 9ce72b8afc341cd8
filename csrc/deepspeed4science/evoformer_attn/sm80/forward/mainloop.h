// One block of kernel_forward.h: prologue, loop over the key blocks (math.md (1) to (7)), epilogue. The template
// parameter K is the AttentionKernel with its types and numbers. The loop's state lives in run().
#pragma once

#include "epilogue.h"
#include "loads.h"
#include "softmax.h"
#include "unseen.h"

namespace ds4s {

template <typename K>
struct ForwardBlock : ForwardLoads<K> {
  using Base = ForwardLoads<K>;
  using scalar_t = typename K::scalar_t;
  using QTile = typename K::QTile;
  using Mma = typename K::Mma;
  using Softmax = typename K::Softmax;
  using Row = typename K::Row;
  using FragA = typename Mma::FragA;
  using typename Base::Constants;
  using typename Base::Frag1;
  using typename Base::Frag2;
  using typename Base::RowElement;
  using typename Base::SegmentStart;
  template <typename TileT>
  using Loader = typename Base::template Loader<TileT>;
  using Base::Base;
  using Base::bias1_ptr;
  using Base::bias2_ptr;
  using Base::kKeys;
  using Base::p;
  using Base::sConstants;
  using Base::thread;
  static constexpr int kSumSteps = K::kStripes > 1 ? 1 : 4;  // large sums are looked for every so many stages

  // mask: that of the block's row n.
  CUTLASS_DEVICE void run(const RowMask& mask) {
    // The addresses of the first loads are computed while the mask is being loaded.
    Loader<QTile> loader_q(p.query_ptr, p.q_strideM, p.head_dim, thread);
    SegmentStart start;
    if constexpr (K::kSendsEarly) {
      this->locate(start, {p.key_ptr, p.value_ptr, p.bias1_ptr, p.bias2_ptr}, 0);
      ptx::keep(loader_q.g), ptx::keep(loader_q.s);
      ptx::keep(start.k.g), ptx::keep(start.k.s);
      ptx::keep(start.v.g), ptx::keep(start.v.s);
      if constexpr (K::Bias1::kIsMatrix) ptx::keep(bias1_ptr);
      if constexpr (K::Bias2::kIsMatrix) ptx::keep(bias2_ptr);
    }
    if (mask.sees_nothing()) return store_unseen<K>(p);
    loader_q.load(this->sQ(), p.num_queries);
    const KeySegment all{0, p.num_keys};
    const bool is_sent = K::kSendsEarly && (!K::kSkips || mask.range.x == 0);
    if (is_sent) this->template send</*kInRegisters=*/true, /*kWhole=*/true>(start, all, mask.shift);
    const KeySegments segments(mask, p.num_keys);
    if (thread == 0) {
      *sConstants() = {{p.key_ptr, p.value_ptr, p.bias1_ptr, p.bias2_ptr},
                       p.output_ptr,
                       p.logsumexp_ptr,
                       segments,
                       mask.shift,
                       p.num_queries};
    }
    Softmax softmax(this->softmax_scale());
    float o[K::kTilesO][8];
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < K::kTilesO; ++j) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 8; ++i) o[j][i] = 0.f;
    }

    // Most rows n see all keys. ptxas uses no uniform registers in a loop whose bounds come from memory, and such a
    // loop takes 5 % longer; so only rows n with hidden keys take it.
    KeySegment segment = K::kSkips ? segments.first(mask) : all;
    const bool is_whole = segment.begin == 0 && segment.end == p.num_keys;
    const bool is_tiled = K::kReadsTiles && p.bias2_key_stride != 1;
    if (K::kHasWholeLoop && is_whole && is_tiled == K::kReadsTiles) {
      add_segment</*kWhole=*/true, K::kFixesReference, K::kReadsTiles>(o, softmax, all, start,
                                                                       /*is_sent=*/K::kSendsEarly, /*is_first=*/true);
    } else {
      bool is_first = true, has_more = true;
      if constexpr (K::kReadsTiles) {
        // A stripe that begins within a tile ends in one of other queries: from there on, the other loop.
        CUTLASS_PRAGMA_NO_UNROLL
        while (is_tiled && has_more && segment.begin % 32 == 0) {
          add_segment</*kWhole=*/false, K::kFixesReference, /*kTiles=*/true>(o, softmax, segment, start,
                                                                             is_sent && is_first, is_first);
          is_first = false, has_more = next_segment(segment);
        }
      }
      if (has_more) {
        CUTLASS_PRAGMA_NO_UNROLL
        do {
          add_segment</*kWhole=*/false, K::kFixesReference, /*kTiles=*/false>(o, softmax, segment, start,
                                                                              is_sent && is_first, is_first);
          is_first = false;
        } while (next_segment(segment));
      }
    }

    // A barrier: the last reads of K and V.
    softmax.finish();
    if constexpr (K::kFixesReference) {
      if (__syncthreads_or(!softmax.fits(o))) {
        repeat(o, softmax);
        __syncthreads();
      }
    } else {
      __syncthreads();
    }
    const ForwardEpilogue<K> epilogue{*this};
    epilogue.merge_warps(o, softmax);
    const Constants& block = *sConstants();
    epilogue.store({block.output, block.logsumexp, p.o_strideM, block.num_queries, p.head_dim_value}, o, softmax);
  }

 protected:
  // Computes O again, with references that move: where those of the first keys were not right for some query.
  CUTLASS_DEVICE void repeat(float (&o)[K::kTilesO][8], Softmax& softmax) {
    softmax = Softmax(this->softmax_scale());
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < 8 * K::kTilesO; ++x) o[x / 8][x % 8] = 0.f;
    KeySegment segment = sConstants()->segments.first();
    SegmentStart start;
    CUTLASS_PRAGMA_NO_UNROLL
    do {
      add_segment</*kWhole=*/false, /*kFixesReference=*/false, /*kTiles=*/false>(o, softmax, segment, start,
                                                                                 /*is_sent=*/false, /*is_first=*/false);
    } while (next_segment(segment));
    softmax.finish();
  }

  // O += P V for the keys of a segment. kWhole: the segment is all keys. is_sent: the first loads have been issued.
  // is_first: of a block's segments. kTiles: bias2 lies in tiles, and the segment
  // begins with one; else it may.
  template <bool kWhole, bool kFixesReference, bool kTiles>
  CUTLASS_DEVICE void add_segment(float (&o)[K::kTilesO][8], Softmax& softmax, const KeySegment& segment,
                                  SegmentStart& start, bool is_sent, bool is_first) {
    constexpr bool kInRegisters = kWhole && K::kKeepsLoaders;
    constexpr bool kLoadsLate = K::kLoadsLate && kFixesReference == K::kFixesReference;
    Frag1& bias1 = start.bias1;
    Frag2& bias2 = start.bias2;
    if (!is_sent) {
      __syncthreads();  // the block's constants; the last reads of K and V
      this->locate(start, sConstants()->pointers, segment.begin);
      this->template send<kInRegisters, kWhole>(start, segment, sConstants()->shift);
    }
    if constexpr (K::kAsync) this->store_row(segment, segment.begin, 0, start.element, start.shift);
    FragA q[K::kQInRegisters ? K::kStepsD : 1];
    this->prepare_q(q, is_first);
    typename Base::TileSequence tiles = this->tiles_from(segment.begin + K::kKeysPerBlock);

    CUTLASS_PRAGMA_NO_UNROLL
    for (int first = segment.begin, step = 0; first < segment.end; first += kKeys, ++step) {
      // Waits for K, V and the row bias of these keys and issues the loads of the next ones.
      int stage = (kWhole ? first / kKeys : step) % K::kStages, next = first + kKeys;
      RowElement next_row;
      if constexpr (K::kAsync) {
        this->wait_for_loads();
        if (next < segment.end) {
          this->template load_keys<kInRegisters>(start, segment, next, stage ^ 1),
              next_row = this->template load_row<kWhole>(segment, next);
        }
      } else {
        __syncthreads();
        this->template load_keys<kInRegisters>(start, segment, first, 0);
        this->store_row(segment, first, 0, this->template load_row<kWhole>(segment, first), sConstants()->shift);
        __syncthreads();
      }

      if (kFixesReference && step % kSumSteps == kSumSteps - 1) softmax.lower(o);

      // Skips stripes without keys. The test, false for the first stripe, also keeps ptxas from reordering across it:
      // 1.25 instead of 1.38 ms at D = 64, 1.20 instead of 1.31 at D = 128.
      int keys_left = segment.end - first;
      typename Base::Stripe at = this->first_stripe(stage);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int stripe = 0; stripe < K::kStripes; at.advance(++stripe)) {
        if (stripe * K::kKeysPerBlock >= keys_left) break;
        // Scores, math.md (1) and (1a): the shift of a row bias is already subtracted.
        float s[4][8];
        const int key = first + stripe * K::kKeysPerBlock;
        auto load_next_matrices = [&] {
          if constexpr (K::kStagesBias2) return;
          if constexpr (kTiles) {
            tiles.load(bias2);
          } else {
            this->load_matrices(bias1, bias2, segment, key + K::kKeysPerBlock);
          }
        };
        if constexpr (K::kStagesBias2) this->fetch_bias2(bias2, stripe);
        this->init_scores(s, at);
        this->multiply_qk(s, q, at);
        this->scale_scores(s, at);
        add_matrices(s, bias1, bias2);
        if constexpr (!kLoadsLate) {
          load_next_matrices();
          if constexpr (!K::kHasRowBias) this->mask_past_end(s, key);
        }

        // Probabilities and O += P V, math.md (7).
        if constexpr (kFixesReference) {
          if (is_first && step + stripe == 0) softmax.begin(s);
        } else {
          Row largest;
          if (softmax.must_move(largest, s)) {
            softmax.move(largest);
            softmax.rescale(o, softmax.m_prime);
          }
        }
        softmax.to_exponents(s);
        if constexpr (kLoadsLate) load_next_matrices();
        softmax.exponentiate(s);
        if constexpr (K::kStagesBias2) this->send_bias2(stripe, segment, key + kKeys);
        CUTLASS_PRAGMA_UNROLL
        for (int step = 0; step < K::kStepsKeys; ++step) this->multiply_pv(o, s, step, at);
      }

      if constexpr (K::kAsync) {
        if (next < segment.end) this->store_row(segment, next, stage ^ 1, next_row, sConstants()->shift);
      }
    }
  }

  CUTLASS_DEVICE bool next_segment(KeySegment& segment) const {
    const KeySegments segments = sConstants()->segments;
    if (!segments.has_more(segment)) return false;
    segment = segments.from(segment.end);
    return true;
  }

  CUTLASS_DEVICE void add_matrices(float (&s)[4][8], const Frag1& bias1, const Frag2& bias2) const {
    if constexpr (K::Bias1::kIsMatrix) this->add_fragment(s, reinterpret_cast<const scalar_t*>(&bias1));
    if constexpr (K::Bias2::kIsMatrix) this->add_fragment(s, reinterpret_cast<const scalar_t*>(&bias2));
  }
};

}  // namespace ds4s
