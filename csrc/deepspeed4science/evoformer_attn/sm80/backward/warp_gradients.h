// A warp's part of kernel_dq_dkdv.h: 32 queries or keys of the owned tile, and the part of their gradients that comes
// from each 32 streamed ones, math.md (12) to (15).
#pragma once

#include "sm80/backward/bias2_stripe.h"
#include "sm80/backward/dq_product.h"
#include "sm80/backward/streamed_tiles.h"

namespace ds4s {

template <typename Config>
struct WarpGradients {
  using scalar_t = typename Config::scalar_t;
  using Mma = typename Config::Mma;
  using QueryValue = typename Config::QueryValue;
  using OwnedTile = Tile<scalar_t, Config::kOwned, Config::kHeadDim>;
  using StreamedTile = typename StreamedTiles<Config>::TileT;
  using Left = LeftOperand<Mma, OwnedTile, scalar_t, Config::kResident>;
  using Exponent = Probabilities<Config, StreamedTile, Config::kChunkTiles, /*kLseInColumns=*/Config::kOwnsKeys>;
  using DirectBias2 = typename cutlass::platform::conditional<Config::kOwnsKeys && Config::kTilesBias2,
                                                              TiledBias2Stripe<Config>, Bias2Stripe<Config>>::type;
  using Bias2 =
      typename cutlass::platform::conditional<Config::kTransposesBias2, TransposedBias2<Config>, DirectBias2>::type;
  static constexpr bool kOwnsKeys = Config::kOwnsKeys;
  static constexpr int kTiles = Config::kPartChannels / 8;
  static constexpr int kChunkTiles = Config::kChunkTiles;

  const int lane, first;  // first: the warp's first query or key in the owned tile
  Exponent probabilities;
  int lane_nk, lane_kn;  // this lane's offsets in a streamed tile
  int lane_ds = 0;       // and in a tile of dS
  Left left_qk, left_dov;
  typename Exponent::Row exponent[Mma::kLaneRows];
  QueryValue negative_delta[Mma::kLaneRows] = {};  // where queries are owned
  RowBegin<Mma> dp_begin;
  float dv[Config::kWantsDv ? kTiles : 2][8] = {}, dqk[Config::kWantsDs ? kTiles : 2][8] = {};
  float dbias1[Mma::kLaneRows] = {};

  CUTLASS_DEVICE WarpGradients(float scale, int thread, int part)
      : lane(thread & 31),
        first(thread / 32 * 32),
        probabilities(scale),
        lane_nk(Mma::template lane_b_nk<StreamedTile>(lane)),
        lane_kn(Mma::template lane_b_kn<StreamedTile>(lane) + part * Config::kPartChannels) {
    if constexpr (Config::kFusesDq) {
      lane_ds = DsTile<Config>::lane_offset(first, lane);
      if constexpr (Config::kKeepsAddresses) ptx::keep(lane_ds), ptx::keep(lane_nk);
    }
  }

  // Where lane_ds is kept: whether this is thread 0, and a lane with the same columns as this one. To read threadIdx.x
  // in the loop is to wait for the additions that are in its queue.
  CUTLASS_DEVICE bool is_thread_0() const { return Config::kKeepsAddresses ? lane_ds == 0 : ptx::thread_x() == 0; }
  CUTLASS_DEVICE int column_lane() const {
    if constexpr (Config::kKeepsAddresses) return DsTile<Config>::quad_lane(lane_ds);
    return lane;
  }

  // Where the warp owns keys: whether all of them are hidden.
  CUTLASS_DEVICE bool sees_nothing() const {
    bool sees = false;
    CUTLASS_PRAGMA_UNROLL
    for (int lane_row = 0; lane_row < Mma::kLaneRows; ++lane_row) sees |= exponent[lane_row] != -infinity();
    return !ptx::any(sees);
  }

  // Computes 32 x 32 scores and adds their gradients. qk, dov, vectors: of the 32 streamed queries or keys; sDs: the
  // address for dS in shared memory; next_first: the first of the next 32 streamed queries or keys.
  CUTLASS_DEVICE void add_stripe(const scalar_t* qk, const scalar_t* dov, const float* vectors, Bias2& bias2,
                                 int stripe, int next_first, bool more, scalar_t* sDs,
                                 const RowPartner<Config>& partner, int tile) {
    float s[4][8], dp[4][8];
    CUTLASS_PRAGMA_UNROLL
    for (int chunk = 0; chunk < 4; chunk += kChunkTiles) {
      if (chunk > 0) __syncwarp();  // keeps the chunks apart: interleaved, they need more registers than there are
      if constexpr (Config::kTransposesBias2) bias2.fetch(stripe);
      probabilities(s, chunk, left_qk, qk + lane_nk, vectors, exponent, bias2.fragment, column_lane());
      if constexpr (Config::kTransposesBias2) {
        __syncwarp();
        if (more) bias2.load(stripe);
      } else if (Config::kHasBias2 && !Config::kFusesDq && chunk + kChunkTiles == 4) {
        bias2.load(next_first);
      }
      if constexpr (Config::kTransposesDv) {
        multiply_transposed<Config, StreamedTile>(dv, ScoreWords::of<scalar_t>(s), dov + lane_nk);
      } else if constexpr (Config::kWantsDv) {
        add_product(dv, s, chunk, dov + lane_kn);
      }
      if constexpr (Config::kWantsDs) {
        compute_ds(dp, s, chunk, dov + lane_nk, vectors + 2 * Config::kStreamed);
        // Before this, scores and dP leave no registers for it.
        if constexpr (Config::kFusesDq && !Config::kTransposesBias2) bias2.load(next_first);
        add_dbias1(dp, chunk);
        if constexpr (Config::kFusesDq) {
          const ScoreWords words = ScoreWords::of<scalar_t>(dp);
          DsTile<Config>::store(sDs, lane_ds, words, stripe);
          if constexpr (Config::kPairsRows) partner.send(tile, stripe, lane_ds, words);
          multiply_transposed<Config, StreamedTile>(dqk, words, qk + lane_nk);
          if constexpr (!Config::kTransposesBias2) __syncwarp();  // ptxas does not move the loads past it
        } else {
          add_product(dqk, dp, chunk, qk + lane_kn);
        }
      }
    }
  }

 private:
  // dS = P (dP - delta), math.md (11), of kChunkTiles tiles from `chunk` on, in dp.
  CUTLASS_DEVICE void compute_ds(float (&dp)[4][8], const float (&s)[4][8], int chunk, const scalar_t* lane_b,
                                 const float* streamed_delta) {
    CUTLASS_PRAGMA_UNROLL
    for (int j = chunk; j < chunk + kChunkTiles; ++j) {
      if constexpr (Config::kExact) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 8; ++i) dp[j][i] = 0.f;
      } else if constexpr (kOwnsKeys) {
        begin_with_columns<Mma>(dp[j], j, streamed_delta, column_lane());
      } else {
        dp_begin.begin(dp[j]);
      }
    }
    multiply_rows<Mma, StreamedTile, kChunkTiles / 2>(dp, chunk / 2, left_dov, lane_b);
    CUTLASS_PRAGMA_UNROLL
    for (int j = chunk; j < chunk + kChunkTiles; ++j) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 8; ++i) {
        if constexpr (Config::kExact && kOwnsKeys) {
          float4 delta = columns_of<Mma>(streamed_delta, j, i / 4, lane);
          dp[j][i] = subtract_delta(dp[j][i], column_of_pair(delta, i));
        } else if constexpr (Config::kExact) {
          dp[j][i] = subtract_delta(dp[j][i], negative_delta[Mma::lane_row_of(i)]);
        }
        dp[j][i] *= s[j][i];
      }
    }
  }

  CUTLASS_DEVICE void add_dbias1(const float (&ds)[4][8], int chunk) {
    if constexpr (Config::kWantsDbias1) {
      // Each step is summed by itself, which rounds less at the size of the whole sum.
      CUTLASS_PRAGMA_UNROLL
      for (int lane_row = 0; lane_row < Mma::kLaneRows; ++lane_row)
        dbias1[lane_row] += sum_of_lane_row(ds, chunk, lane_row);
    }
  }
  template <int kOutTiles>
  CUTLASS_DEVICE void add_product(float (&out)[kOutTiles][8], const float (&x)[4][8], int chunk,
                                  const scalar_t* lane_b) {
    CUTLASS_PRAGMA_UNROLL
    for (int step = chunk * 8 / Mma::kStepK; step < (chunk + kChunkTiles) * 8 / Mma::kStepK; ++step) {
      multiply_scores<Mma, StreamedTile>(out, x, step, lane_b, lane);
    }
  }
  CUTLASS_DEVICE static float sum_of_lane_row(const float (&x)[4][8], int chunk, int lane_row) {
    float sum = 0.f;
    bool is_first = true;
    CUTLASS_PRAGMA_UNROLL
    for (int y = 8 * chunk; y < 8 * (chunk + kChunkTiles); y += 2) {
      const float* pair = &x[y / 8][y % 8];
      if (Mma::lane_row_of(y % 8) != lane_row) continue;
      sum = is_first ? pair[0] + pair[1] : sum + (pair[0] + pair[1]);
      is_first = false;
    }
    return sum;
  }
};

}  // namespace ds4s
