// The queries or keys that a block of kernel_dq_dkdv.h owns, and the matrices that it reads for them.
#pragma once

#include <cutlass/fast_math.h>

#include "sm80/backward/config.h"

namespace ds4s {

// The divisors of a block's number, from the host: an integer division takes 40 dependent instructions.
struct TileOrder {
  cutlass::FastDivmod by_group;      // blocks of a group of neighbouring n
  cutlass::FastDivmod by_last_rows;  // n of the last group, if it is not whole
  cutlass::FastDivmod by_tiles, by_N;
  uint32_t num_blocks;  // a cluster may have one more
};

// The order of the blocks: kRows neighbouring n vary fastest, then tiles, then heads. Blocks that run at the same time
// thus read the same part of bias2, and their streamed tiles stay in L2.
template <typename Config>
struct TilePosition {
  int64_t bn, b, n, h;
  int first;  // query or key
  int num_tiles;
  uint32_t pair;  // (b, n, h), in the order of the blocks
  int part = 0;   // of the channels of its gradients

  static constexpr int kRows = Config::kFusesDq ? fused_side_by_side(Config::kHeadDim) : kSideBySide;

  TilePosition() = default;
  CUTLASS_DEVICE TilePosition(const BwdParams& p, const TileOrder& order, uint32_t number) {
    if constexpr (Config::kParts > 1) part = int(number % Config::kParts), number /= Config::kParts;
    int group, id;
    order.by_group(group, id, int(number));
    const uint32_t first_bn = uint32_t(group) * kRows, rows = min(uint32_t(p.B * p.N) - first_bn, uint32_t(kRows));
    const uint32_t rest = uniform(rows == kRows ? uint32_t(id) / kRows : uint32_t(order.by_last_rows.div(id)));
    bn = uniform(first_bn + uint32_t(id) - rest * rows), h = uniform(uint32_t(order.by_tiles.div(int(rest))));
    num_tiles = order.by_tiles.divisor, first = (int(rest) - int(h) * num_tiles) * Config::kOwned;
    b = uniform(uint32_t(order.by_N.div(int(bn)))), n = bn - b * p.N;
    pair = first_bn * uint32_t(p.H) + uint32_t(h) * rows + uint32_t(bn) - first_bn;
  }

  CUTLASS_DEVICE static int num_owned(const BwdParams& p) { return int(Config::kOwnsKeys ? p.Lk : p.Lq); }
  CUTLASS_DEVICE static int num_streamed(const BwdParams& p) { return int(Config::kOwnsKeys ? p.Lq : p.Lk); }

  // Whether no query sees the block's keys, or its queries see nothing.
  CUTLASS_DEVICE bool is_hidden(const KeyMask& mask) const {
    if constexpr (Config::kOwnsKeys) return mask.units(bn, first, Config::kOwned / KeyMask::kUnit) == 0;
    return mask.sees_nothing(bn);
  }
};

// One of Q, K, V and dO, from the first query or key on that a block reads.
template <typename scalar_t>
struct TileOperand {
  const scalar_t* g;
  int64_t stride;  // of queries or keys
  int channels;
};

// A block that owns keys owns K and V and streams Q and dO; a block that owns queries owns Q and dO and streams K and
// V. The product of Q and K gives the scores, that of dO and V gives dP.
template <typename Config>
struct TileOperands {
  using scalar_t = typename Config::scalar_t;
  TileOperand<scalar_t> owned_qk, owned_dov, streamed_qk, streamed_dov;

  CUTLASS_DEVICE TileOperands(const BwdParams& p, const TilePosition<Config>& at) {
    const int first_query = Config::kOwnsKeys ? 0 : at.first, first_key = Config::kOwnsKeys ? at.first : 0;
    const TileOperand<scalar_t> q{element<const scalar_t>(p.q, p.q_stride, at.b, at.n, first_query, at.h),
                                  p.q_stride[2], int(p.D)};
    const TileOperand<scalar_t> do_{element<const scalar_t>(p.do_, p.do_stride, at.b, at.n, first_query, at.h),
                                    p.do_stride[2], int(p.Dv)};
    const TileOperand<scalar_t> k{element<const scalar_t>(p.k, p.k_stride, at.b, at.n, first_key, at.h), p.k_stride[2],
                                  int(p.D)};
    const TileOperand<scalar_t> v{element<const scalar_t>(p.v, p.v_stride, at.b, at.n, first_key, at.h), p.v_stride[2],
                                  int(p.Dv)};
    if constexpr (Config::kOwnsKeys) {
      owned_qk = k, owned_dov = v, streamed_qk = q, streamed_dov = do_;
    } else {
      owned_qk = q, owned_dov = do_, streamed_qk = k, streamed_dov = v;
    }
  }
};

}  // namespace ds4s
