// Statistics of each query for the backward's kernels in full precision, computed from scores with the same bits as
// theirs, math.md (1), (9):
//
//   s = scale q k + bias1 + bias2       max = max over k of s       sum = sum over k of exp(s - max)
//   center = rowsum(do * o)             rest = sum over k of exp(s - max) / sum * (dP - center)
//
// stored as (-max, 1 / sum) and (-center, -rest): P = exp(s - max) / sum, math.md (4), and dS = P ((dP - center) -
// rest), math.md (11). The forward's lse would add its own rounding error, which is common to all of P in a row and
// grows with |lse|; delta = center alone would inherit the rounding of o. With both, the gradients' errors are twice as
// large, and more for large scores (docs/history/sm80-backward.md).
//
// A block owns kOwned queries of one (b, n, h) and streams the keys, kStreamed at a time; warp w has queries 32 w ...
// Shared memory: tiles of Q, dO, K and V, bias1 of the keys, center of the queries.
#pragma once

#include "common/preprocess.h"
#include "sm80/backward/score_tile.h"
#include "sm80/mma/tile_loader.h"

namespace ds4s {

template <typename Config>
struct RowStatistics {
  using scalar_t = typename Config::scalar_t;
  using Mma = typename Config::Mma;
  using QueryTile = Tile<scalar_t, Config::kOwned, Config::kHeadDim>;
  using KeyTile = Tile<scalar_t, Config::kStreamed, Config::kHeadDim>;
  using Operand = LeftOperand<Mma, QueryTile, scalar_t, /*kResident=*/false>;
  template <typename TileT>
  using Loader = TileLoader<scalar_t, TileT, Config::kThreads, Config::kAligned, Config::kAsync>;
  using Exponent = Probabilities<Config, KeyTile, 4, /*kLseInColumns=*/false>;
  static_assert(Config::kExact, "for float in full precision");
  static_assert(Config::kThreads == Config::kOwned && Config::kThreads >= Config::kStreamed,
                "a thread for each statistic");

  static constexpr int kKeys = Config::kStreamed;
  static constexpr int kLaneRows = Mma::kLaneRows;
  static constexpr int kQueryElements = QueryTile::kBytes / sizeof(scalar_t);
  static constexpr int kKeyElements = KeyTile::kBytes / sizeof(scalar_t);
  static constexpr int kSharedBytes =
      2 * QueryTile::kBytes + 2 * KeyTile::kBytes + kKeys * kColumnBytes + Config::kOwned * int(sizeof(float));

  CUTLASS_DEVICE static void run(const BackwardInputs& args, float2* softmax, float2* negative_delta,
                                 PostprocessFlag flag, char* shared) {
    const BwdParams& p = args.p;
    int thread = int(threadIdx.x), lane = thread & 31, warp_query = thread / 32 * 32;
    uint32_t query_tiles = uint32_t(p.Lq + Config::kOwned - 1) / Config::kOwned;
    uint32_t bnh = blockIdx.x / query_tiles, bn = bnh / uint32_t(p.H);
    int query0 = int(blockIdx.x - bnh * query_tiles) * Config::kOwned;
    int64_t h = bnh - bn * uint32_t(p.H), b = bn / uint32_t(p.N), n = bn - b * p.N;
    int queries_left = int(p.Lq) - query0;
    if (args.mask.sees_nothing(bn)) {  // P = 0; nothing is read
      if (thread >= queries_left) return;
      softmax[bnh * p.Lq + query0 + thread] = make_float2(-infinity(), 0.f);
      negative_delta[bnh * p.Lq + query0 + thread] = make_float2(0.f, 0.f);
      return;
    }

    // Queries.
    scalar_t* sQ = reinterpret_cast<scalar_t*>(shared);
    scalar_t* sDo = sQ + kQueryElements;
    scalar_t* sK = sDo + kQueryElements;
    scalar_t* sV = sK + kKeyElements;
    float* sBias1 = reinterpret_cast<float*>(sV + kKeyElements);
    float* sCenter = sBias1 + kKeys * kColumnBytes / sizeof(float);
    const scalar_t* gQ = element<const scalar_t>(p.q, p.q_stride, b, n, query0, h);
    const scalar_t* gDo = element<const scalar_t>(p.do_, p.do_stride, b, n, query0, h);
    Loader<QueryTile>(gQ, p.q_stride[2], int(p.D), thread).load(sQ, queries_left);
    Loader<QueryTile>(gDo, p.do_stride[2], int(p.Dv), thread).load(sDo, queries_left);
    const scalar_t* gO = element<const scalar_t>(p.o, p.o_stride, b, n, query0 + thread, h);
    sCenter[thread] = thread < queries_left ? center_of(gO, gDo + thread * p.do_stride[2], int(p.Dv)) : 0.f;

    // Keys.
    Loader<KeyTile> k_loader(element<const scalar_t>(p.k, p.k_stride, b, n, 0, h), p.k_stride[2], int(p.D), thread);
    Loader<KeyTile> v_loader(element<const scalar_t>(p.v, p.v_stride, b, n, 0, h), p.v_stride[2], int(p.Dv), thread);
    Bias1Row<scalar_t> bias1(args, b, n);
    const scalar_t* gBias =
        static_cast<const scalar_t*>(args.bias2.ptr) + b * args.bias2.stride_b + h * args.bias2.stride_h;
    int bias_query = query0 + warp_query + Mma::row_of_lane(lane);
    int lane_nk = Mma::template lane_b_nk<KeyTile>(lane);
    Operand operand_q, operand_do;
    operand_q.attach(sQ, warp_query, lane), operand_do.attach(sDo, warp_query, lane);
    Exponent exponent(p.scale);

    // A lane's share of its queries.
    Share share[kLaneRows];

    CUTLASS_PRAGMA_NO_UNROLL
    for (int key0 = 0; key0 < int(p.Lk); key0 += kKeys) {
      int keys_left = int(p.Lk) - key0;
      if (args.mask.units(bn, key0, kKeys / KeyMask::kUnit) == 0) {
        k_loader.advance(), v_loader.advance();
        continue;
      }
      __syncthreads();
      k_loader.load(sK, keys_left), k_loader.advance();
      v_loader.load(sV, keys_left), v_loader.advance();
      if (thread < kKeys) {
        store_column<typename Config::Mma>(sBias1, thread, thread < keys_left ? bias1.at(key0 + thread) : -infinity());
      }
      if constexpr (Config::kAsync) ptx::cp_async_commit(), ptx::cp_async_wait<0>();
      __syncthreads();

      CUTLASS_PRAGMA_NO_UNROLL
      for (int stripe = 0; stripe < Config::kStripes && 32 * stripe < keys_left; ++stripe) {
        BiasFragment<Mma, scalar_t> bias;
        if constexpr (Config::kHasBias2) {
          bias.load(gBias, int(args.bias2.stride_row), bias_query, int(p.Lq) - 1,
                    key0 + 32 * stripe + Mma::first_column(lane), int(p.Lk - 1) / Mma::kVec * Mma::kVec);
        }
        float s[4][8] = {}, dp[4][8] = {};
        int offset = KeyTile::offset(32) * stripe + lane_nk;
        multiply_rows<Mma, KeyTile, 2>(s, 0, operand_q, sK + offset);
        multiply_rows<Mma, KeyTile, 2>(dp, 0, operand_do, sV + offset);
        add_biases(exponent, s, bias, sBias1 + 64 * stripe, lane);
        take_in(share, s, dp, sCenter, warp_query, lane);
      }
    }

    store(p, share, sCenter, softmax, negative_delta, bnh, query0, warp_query, lane, flag);
  }

 private:
  // The number subtracted in exponents; 0 as long as no key is visible, since exp(-inf - 0) = 0 is right.
  CUTLASS_DEVICE static float reference(float max) { return max == -infinity() ? 0.f : max; }

  // A query's max, sum and rest over the keys of one lane so far.
  struct Share {
    float max = -infinity(), sum = 0.f, rest = 0.f;

    // Adds the scores of one of the lane's rows. They are summed by themselves first, which rounds less at the size of
    // the whole sum.
    CUTLASS_DEVICE void take_in(const float (&s)[4][8], const float (&dp)[4][8], int lane_row, float center) {
      float largest = max;
      CUTLASS_PRAGMA_UNROLL
      for (int x = 0; x < 32; ++x) {
        if (Mma::lane_row_of(x % 8) == lane_row) largest = fmaxf(largest, s[x / 8][x % 8]);
      }
      float part_sum = 0.f, part_rest = 0.f;
      CUTLASS_PRAGMA_UNROLL
      for (int x = 0; x < 32; ++x) {
        if (Mma::lane_row_of(x % 8) != lane_row) continue;
        float e = expf(s[x / 8][x % 8] - reference(largest));
        part_sum += e, part_rest = fmaf(e, dp[x / 8][x % 8] - center, part_rest);
      }
      float keep = expf(max - reference(largest));
      sum = fmaf(sum, keep, part_sum), rest = fmaf(rest, keep, part_rest);
      max = largest;
    }
    // Combines the lanes of a query. True for the storing lane, where the query sees no key.
    CUTLASS_DEVICE bool store(float2* softmax, float2* negative_delta, float center, bool stores) const {
      float largest = Mma::reduce_max(max);
      float keep = expf(max - reference(largest));
      float total = Mma::reduce_sum(sum * keep), part = Mma::reduce_sum(rest * keep);
      if (!stores) return false;
      bool nothing = largest == -infinity();
      float inverse = nothing ? 0.f : 1.f / total;
      *softmax = make_float2(nothing ? largest : -largest, inverse);
      *negative_delta = make_float2(-center, -part * inverse);
      return nothing;
    }
  };

  CUTLASS_DEVICE static void take_in(Share (&share)[kLaneRows], const float (&s)[4][8], const float (&dp)[4][8],
                                     const float* sCenter, int warp_query, int lane) {
    CUTLASS_PRAGMA_UNROLL
    for (int lane_row = 0; lane_row < kLaneRows; ++lane_row) {
      float center = sCenter[warp_query + Mma::row_of_lane(lane) + lane_row * Mma::kRowStep];
      share[lane_row].take_in(s, dp, lane_row, center);
    }
  }

  // The statistics of the block's queries, which begin at query0.
  CUTLASS_DEVICE static void store(const BwdParams& p, const Share (&share)[kLaneRows], const float* sCenter,
                                   float2* softmax, float2* negative_delta, uint32_t bnh, int query0, int warp_query,
                                   int lane, PostprocessFlag flag) {
    const int queries_left = int(p.Lq) - query0;
    CUTLASS_PRAGMA_UNROLL
    for (int lane_row = 0; lane_row < kLaneRows; ++lane_row) {
      const int mine = warp_query + Mma::row_of_lane(lane) + lane_row * Mma::kRowStep;
      const int64_t index = bnh * p.Lq + query0 + mine;
      const bool stores = Mma::leads_row(lane) && mine < queries_left;
      const bool hidden = share[lane_row].store(softmax + index, negative_delta + index, sCenter[mine], stores);
      if (hidden) flag.raise();
      if (p.partial_keys == 0 || !stores) continue;
      const float lse = p.lse[index];  // of more keys than these
      softmax[index] = make_float2(lse == -infinity() ? lse : -lse, 1.f);
      negative_delta[index] = make_float2(-sCenter[mine], 0.f);
    }
  }

  CUTLASS_DEVICE static float center_of(const scalar_t* o, const scalar_t* do_, int channels) {
    float center = 0.f;
    for (int chunk = 0; chunk * 4 < channels; ++chunk) {  // each chunk of four is summed first
      center += dot_share<Config>(load_share<Config>(o, channels, chunk), load_share<Config>(do_, channels, chunk));
    }
    return center;
  }

  CUTLASS_DEVICE static void add_biases(const Exponent& exponent, float (&s)[4][8],
                                        const BiasFragment<Mma, scalar_t>& bias, const float* sBias1, int lane) {
    CUTLASS_PRAGMA_UNROLL
    for (int lane_row = 0; lane_row < kLaneRows; ++lane_row) {
      CUTLASS_PRAGMA_UNROLL
      for (int x = 0; x < Mma::kGroups * Mma::kVec; x += 2) {
        int group = x / Mma::kVec, e = x % Mma::kVec, j = Mma::tile_of(group, e), i = Mma::value_of(lane_row, e);
        float4 column = columns_of<Mma>(sBias1, j, i / 4, lane);
        float2 b = make_float2(0.f, 0.f);
        if constexpr (Config::kHasBias2) b = bias.pair(lane_row, group, e);
        s[j][i] = exponent.exact_score(s[j][i], column.x, b.x);
        s[j][i + 1] = exponent.exact_score(s[j][i + 1], column.y, b.y);
      }
    }
  }
};

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 8 / Config::kWarps)
    row_statistics(const __grid_constant__ BackwardInputs args, float2* softmax, float2* negative_delta,
                   PostprocessFlag flag) {
  extern __shared__ __align__(16) char shared[];
  RowStatistics<Config>::run(args, softmax, negative_delta, flag, shared);
}

}  // namespace ds4s
