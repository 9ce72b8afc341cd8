// bias2 for the pass over keys, by query as it lies in memory: through shared memory, and transposed by ldmatrix on its
// way to the accumulator's layout.
//
// Each warp brings the queries of its own 32 keys and reads them, nobody else does: 32 queries make room for those of
// the next tile as soon as they are in registers, behind a barrier of the warp. A query's keys are four 16-byte chunks,
// and every eighth query starts one chunk later: neither the copies (two queries) nor ldmatrix (queries {0, 1, 8, 9,
// 16, 17, 24, 25} + 2 j, sm80/mma/mma.h) meet a bank twice.
#pragma once

#include "sm80/backward/score_tile.h"

namespace ds4s {

template <typename Config>
struct BiasTile {
  using scalar_t = typename Config::scalar_t;
  using Mma = typename Config::Mma;
  static constexpr int kVec = Mma::kVec;
  CUTLASS_HOST_DEVICE static constexpr int offset(int query) { return (query * 4 + (query >> 3)) * kVec; }
  static constexpr int kWarpElements = offset(Config::kCols);
  static constexpr int kBytes = Config::kWarps * kWarpElements * int(sizeof(scalar_t));

  const scalar_t* g;  // this lane's chunk in the next 32 queries
  int64_t stride;     // of eight queries
  int queries;        // how many exist from there on; none where the keys do not
  scalar_t* s;        // this warp's part

  // gBias: query 0, the warp's first key; num_keys: how many exist.
  CUTLASS_DEVICE BiasTile(const scalar_t* gBias, int64_t row_stride, int num_queries, int num_keys, scalar_t* sBias,
                          int lane)
      : g(gBias + (lane >> 2) * row_stride + (lane & 3) * kVec),
        stride(8 * row_stride),
        queries((lane & 3) * kVec < num_keys ? num_queries - (lane >> 2) : 0),
        s(sBias) {}

  // The next 32 queries; called for one stripe after the other.
  CUTLASS_DEVICE void load(int stripe, int lane) {
    scalar_t* chunk = s + stripe * offset(32) + ((lane >> 2) * 4 + (lane & 3)) * kVec;
    CUTLASS_PRAGMA_UNROLL
    for (int group = 0; group < 4; ++group) {
      ptx::cp_async_16(chunk + offset(8 * group), g + group * stride, 8 * group < queries);
    }
    g += 4 * stride, queries -= 32;
  }
  CUTLASS_DEVICE void fetch(BiasFragment<Mma, scalar_t>& bias, int stripe, int lane) const {
    const scalar_t* row = s + stripe * offset(32) + offset(8 * ((lane & 7) >> 1) + 2 * (lane >> 3) + (lane & 1));
    CUTLASS_PRAGMA_UNROLL
    for (int slot = 0; slot < Mma::kSlots; ++slot) ptx::ldmatrix_trans(bias.words[slot][0], row + slot * kVec);
  }
};

}  // namespace ds4s
