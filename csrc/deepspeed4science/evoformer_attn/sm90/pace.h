// Keeps blocks in step: a block waits while it is far ahead of the mean of all blocks, so that bias2, K and V, which
// many blocks read, are read while they are in the L2 cache. Without it, multiprocessors drift apart by a few per cent,
// which is many tiles in a long call.
//
// Results do not depend on it. If some blocks do not run (another kernel occupies their multiprocessors), the first
// block that has waited too long ends the waiting for all.
#pragma once

#include "common/ptx.h"

namespace ds4s::sm90 {

// Used by one thread of a block.
class Pace {
 public:
  // begun: counts the parts that all blocks together have begun, 0 at first; null: no block waits.
  CUTLASS_DEVICE Pace(int32_t* begun, int num_blocks)
      : begun_(begun), num_blocks_(num_blocks), needed_(-kAhead * num_blocks) {}

  CUTLASS_DEVICE void begin_part() {
    if (begun_ == nullptr) return;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int polls = 0; seen_ < needed_; ++polls) {
      if (polls == kMostPolls) return end();
      __nanosleep(100);
      seen_ = ptx::load_acquire(begun_);
    }
    seen_ = atomicAdd(begun_, 1);  // read only when the next part begins, so that its latency costs no time
    needed_ += num_blocks_;
  }
  // Ends the waiting of all blocks.
  CUTLASS_DEVICE void end() {
    if (begun_ != nullptr) atomicAdd(begun_, kMany);
    begun_ = nullptr;
  }

 private:
  static constexpr int kAhead = 1;        // parts
  static constexpr int kMostPolls = 200;  // about 0.2 ms
  // More than the parts of most calls; in the longest ones each block ends its own waiting. All blocks' sum is an int.
  static constexpr int kMany = 1 << 22;

  int32_t* begun_;
  int num_blocks_, needed_, seen_ = 0;
};

}  // namespace ds4s::sm90
