// A warp's part of a forward block, 32 queries and 32 keys of each key block: scores with their biases, math.md (1),
// and O += P V, math.md (5). Operands are in shared memory, scores and O in registers. K below is the AttentionKernel,
// for its types and numbers. Members are a lane's constants.
#pragma once

#include "../mma/mma.h"
#include "../mma/tile_loader.h"

namespace ds4s {

template <typename K>
struct ForwardWarp {
  using Params = typename K::Params;
  using scalar_t = typename K::scalar_t;
  using Mma = typename K::Mma;
  using QTile = typename K::QTile;
  using KTile = typename K::KTile;
  using VTile = typename K::VTile;
  using FragA = typename Mma::FragA;
  template <typename TileT>
  using Loader = TileLoader<scalar_t, TileT, K::kNumThreads, K::kAligned, K::kAsync>;

  static constexpr int kKeys = K::kKeysPerStage;

  const Params& p;
  char* const shared;
  const int thread, lane, warp_m, warp_n;
  const float inv_scale;  // biases enter the accumulator in raw units, those of kQFactor Q K^T; full precision: 1
  int lane_q, lane_k, lane_v, lane_pair;  // this lane's offsets in the tiles

  CUTLASS_DEVICE ForwardWarp(const Params& params, char* shared_)
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
        lane_pair(Mma::place_of_pair((warp_n * 32 + Mma::Permuted::at(0, Mma::column_of(lane, 0))) / 2)) {
    ptx::keep(lane_q), ptx::keep(lane_k), ptx::keep(lane_v), ptx::keep(lane_pair);
  }

  // The factor of the scores, which is positive: Q is multiplied by its sign.
  CUTLASS_DEVICE static float scale_of(const Params& params) {
    if constexpr (K::kIsComplete) return params.scale;
    return params.scale == 0.f ? 1.f : fabsf(params.scale);
  }
  CUTLASS_DEVICE float q_factor() const {
    if constexpr (K::kIsComplete) return K::kQFactor;
    return p.scale == 0.f ? 0.f : copysignf(K::kQFactor, p.scale);
  }

  CUTLASS_DEVICE float softmax_scale() const { return K::kExact ? 1.f : scale_of(p) / K::kQFactor; }

 protected:
  CUTLASS_DEVICE scalar_t* sQ() const { return reinterpret_cast<scalar_t*>(shared); }
  CUTLASS_DEVICE char* stage_begin(int stage) const { return shared + QTile::kBytes + stage * K::kStageBytes; }
  CUTLASS_DEVICE scalar_t* sK(int stage) const { return reinterpret_cast<scalar_t*>(stage_begin(stage)); }
  CUTLASS_DEVICE scalar_t* sV(int stage) const {
    return reinterpret_cast<scalar_t*>(stage_begin(stage) + KTile::kBytes);
  }
  // Where this lane reads a stripe of a stage. Three offsets that advance by constants take fewer instructions than
  // those that are found again in every stripe: (1,768,768,4,32) 0.992 of the time. Where O takes 128 registers, there
  // are none for them: (1,64,1024,8,128) would take 1.37 ms instead of 1.0.
  static constexpr bool kAdvances = K::kHeadDimValue < 128;
  struct Stripe {
    int k, v, row_bias;  // kAdvances: bytes from `shared`
    int stage, number;   // else

    // To stripe `next` of the stage, which follows the present one.
    CUTLASS_DEVICE void advance(int next) {
      number = next;
      k += KTile::offset(K::kKeysPerBlock) * int(sizeof(scalar_t));
      v += VTile::offset(K::kKeysPerBlock) * int(sizeof(scalar_t));
      row_bias += K::kKeysPerBlock / 2 * int(sizeof(float4));
    }
    // The first row of K and V from the offsets on.
    CUTLASS_DEVICE int row() const { return kAdvances ? 0 : number * K::kKeysPerBlock; }
  };
  CUTLASS_DEVICE Stripe first_stripe(int stage) const {
    if constexpr (!kAdvances) return {0, 0, 0, stage, 0};
    constexpr int kElement = int(sizeof(scalar_t));
    const int k = QTile::kBytes + stage * K::kStageBytes, v = k + KTile::kBytes, row_bias = v + VTile::kBytes;
    Stripe x{k + lane_k * kElement, v + lane_v * kElement, row_bias + lane_pair * int(sizeof(float4)), stage, 0};
    ptx::keep(x.k), ptx::keep(x.v), ptx::keep(x.row_bias);
    return x;
  }
  CUTLASS_DEVICE const scalar_t* keys_of(const Stripe& stripe) const {
    return kAdvances ? reinterpret_cast<const scalar_t*>(shared + stripe.k) : sK(stripe.stage) + lane_k;
  }
  CUTLASS_DEVICE const scalar_t* values_of(const Stripe& stripe) const {
    return kAdvances ? reinterpret_cast<const scalar_t*>(shared + stripe.v) : sV(stripe.stage) + lane_v;
  }
  // One float4 (x, y, x, y) for each pair of keys: the C operand of two rows.
  CUTLASS_DEVICE float4* sRowBias(int stage) const {
    return reinterpret_cast<float4*>(stage_begin(stage) + KTile::kBytes + VTile::kBytes);
  }

  // Waits until this thread's loads are complete and all warps have finished their earlier reads.
  CUTLASS_DEVICE static void wait_for_loads() {
    if constexpr (K::kAsync) ptx::cp_async_wait<0>();
    __syncthreads();
  }

  // Waits for Q and multiplies it by kQFactor, in registers or in shared memory.
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
  // Multiplies the words first, first + kStep, .. below kCount.
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

  CUTLASS_DEVICE void add_fragment(float (&s)[4][8], const scalar_t* fragment) const {
    CUTLASS_PRAGMA_UNROLL
    for (int lane_row = 0; lane_row < Mma::kLaneRows; ++lane_row) {
      CUTLASS_PRAGMA_UNROLL
      for (int group = 0; group < Mma::kGroups; ++group) {
        const scalar_t* vec = fragment + (lane_row * Mma::kGroups + group) * Mma::kVec;
        CUTLASS_PRAGMA_UNROLL
        for (int e = 0; e < Mma::kVec; e += 2) {
          float2 x = ptx::load_pair(vec + e);
          float* score = &s[Mma::tile_of(group, e)][Mma::value_of(lane_row, e)];
          score[0] = fmaf(x.x, inv_scale, score[0]);
          score[1] = fmaf(x.y, inv_scale, score[1]);
        }
      }
    }
  }

  // The initial value of the accumulator is the row bias, in raw units. In full precision it is not: every step would
  // be rounded at the size of the bias, which a finite mask makes large. There the biases are added to the finished,
  // scaled product.
  CUTLASS_DEVICE void init_scores(float (&s)[4][8], const Stripe& stripe) const {
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 4; ++j) {
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < 2; ++half) {
        float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
        if constexpr (K::kHasRowBias && !K::kExact) x = row_bias(stripe, j, half);
        s[j][4 * half] = x.x, s[j][4 * half + 1] = x.y, s[j][4 * half + 2] = x.z, s[j][4 * half + 3] = x.w;
      }
    }
  }
  CUTLASS_DEVICE void scale_scores(float (&s)[4][8], const Stripe& stripe) const {
    if constexpr (K::kExact) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < 4; ++j) {
        CUTLASS_PRAGMA_UNROLL
        for (int half = 0; half < 2; ++half) {
          float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
          if constexpr (K::kHasRowBias) x = row_bias(stripe, j, half);
          float* tile = &s[j][4 * half];
          tile[0] = fmaf(tile[0], scale_of(p), x.x), tile[1] = fmaf(tile[1], scale_of(p), x.y);
          tile[2] = fmaf(tile[2], scale_of(p), x.z), tile[3] = fmaf(tile[3], scale_of(p), x.w);
        }
      }
    }
  }
  CUTLASS_DEVICE float4 row_bias(const Stripe& stripe, int j, int half) const {
    int pair = Mma::Permuted::at(j, Mma::column_of(0, 4 * half)) / 2;
    if constexpr (kAdvances) {
      return reinterpret_cast<const float4*>(shared + stripe.row_bias)[Mma::place_of_pair(pair)];
    }
    return sRowBias(stripe.stage)[lane_pair + stripe.number * K::kKeysPerBlock / 2 + Mma::place_of_pair(pair)];
  }

  CUTLASS_DEVICE void load_q(FragA& a, int step) const {
    Mma::template load_a<QTile>(a, sQ() + lane_q, 0, step * Mma::kStepK);
  }
  CUTLASS_DEVICE void multiply_qk(float (&s)[4][8], const FragA* q, const Stripe& stripe) const {
    // FFMA's many short steps are not unrolled: together they would not fit into the registers.
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
        Mma::template load_b_nk<KTile>(b, keys_of(stripe), stripe.row(), pair, step * Mma::kStepK);
        Mma::mma(s[2 * pair], s[2 * pair + 1], a, b);
      }
    }
  }
  CUTLASS_DEVICE void multiply_pv(float (&o)[K::kTilesO][8], const float (&s)[4][8], int step,
                                  const Stripe& stripe) const {
    FragA a;
    Mma::from_scores(a, s, step, lane);
    CUTLASS_PRAGMA_UNROLL
    for (int n = 0; n < K::kTilesO; n += 2) {
      typename Mma::FragBkn b;
      Mma::template load_b_kn<VTile>(b, values_of(stripe), stripe.row(), step, 8 * n);
      Mma::mma(o[n], o[n + 1], a, b);
    }
  }

  // Without a row bias, keys past the end are masked here; only the last block has any.
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
};

}  // namespace ds4s
