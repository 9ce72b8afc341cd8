// Zeros for hidden keys, in kernel_dq_dkdv. With dq in shared memory, a block computes dk, dv and dbias1 of the tiles
// from a (b, n, h)'s first visible key to its last one. Those of the keys before and after are stored here. So are
// dk and dv of the tiles that seen_tiles.h leaves out.
#pragma once

#include "sm90/backward/config.h"
#include "sm90/backward/maps.h"

namespace ds4s::sm90 {

template <typename Config>
struct ZeroGradients {
  using scalar_t = typename Config::scalar_t;
  using Shared = typename Config::Shared;
  using Coordinates = typename Config::Coordinates;
  // The warps of the producers that compute no delta, or the one for accumulators. Where there are none, all consumers.
  static constexpr int kWarps = Config::kDqInGlobal ? 1 : Config::kComputesDelta ? 2 - Config::kDeltaWarps : 2;
  static constexpr int kThreads = kWarps > 0 ? 32 * kWarps : 128 * Config::kWarpgroups;

  // Run by these warps of the producers.
  CUTLASS_DEVICE static void run(Shared& shared, const BackwardArgs& args, const DqDkdvMaps& maps) {
    const int thread = int(threadIdx.x) % kThreads;
    for (typename Config::template Scheduler<TileReader::kWarp> tiles(shared, args); tiles.tile < args.num_tiles;
         tiles.advance(shared, args)) {
      if (!tiles.first || tiles.part > 0) continue;
      const Coordinates at = Config::locate(args, tiles.tile);
      if (!Config::kPairsRows || at.row < args.N) store(args, maps, at, tiles.end - tiles.tile, thread);
    }
  }
  // at: of the first tile; num_tiles: from it to the last one. Called by kThreads threads.
  CUTLASS_DEVICE static void store(const BackwardArgs& args, const DqDkdvMaps& maps, const Coordinates& at,
                                   int num_tiles, int thread) {
    const int end = at.owned + num_tiles * (Config::kTiles * Config::kOwned);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int side = 0; side < 2; ++side) {
      store_keys(args, maps, at, side == 0 ? 0 : min(end, args.Lk), side == 0 ? at.owned : args.Lk, thread);
    }
  }

  // kTakesTiles, called for each tile that is not left out, with its number among those of its (b, n, h): stores a
  // share of the others.
  CUTLASS_DEVICE static void store_left_out(const SeenTiles& tiles, const BackwardArgs& args, const DqDkdvMaps& maps,
                                            const Coordinates& at, int number, int lane) {
    constexpr int kKeys = Config::kTiles * Config::kOwned;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = number; i < tiles.num_left_out(args); i += tiles.by_blocks.divisor) {
      const int key = tiles.left_out(i) * kKeys;
      store_keys(args, maps, at, key, min(key + kKeys, args.Lk), lane);
    }
  }

 private:
  CUTLASS_DEVICE static void store_keys(const BackwardArgs& args, const DqDkdvMaps& maps, const Coordinates& at,
                                        int begin, int end, int thread) {
    if (begin >= end) return;
    // The first block of a cluster stores dk, the second dv.
    if (args.stores_first && Config::rank() == 0) store_rows(maps.first_rows, at, begin, end, thread);
    if (args.stores_second && Config::rank() == (Config::kClusterBlocks == 1 ? 0 : 1)) {
      store_rows(maps.second_rows, at, begin, end, thread);
    }
    if (!args.stores_dbias1) return;
    float* dbias1 = args.dbias1 + (args.row_index(at.batch, at.row) * args.H + at.head) * args.Lk;
    for (int key = begin + thread; key < end; key += kThreads) dbias1[key] = 0.f;
  }
  // Neighbouring threads store the 16-byte pieces of a row.
  CUTLASS_DEVICE static void store_rows(const TensorView<5>& out, const Coordinates& at, int begin, int end,
                                        int thread) {
    constexpr int kPieces = Config::kHeadDim > 64 ? 16 : Config::kHeadDim > 32 ? 8 : Config::kHeadDim / 8;
    constexpr int kKeysAtOnce = kThreads / kPieces;
    static_assert(kThreads % kPieces == 0 && 8 * kPieces >= Config::kHeadDim, "a thread has a piece of every row");
    const int piece = thread % kPieces;
    if (8 * piece >= int(out.size[0])) return;
    begin += thread / kPieces;
    scalar_t* ptr = static_cast<scalar_t*>(const_cast<void*>(out.ptr)) + 8 * piece + begin * out.stride[1] +
                    at.head * out.stride[2] + at.row * out.stride[3] + at.batch * out.stride[4];
    CUTLASS_PRAGMA_NO_UNROLL
    for (; begin < end; begin += kKeysAtOnce, ptr += kKeysAtOnce * out.stride[1]) {
      __stcs(reinterpret_cast<uint4*>(ptr), make_uint4(0, 0, 0, 0));
    }
  }
};

}  // namespace ds4s::sm90
