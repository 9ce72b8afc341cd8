// The epilogue of a forward block: merges its warps' parts of O, divides, math.md (5), and stores O and lse, math.md
// (6). K below is the AttentionKernel.
#pragma once

#include "../mma/tile_loader.h"
#include "softmax.h"
#include "warp_tile.h"

namespace ds4s {

template <typename K>
struct ForwardEpilogue {
  using output_t = typename K::output_t;
  using Mma = typename K::Mma;
  using Softmax = typename K::Softmax;
  using Row = typename K::Row;
  using OTile = typename K::OTile;

  const ForwardWarp<K>& warp;

  // Merges warps with the same rows and different keys: warp_n = 0 adds the others, one after another, always in this
  // order.
  CUTLASS_DEVICE void merge_warps(float (&o)[K::kTilesO][8], Softmax& softmax) const {
    constexpr int kValues = K::kTilesO * 8;
    float* s = reinterpret_cast<float*>(warp.shared) + warp.warp_m * 32 * (kValues + 2 * Mma::kLaneRows) + warp.lane;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int other = 1; other < K::kWarpsN; ++other) {
      if (warp.warp_n == other) {
        CUTLASS_PRAGMA_UNROLL
        for (int x = 0; x < kValues; ++x) s[32 * x] = o[x / 8][x % 8];
        CUTLASS_PRAGMA_UNROLL
        for (int lane_row = 0; lane_row < Mma::kLaneRows; ++lane_row) {
          s[32 * (kValues + lane_row)] = softmax.cm[lane_row];
          s[32 * (kValues + Mma::kLaneRows + lane_row)] = softmax.l[lane_row];
        }
      }
      __syncthreads();
      if (warp.warp_n == 0) {
        Row mine, theirs;
        CUTLASS_PRAGMA_UNROLL
        for (int lane_row = 0; lane_row < Mma::kLaneRows; ++lane_row) {
          theirs[lane_row] =
              softmax.join(lane_row, s[32 * (kValues + lane_row)], s[32 * (kValues + Mma::kLaneRows + lane_row)]);
          mine[lane_row] = softmax.m_prime[lane_row];
        }
        softmax.rescale(o, mine);
        CUTLASS_PRAGMA_UNROLL
        for (int x = 0; x < kValues; ++x) {
          o[x / 8][x % 8] = fmaf(s[32 * x], theirs[Mma::lane_row_of(x % 8)], o[x / 8][x % 8]);
        }
      }
      __syncthreads();
    }
  }

  // Stores O / l and lse.
  struct Output {
    output_t* ptr;
    float* logsumexp;  // or null
    int64_t stride;    // elements between rows
    int num_queries, num_columns;
  };
  CUTLASS_DEVICE void store(const Output& out, float (&o)[K::kTilesO][8], Softmax& softmax) const {
    if (K::kWarpsN > 1 && warp.warp_n != 0) return;
    // Computed again: kept through the loop, they would be spilled at D = 128.
    const int thread = int(ptx::thread_x()), lane = thread & 31, first = thread / 32 % K::kWarpsM * 32;
    Row lse, sums;
    CUTLASS_PRAGMA_UNROLL
    for (int lane_row = 0; lane_row < Mma::kLaneRows; ++lane_row) {
      lse[lane_row] = softmax.logsumexp(lane_row);
      sums[lane_row] = softmax.l[lane_row] == 0.f ? 1.f : softmax.l[lane_row];  // nothing visible: 0 / 1
    }
    softmax.clear_unseen(o);

    // Through shared memory, so that rows are written in 16-byte chunks. A warp's rows are its own.
    output_t* const s = reinterpret_cast<output_t*>(warp.shared) + OTile::offset(first);
    stage(s, lane, o, {sums, softmax.m_prime});
    __syncwarp();
    TileStorer<output_t, OTile, /*kRows=*/32, /*kThreads=*/32, K::kAligned>::store(
        out.ptr + first * out.stride, out.stride, s, lane, out.num_queries - first, out.num_columns);
    if (out.logsumexp && Mma::leads_row(lane)) store_logsumexp(out, first + Mma::row_of_lane(lane), lse);
  }

 private:
  using Normalize = MemoryEfficientAttentionNormalize<output_t, float, Softmax::kPerSlot, float, float,
                                                      /*isFirst=*/true, /*isLast=*/true, Row>;

  // row: of the lane.
  CUTLASS_DEVICE static void store_logsumexp(const Output& out, int row, const Row& lse) {
    CUTLASS_PRAGMA_UNROLL
    for (int lane_row = 0; lane_row < Mma::kLaneRows; ++lane_row) {
      const int r = row + lane_row * Mma::kRowStep;
      if (r < out.num_queries) out.logsumexp[r] = lse[lane_row];
    }
  }
  // s: the warp's first row.
  CUTLASS_DEVICE static void stage(output_t* s, int lane, const float (&o)[K::kTilesO][8], const Normalize& normalize) {
    s += OTile::offset(Mma::row_of_lane(lane));
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < K::kTilesO; ++j) {
      CUTLASS_PRAGMA_UNROLL
      for (int lane_row = 0; lane_row < Mma::kLaneRows; ++lane_row) {
        auto x = normalize(lane_row, Softmax::get(o[j], lane_row));
        CUTLASS_PRAGMA_UNROLL
        for (int pair = 0; pair < Softmax::kPerSlot / 2; ++pair) {
          const int column = 8 * j + Mma::column_of(lane, 4 * pair);
          output_t* dst = s + OTile::offset(lane_row * Mma::kRowStep, column);
          dst[0] = x[2 * pair];
          dst[1] = x[2 * pair + 1];
        }
      }
    }
  }
};

}  // namespace ds4s
