// delta and the exponents of dq's factors (dq_range.h) beside kernel_dq_dkdv. preprocess, which is bound by memory,
// computes those of the first (b, n, h) only, and kernel_dq_dkdv, which is not, begins at once. A few blocks of this
// kernel, each alone on a multiprocessor, compute the others, in the order in which kernel_dq_dkdv needs them. Blocks
// of kernel_dq_dkdv wait for a (b, n, h); those for which there was no room begin when this kernel ends.
//
// No block waits in vain: kernel_dq_dkdv starts only after each block of this kernel has let it, so all of these are
// resident or have ended, and they wait for nothing.
#pragma once

#include "sm90/backward/args.h"
#include "sm90/backward/delta_pieces.h"

namespace ds4s::sm90 {

struct LaterDeltaArgs {
  ds4s::BackwardInputs rows;  // parameters and mask
  DeltaArgs delta;
  DqRangeArgs range;
  int32_t first_pairs, pairs;  // this kernel's (b, n, h) are those from number first_pairs on
  int32_t* complete;           // [pairs]: 1 once delta and the exponent are there
};

// A block's stages fill the shared memory of a multiprocessor.
constexpr int kLaterDeltaWarps = 24;

// The number of blocks that work. While kernel_dq_dkdv computes kKeysOfDelta keys of a query, a multiprocessor reads O
// and dO of a query. So the fewer keys are visible, the more blocks.
static CUTLASS_DEVICE int num_later_delta_blocks(const LaterDeltaArgs& args) {
  constexpr int kKeysOfDelta = 26;
  const int Lk = int(args.rows.p.Lk), rows = args.range.rows;
  float visible = 0.f;
  CUTLASS_PRAGMA_NO_UNROLL
  for (int bn = int(threadIdx.x) % 32; bn < rows; bn += 32) {
    const int2 keys = args.rows.mask.keys_now(bn, Lk);
    visible += float(max(keys.y - keys.x, 0));
  }
  CUTLASS_PRAGMA_UNROLL
  for (int mask = 1; mask < 32; mask *= 2) visible += ptx::shfl_xor(visible, mask);
  const float share = kKeysOfDelta * float(rows) / fmaxf(visible, 1.f);
  return int(fminf(ceilf(share * float(gridDim.x)), float(gridDim.x)));
}

// By all warps of a block: chunks of kPairs (b, n, h) one after another, whose pieces the warps divide. A fence for
// each chunk, not for each piece: one costs a warp microseconds.
template <typename Config>
class LaterDelta {
  static constexpr int kPairs = 6;
  using KeyShares = typename DeltaPiece<Config>::KeyShares;

 public:
  CUTLASS_DEVICE LaterDelta(const LaterDeltaArgs& args, int num_blocks)
      : args_(args),
        num_blocks_(num_blocks),
        stages_(PieceStages<Config, kLaterDeltaWarps>::init()),
        warp_(int(threadIdx.x) / 32) {}

  CUTLASS_DEVICE void run() const {
    uint32_t phase = 0;
    PieceCoord now{int(blockIdx.x) * kPairs, warp_};
    uint32_t seen = pairs_that_see(now.first_pair);
    KeyShares key{};
    bool loads = begin(now, seen, key);
    while (now.first_pair < args_.pairs) {
      PieceCoord next{now.first_pair, now.piece + kLaterDeltaWarps};
      const bool ends = next.piece - warp_ >= kPairs * args_.range.pieces;
      if (ends) next = {now.first_pair + num_blocks_ * kPairs, warp_}, seen = pairs_that_see(next.first_pair);
      if (loads) {
        piece(now).compute(stages_.of_warp[warp_], stages_.loaded[warp_], phase, args_.range, &key);
        phase ^= 1;
      } else if (exists(now)) {
        piece(now).store_zeros(args_.range);
      }
      __syncwarp();
      loads = begin(next, seen, key);
      if (ends) complete(now.first_pair);
      now = next;
    }
  }

 private:
  // A piece of a warp, among those of kPairs (b, n, h).
  struct PieceCoord {
    int first_pair, piece;
  };
  CUTLASS_DEVICE bool exists(const PieceCoord& at) const {
    return at.piece < min(kPairs, args_.pairs - at.first_pair) * args_.range.pieces;
  }
  CUTLASS_DEVICE DqPair pair(int number) const {
    return DqPair::at(args_.first_pairs + number, int(args_.rows.p.N), args_.range.heads);
  }
  CUTLASS_DEVICE DeltaPiece<Config> piece(const PieceCoord& at) const {
    const int number = at.piece / args_.range.pieces;
    return DeltaPiece<Config>(args_.rows.p, args_.delta, pair(at.first_pair + number),
                              at.piece - number * args_.range.pieces);
  }
  // A bit for each (b, n, h) of a chunk that sees a key.
  CUTLASS_DEVICE uint32_t pairs_that_see(int first_pair) const {
    const int lane = int(threadIdx.x) % 32, number = first_pair + lane;
    const DqPair of = pair(number);
    const bool exists = lane < kPairs && number < args_.pairs;
    return __ballot_sync(0xffffffffu, exists && !args_.rows.mask.sees_nothing_now(of.b * args_.rows.p.N + of.n));
  }
  // Returns whether a piece is being loaded.
  CUTLASS_DEVICE bool begin(const PieceCoord& at, uint32_t seen, KeyShares& key) const {
    if (!exists(at) || (seen >> at.piece / args_.range.pieces & 1) == 0) return false;
    const DeltaPiece<Config> mine = piece(at);
    mine.load(stages_.of_warp[warp_], stages_.loaded[warp_]);
    key = mine.has_key(mine.first_key()) ? mine.load_key(mine.first_key()) : KeyShares{};
    return true;
  }
  // All pieces of a chunk are stored.
  CUTLASS_DEVICE void complete(int first_pair) const {
    const bool exists = warp_ < min(kPairs, args_.pairs - first_pair);
    __syncthreads();
    if (exists) {
      const DqPair of = pair(first_pair + warp_);
      find_dq_exponent(args_.range, (of.b * args_.rows.p.N + of.n) * args_.range.heads + of.h);
    }
    __syncwarp();
    if (exists && threadIdx.x % 32 == 0) {
      __threadfence();
      ptx::store_release(args_.complete + first_pair + warp_, 1);
    }
  }

  const LaterDeltaArgs& args_;
  const int num_blocks_;
  PieceStages<Config, kLaterDeltaWarps>& stages_;
  const int warp_;
};

// A grid of all multiprocessors.
template <typename Config>
__global__ void __launch_bounds__(32 * kLaterDeltaWarps, 1) later_delta(const __grid_constant__ LaterDeltaArgs args) {
  ptx::wait_for_kernel_before();
  ptx::let_next_kernel_start();
  const int num_blocks = num_later_delta_blocks(args);
  if (int(blockIdx.x) < num_blocks) LaterDelta<Config>(args, num_blocks).run();
}

}  // namespace ds4s::sm90
