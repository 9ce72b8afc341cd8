// Loads bias2 of the next 32 streamed queries or keys in the layout of a warp's scores.
//
//   Bias2Stripe       from global memory, where rows of the matrix belong to the owned side
//   EarlyBias2Stripe  the same in the fused kernel: loads are issued where they are written, and take few registers
//   TransposedBias2   for a block that owns keys: rows are queries, transposed through shared memory by ldmatrix
//
// TransposedBias2: each warp loads and reads the queries of its own 32 keys by itself. The memory of 32 queries is
// reused for those of the next tile as soon as they are in registers, after a barrier of the warp. A query's keys are
// four 16-byte chunks. Every sixteenth query starts two chunks later, and in every second group of eight queries the
// chunks 2 i and 2 i + 1 are exchanged. So neither the copies (two queries) nor ldmatrix (queries {0, 1, 8, 9, 16, 17,
// 24, 25} + 2 j, sm80/mma/mma.h) have bank conflicts, and 32 aligned bytes in global memory remain 32 aligned bytes:
// otherwise a copy takes twice as many cycles. (1,768,768,4,32): 0.98 of the whole backward.
#pragma once

#include "sm80/backward/score_tile.h"

namespace ds4s {

template <typename Config>
struct Bias2Stripe {
  using scalar_t = typename Config::scalar_t;
  using Mma = typename Config::Mma;
  static constexpr int kBytes = 0;

  BiasFragment<Mma, scalar_t> fragment;
  const scalar_t* g;  // owned 0, streamed 0
  int64_t pitch;
  int owned;  // this lane's first owned query or key
  int last_owned, last_streamed, first_column;

  CUTLASS_DEVICE Bias2Stripe(const scalar_t* g_, int64_t pitch_, int first, int num_owned, int num_streamed, char*,
                             int warp_first, int lane)
      : g(g_),
        pitch(pitch_),
        owned(first + warp_first + Mma::row_of_lane(lane)),
        last_owned(num_owned - 1),
        last_streamed((num_streamed - 1) / Mma::kVec * Mma::kVec),
        first_column(Mma::first_column(lane)) {}

  CUTLASS_DEVICE void load(int streamed) {
    fragment.load(g, int(pitch), owned, last_owned, streamed + first_column, last_streamed);
  }
};

template <typename Config>
struct EarlyBias2Stripe {
  using scalar_t = typename Config::scalar_t;
  using Mma = typename Config::Mma;
  static constexpr int kBytes = 0;
  static constexpr int kElementBytes = int(sizeof(scalar_t));
  static_assert(Mma::kGroups == 1, "one vector of a row");

  BiasFragment<Mma, scalar_t> fragment;
  const char* g;                  // the block's first owned query or key, streamed 0
  uint32_t rows[Mma::kLaneRows];  // offsets of this lane's owned ones in bytes; the planner makes sure that 32 bits do
  int last_streamed, first_column;

  CUTLASS_DEVICE EarlyBias2Stripe(const scalar_t* g_, int64_t pitch, int first, int num_owned, int num_streamed, char*,
                                  int warp_first, int lane)
      : g(reinterpret_cast<const char*>(g_ + first * pitch)),
        last_streamed((num_streamed - 1) / Mma::kVec * Mma::kVec),
        first_column(Mma::first_column(lane)) {
    CUTLASS_PRAGMA_UNROLL
    for (int lane_row = 0; lane_row < Mma::kLaneRows; ++lane_row) {
      const int row = warp_first + Mma::row_of_lane(lane) + lane_row * Mma::kRowStep;
      rows[lane_row] = uint32_t(min(row, num_owned - 1 - first)) * uint32_t(pitch) * kElementBytes;
    }
  }

  CUTLASS_DEVICE void load(int streamed) {
    const uint32_t column = uint32_t(min(streamed + first_column, last_streamed)) * kElementBytes;
    CUTLASS_PRAGMA_UNROLL
    for (int lane_row = 0; lane_row < Mma::kLaneRows; ++lane_row) {
      const uint4 x = ptx::load_16(g + (rows[lane_row] + column));
      uint32_t (&words)[4] = fragment.words[lane_row][0];
      words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
    }
  }
};

template <typename Config>
struct TransposedBias2 {
  using scalar_t = typename Config::scalar_t;
  using Mma = typename Config::Mma;
  static constexpr int kVec = Mma::kVec;
  CUTLASS_HOST_DEVICE static constexpr int offset(int query) { return (query * 4 + (query >> 4) * 2) * kVec; }
  static constexpr int kWarpElements = offset(Config::kStreamed);
  static constexpr int kBytes = Config::kWarps * kWarpElements * int(sizeof(scalar_t));

  BiasFragment<Mma, scalar_t> fragment;
  const scalar_t* g;  // this lane's chunk in the next 32 queries
  int64_t stride;     // of eight queries
  int queries;        // queries that exist from there on; none where the chunk's keys do not exist
  scalar_t* s;
  int stored, fetched;  // this lane's offsets in s

  // g_: the element of query 0 and key 0.
  CUTLASS_DEVICE TransposedBias2(const scalar_t* g_, int64_t pitch, int first, int num_owned, int num_streamed,
                                 char* shared, int warp_first, int lane_)
      : g(g_ + first + warp_first + (lane_ >> 2) * pitch + (lane_ & 3) * kVec),
        stride(8 * pitch),
        queries((lane_ & 3) * kVec < num_owned - first - warp_first ? num_streamed - (lane_ >> 2) : 0),
        s(reinterpret_cast<scalar_t*>(shared)),
        stored(warp_first / 32 * kWarpElements + ((lane_ >> 2) * 4 + (lane_ & 3)) * kVec),
        fetched(warp_first / 32 * kWarpElements + offset(8 * ((lane_ & 7) >> 1) + 2 * (lane_ >> 3) + (lane_ & 1)) +
                (lane_ >> 1 & 1) * kVec) {
    if constexpr (Config::kKeepsAddresses) ptx::keep(stored), ptx::keep(fetched);
  }

  // Loads the next 32 queries; called for one stripe after another. Exchanging chunks flips a bit of their offset.
  CUTLASS_DEVICE void load(int stripe) {
    CUTLASS_PRAGMA_UNROLL
    for (int group = 0; group < 4; ++group) {
      scalar_t* chunk = s + (stored ^ group % 2 * kVec) + stripe * offset(32);
      ptx::cp_async_16(chunk + offset(8 * group), g, 8 * group < queries);
      g += stride;
    }
    queries -= 32;
  }
  CUTLASS_DEVICE void fetch(int stripe) {
    CUTLASS_PRAGMA_UNROLL
    for (int lane_row = 0; lane_row < Mma::kLaneRows; ++lane_row) {
      const scalar_t* row = s + (fetched ^ lane_row % 2 * kVec) + stripe * offset(32);
      ptx::ldmatrix_trans(fragment.words[lane_row][0], row + lane_row / 2 * 2 * kVec);
    }
  }
};

}  // namespace ds4s
