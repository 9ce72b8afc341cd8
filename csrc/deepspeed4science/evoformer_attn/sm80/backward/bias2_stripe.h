// Loads bias2 of the next 32 streamed queries or keys in the layout of a warp's scores.
//
//   Bias2Stripe       from global memory, where rows of the matrix belong to the owned side
//   TiledBias2Stripe  for a block that owns keys, in 16 bits: from a transposed copy in tiles of 32 x 32 (copy_bias2)
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
  const scalar_t* g;                          // this lane's first owned row, streamed 0
  uint32_t further_rows[Mma::kLaneRows - 1];  // vectors of 16 bytes from there to its other rows
  int last_streamed, first_column;

  // Of rows and columns past the end, the last ones are read: P is 0 there, or not stored.
  CUTLASS_DEVICE Bias2Stripe(const scalar_t* g_, int64_t pitch, int first, int num_owned, int num_streamed, char*,
                             int warp_first, int lane)
      : last_streamed((num_streamed - 1) / Mma::kVec * Mma::kVec), first_column(Mma::first_column(lane)) {
    const int row = first + warp_first + Mma::row_of_lane(lane), first_row = min(row, num_owned - 1);
    g = g_ + first_row * pitch;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Mma::kLaneRows - 1; ++i) {
      further_rows[i] =
          uint32_t(min(row + (i + 1) * Mma::kRowStep, num_owned - 1) - first_row) * uint32_t(pitch / Mma::kVec);
    }
  }

  CUTLASS_DEVICE void load(int streamed) {
    CUTLASS_PRAGMA_UNROLL
    for (int group = 0; group < Mma::kGroups; ++group) {
      const scalar_t* column = g + min(streamed + first_column + group * Mma::kGroupStep, last_streamed);
      const uint4* const vectors = reinterpret_cast<const uint4*>(column);
      CUTLASS_PRAGMA_UNROLL
      for (int lane_row = 0; lane_row < Mma::kLaneRows; ++lane_row) {
        fragment.set(lane_row, group, __ldg(vectors + (lane_row > 0 ? further_rows[lane_row - 1] : 0)));
      }
    }
  }
};

template <typename Config>
struct TiledBias2Stripe {
  using scalar_t = typename Config::scalar_t;
  using Mma = typename Config::Mma;
  static constexpr int kBytes = 0;
  static_assert(Mma::kVectorsInOrder, "an instruction of a warp loads 512 bytes side by side");
  static_assert(Config::kStreamed <= 32 * kTilesPastEnd, "the stripe after the last one lies in the copy's memory");
  // The fused kernel, which has fewer registers, takes less than 2^24 queries.
  using Offset = typename cutlass::platform::conditional<Config::kFusesDq, int, int64_t>::type;

  BiasFragment<Mma, scalar_t> fragment;
  const scalar_t* g;  // this lane's first vector in the tile of the warp's keys and the first queries

  // pitch: of the tiles of 32 keys, divided by 32.
  CUTLASS_DEVICE TiledBias2Stripe(const scalar_t* g_, int64_t pitch, int first, int num_owned, int /*num_streamed*/,
                                  char*, int warp_first, int lane)
      : g(g_ + min(first + warp_first, (num_owned - 1) & ~31) * pitch + lane * Mma::kVec) {}

  // No bounds: the stripes of a tile of streamed queries exist, and memory for kTilesPastEnd follows the last one. In
  // the fused kernel, loads are issued where they are written.
  CUTLASS_DEVICE void load(int streamed) {
    const scalar_t* tile = g + Offset(streamed) * 32;
    CUTLASS_PRAGMA_UNROLL
    for (int lane_row = 0; lane_row < Mma::kLaneRows; ++lane_row) {
      const scalar_t* vector = tile + 32 * Mma::kVec * lane_row;
      const uint4 x = Config::kFusesDq ? ptx::load_16(vector) : __ldg(reinterpret_cast<const uint4*>(vector));
      fragment.set(lane_row, /*group=*/0, x);
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
