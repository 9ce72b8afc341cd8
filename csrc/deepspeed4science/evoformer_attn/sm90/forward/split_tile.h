// A tile whose keys kSplits warpgroups divide: each computes every kSplits-th step, and the first one adds the results
// of the others to its own. For calls with fewer tiles than warpgroups that the device could run.
#pragma once

#include "sm90/forward/config.h"
#include "sm90/forward/softmax.h"

namespace ds4s::sm90 {

template <typename Config>
class SplitTile {
 public:
  static constexpr int kSplits = Config::kSplits, kKeys = Config::kKeys, kValues = Config::kHeadDim / 2;
  using Shared = typename Config::Shared;
  using Pipe = typename Config::Pipe;
  using Softmax = WarpgroupSoftmax<typename Config::scalar_t>;

  CUTLASS_DEVICE static ConsumerCoord coordinates() {
    ConsumerCoord at = ConsumerCoord::of_thread<Config::kQueryTiles>();
    if constexpr (kSplits > 1) {
      const int tile = at.warpgroup / kSplits;
      at.row = tile / Config::kQueryTiles, at.tile = tile % Config::kQueryTiles;
    }
    return at;
  }
  CUTLASS_DEVICE static int index(const ConsumerCoord& at) { return kSplits == 1 ? 0 : at.warpgroup % kSplits; }
  CUTLASS_DEVICE static bool is_first(const ConsumerCoord& at) { return index(at) == 0; }

  // The keys of this warpgroup's whole steps: every kSplits-th step from `begin` on, below `end`.
  struct Keys {
    int begin, end;
  };
  CUTLASS_DEVICE static Keys keys(int num_steps, int tail_units, const ConsumerCoord& at) {
    if constexpr (kSplits == 1) return {0, (num_steps - (tail_units > 0)) * kKeys};
    return {index(at) * kKeys, num_steps * kKeys};
  }
  // A last step of 16 times as many keys follows them. Divided keys have none: their steps are all whole, in less code.
  CUTLASS_DEVICE static int tail_units(const typename Config::Visible& seen) {
    return kSplits == 1 ? uniform(seen.tail_units) : 0;
  }

  // To the stage of a warpgroup's next step.
  CUTLASS_DEVICE static void advance_to_next(Pipe& pipe) {
    if constexpr (kSplits == 1) {
      pipe.advance();
    } else {
      advance(pipe, kSplits);
    }
  }
  // By `count` stages, up to kStages.
  CUTLASS_DEVICE static void advance(Pipe& pipe, int count) {
    pipe.index += count;
    if (pipe.index >= Config::kStages) pipe.index -= Config::kStages, pipe.phase ^= 1;
  }

  // Waits for the warpgroups of this tile.
  CUTLASS_DEVICE static void sync(const ConsumerCoord& at) {
    if constexpr (kSplits > 1) {
      constexpr int kFirstBarrier = 2 + Config::kWarpgroups;  // after those of at.sync() and FirstMask
      cutlass::arch::NamedBarrier::sync(128 * kSplits, kFirstBarrier + at.warpgroup / kSplits);
    }
  }

  // Called by all warpgroups of the tile; the first one then has the results of all keys.
  CUTLASS_DEVICE static void join(Shared& shared, float (&o)[kValues], Softmax& softmax, const ConsumerCoord& at) {
    if constexpr (kSplits > 1) {
      auto& partials = shared.partials[at.warpgroup / kSplits];
      const int thread = int(threadIdx.x) % 128;
      if (!is_first(at)) {
        auto& mine = partials[index(at) - 1];
        CUTLASS_PRAGMA_UNROLL
        for (int x = 0; x < kValues; ++x) mine.o[x][thread] = o[x];
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < 2; ++r) mine.m[r][thread] = softmax.m[r], mine.l[r][thread] = softmax.l[r];
      }
      sync(at);
      if (!is_first(at)) return;
      CUTLASS_PRAGMA_NO_UNROLL
      for (int other = 0; other < kSplits - 1; ++other) {
        const auto& theirs = partials[other];
        float factor[2], of_theirs[2];
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < 2; ++r) softmax.join(r, theirs.m[r][thread], theirs.l[r][thread], factor[r], of_theirs[r]);
        CUTLASS_PRAGMA_UNROLL
        for (int x = 0; x < kValues; ++x) {
          o[x] = fmaf(theirs.o[x][thread], of_theirs[row_of(x)], o[x] * factor[row_of(x)]);
        }
      }
    }
  }
};

}  // namespace ds4s::sm90
