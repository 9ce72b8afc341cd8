// delta, math.md (9), and the maxima of dO, K and V (dq_range.h), where dq is added up in float16: a warp computes a
// piece, DqRangeArgs::piece_queries of a (b, n, h). TMA loads O and dO, and delta is the diagonal of dO O^T, by mma.
#pragma once

#include "common/arch.h"
#include "common/preprocess.h"
#include "sm90/backward/dq_range.h"
#include "sm90/mma/pipeline.h"

namespace ds4s::sm90 {

// The largest finite |x| of elements, two at a time. Twice the bits have no sign, and with one added to the exponent an
// infinity overflows to 0, NaN nearly so. What the lower element leaves in the last place of the upper one makes that
// larger by one unit at most.
template <typename scalar_t>
class LargestSize {
  static constexpr uint32_t kNext = std::is_same_v<scalar_t, cutlass::bfloat16_t> ? 0x0100 : 0x0800;

 public:
  template <typename Share>
  CUTLASS_DEVICE void add(const Share& x) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Share::kElements / 2; ++i) {
      words_ = __vmaxu2(words_, 2 * reinterpret_cast<const uint32_t*>(&x)[i] + (kNext << 16 | kNext));
    }
  }
  // Of all lanes of a warp.
  CUTLASS_DEVICE float of_warp() const {
    const uint32_t largest = __reduce_max_sync(0xffffffffu, max(words_ >> 16, words_ & 0xffff));
    return largest < kNext ? 0.f : float(scalar_t::bitcast(uint16_t((largest - kNext) / 2)));
  }

 private:
  uint32_t words_ = 0;
};

// What a piece is computed from, besides a call's parameters.
struct DeltaArgs {
  CUtensorMap o, do_;
  float* negative_delta;  // [B, N, H, Lq]; null: in dq
  PostprocessFlag flag;
};

template <typename Config>
class DeltaPiece {
  using scalar_t = typename Config::scalar_t;
  using Rows = PrepareRows<Config>;
  using Share = typename Rows::Share;

 public:
  static constexpr int kQueries = DqRangeArgs::piece_queries(Config::kHeadDim);
  using Tile = SwizzledTile<kQueries, Config::kHeadDim>;
  // Memory of a warp, aligned to 1024 bytes, and its barrier.
  struct Stage {
    uint8_t o[Tile::kBytes], do_[Tile::kBytes];
  };

  // piece: of the queries; all lanes of a warp have the same one.
  CUTLASS_DEVICE DeltaPiece(const BwdParams& p, const DeltaArgs& args, const DqPair& of, int piece)
      : p_(p), args_(args), b_(of.b), n_(of.n), h_(of.h), piece_(piece), lane_(int(threadIdx.x) % 32) {}

  // This lane's shares of K and V of a key, and bias1.
  struct KeyShares {
    Share k, v;
    scalar_t bias1;
  };

  // The i-th key of a (b, n, h) that counts for its maxima, one in kKeysApart. Which one differs, in case the data are
  // periodic. The pieces of a (b, n, h) divide them; a piece's first one is number first_key().
  CUTLASS_DEVICE int first_key() const { return piece_ + lane_ / Rows::kGroup * num_pieces(); }
  CUTLASS_DEVICE int num_pieces() const { return (int(p_.Lq) + kQueries - 1) / kQueries; }
  CUTLASS_DEVICE bool has_key(int i) const { return DqRangeArgs::kKeysApart * i < p_.Lk; }
  CUTLASS_DEVICE KeyShares load_key(int i) const {
    constexpr int kApart = DqRangeArgs::kKeysApart;
    const int key = kApart * i + int((5 * uint32_t(i) + uint32_t(b_ * p_.N + n_)) % kApart);
    const int64_t existing = min(key, int(p_.Lk) - 1);
    const int64_t at = b_ * p_.bias1_stride[0] + n_ * p_.bias1_stride[1] + existing * p_.bias1_stride[2];
    KeyShares shares{};
    shares.k = load_row(p_.k, p_.k_stride, existing, int(p_.D));
    shares.v = load_row(p_.v, p_.v_stride, existing, int(p_.Dv));
    if (p_.bias1 != nullptr) shares.bias1 = static_cast<const scalar_t*>(p_.bias1)[at];
    return shares;
  }

  // Starts loading O and dO; nothing reads the stage any more.
  CUTLASS_DEVICE void load(Stage& stage, FullBarrier& loaded) const {
    if (cute::elect_one_sync()) {
      loaded.arrive_and_expect_tx(sizeof(Stage));
      load_tile<Tile>(args_.o, loaded, stage.o, 0, piece_ * kQueries, h_, n_, b_);
      load_tile<Tile>(args_.do_, loaded, stage.do_, 0, piece_ * kQueries, h_, n_, b_);
    }
    __syncwarp();
  }
  // The row n sees nothing, and nothing is loaded: delta is 0, whatever O and dO hold.
  CUTLASS_DEVICE void store_zeros(const DqRangeArgs& range) const {
    if (lane_ < kQueries && query(lane_) < p_.Lq) *delta_at(query(lane_)) = 0.f;
    store(range, 0.f, 0.f, 0.f);
  }
  // Waits for O and dO. Stores delta, and the piece's maxima in the memory of `range`. first: the first key, if it is
  // loaded already.
  CUTLASS_DEVICE void compute(Stage& stage, FullBarrier& loaded, uint32_t phase, const DqRangeArgs& range,
                              const KeyShares* first = nullptr) const {
    LargestSize<scalar_t> of_k, of_v;
    look_at_keys(of_k, of_v, first);
    loaded.wait(phase);
    const float of_do = compute_delta(stage);
    store(range, of_do, of_k.of_warp(), of_v.of_warp());
  }

 private:
  // Returns the largest sum of |dO| over channels of this lane's queries.
  CUTLASS_DEVICE float compute_delta(const Stage& stage) const {
    static_assert(Tile::kRowBytes == 128, "four steps of a box");
    const uint32_t one = ptx::pack<scalar_t>(1.f, 1.f), ones[2] = {one, one};
    float largest = 0.f;
    CUTLASS_PRAGMA_UNROLL
    for (int first = 0; first < kQueries; first += 16) {
      // Queries 16 x 8 each: dO times O of the first and of the last eight, |dO| times ones.
      float products[2][4] = {}, sizes[4] = {};
      const int of_step0 = Tile::offset(first + lane_ % 16, lane_ / 16);
      CUTLASS_PRAGMA_UNROLL
      for (int step = 0; step < (Config::kHeadDim + 15) / 16; ++step) {
        // As Tile::offset of chunk 2 step + lane / 16: a row's chunks are exchanged by an exclusive or.
        const int offset = (of_step0 ^ step % 4 * 32) + step / 4 * Tile::kBoxBytes;
        uint32_t a[4], b[4];
        ldmatrix(a, shared_address(stage.do_) + offset), ldmatrix(b, shared_address(stage.o) + offset);
        CUTLASS_PRAGMA_UNROLL
        for (int half = 0; half < 2; ++half) {
          const uint32_t of_half[2] = {b[half], b[half + 2]};
          ptx::mma_16x8x16<scalar_t, cutlass::arch::Sm80>(products[half], a, of_half);
        }
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 4; ++i) a[i] &= 0x7fff7fff;
        ptx::mma_16x8x16<scalar_t, cutlass::arch::Sm80>(sizes, a, ones);
      }
      for (float size : {sizes[0], sizes[2]}) largest = size < infinity() ? fmaxf(largest, size) : largest;
      // Rows g and 8 + g of this lane; g is a column of the lane with columns 2 (g / 2) and the next one.
      const int g = lane_ / 4;
      if (lane_ % 4 == g / 2) {
        store_delta(first + g, g % 2 ? products[0][1] : products[0][0]);
        store_delta(first + 8 + g, g % 2 ? products[1][3] : products[1][2]);
      }
    }
    return largest;
  }
  CUTLASS_DEVICE void store_delta(int i, float delta) const {
    if (query(i) >= p_.Lq) return;
    *delta_at(query(i)) = -delta;
    // O of a query that sees nothing is 0, so where delta is 0, its lse must be looked at.
    if (!(fabsf(delta) > 0.f) && p_.lse[index(query(i))] == -infinity()) args_.flag.raise();
  }
  CUTLASS_DEVICE int query(int i) const { return piece_ * kQueries + i; }
  CUTLASS_DEVICE int64_t index(int query) const { return ((b_ * p_.N + n_) * p_.H + h_) * p_.Lq + query; }
  CUTLASS_DEVICE float* delta_at(int query) const {
    if (args_.negative_delta != nullptr) return args_.negative_delta + index(query);
    return DeltaInDq<scalar_t>(p_, b_, n_, h_).at(query);
  }

  // first: the first key, if it is loaded already. Hidden keys are left out, which may hold anything.
  CUTLASS_DEVICE void look_at_keys(LargestSize<scalar_t>& of_k, LargestSize<scalar_t>& of_v,
                                   const KeyShares* first) const {
    auto add = [&](const KeyShares& key) {
      if (!(float(key.bias1) <= -MaskRule<scalar_t>::kThreshold)) of_k.add(key.k), of_v.add(key.v);
    };
    const int step = 32 / Rows::kGroup * num_pieces();
    int i = first_key();
    if (first != nullptr) add(*first), i += step;
    CUTLASS_PRAGMA_NO_UNROLL
    for (; has_key(i); i += step) add(load_key(i));
  }
  CUTLASS_DEVICE Share load_row(const void* matrix, const int64_t (&stride)[4], int64_t key, int columns) const {
    return load_share<Config>(element<const scalar_t>(matrix, stride, b_, n_, key, h_), columns, lane_ % Rows::kGroup);
  }
  CUTLASS_DEVICE void store(const DqRangeArgs& range, float of_do, float of_k, float of_v) const {
    const float largest_do = __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(of_do)));
    float* const maxima = range.maxima + ((b_ * p_.N + n_) * range.pieces + piece_) * 3 * range.heads + h_;
    if (lane_ == 0) maxima[0] = largest_do, maxima[range.heads] = of_k, maxima[2 * range.heads] = of_v;
  }

  const BwdParams& p_;
  const DeltaArgs& args_;
  int b_, n_, h_, piece_, lane_;
};

// The shared memory of kWarps warps that compute pieces: all of a block's dynamic shared memory.
template <typename Config, int kWarps>
struct PieceStages {
  typename DeltaPiece<Config>::Stage of_warp[kWarps];
  FullBarrier loaded[kWarps];
  static constexpr int kAlignment = 1024;
  static constexpr int kBytes = kWarps * int(sizeof(of_warp[0]) + sizeof(loaded[0])) + kAlignment;

  // By all lanes of each warp, which may then use what belongs to it.
  CUTLASS_DEVICE static PieceStages& init() {
    extern __shared__ uint8_t memory[];
    auto& stages = *reinterpret_cast<PieceStages*>(memory + (-shared_address(memory) & (kAlignment - 1)));
    if (cute::elect_one_sync()) {
      stages.loaded[threadIdx.x / 32].init(1);
      cutlass::arch::fence_barrier_init();
    }
    __syncwarp();
    return stages;
  }
};

}  // namespace ds4s::sm90
