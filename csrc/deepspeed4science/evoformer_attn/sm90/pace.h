// Blocks that keep step: none is far ahead of the others' mean, so that what many blocks read (bias2, K and V) is read
// while it is in the L2 cache. Multiprocessors differ by a few per cent, which comes to many tiles in a long call.
//
// Only time depends on it. Where blocks do not run (another kernel has their place), the first that waits too long ends
// it for all.
#pragma once

#include "common/ptx.h"

namespace ds4s::sm90 {

// Belongs to one thread of a block.
class Pace {
 public:
  // begun: parts of their work that all blocks together have begun, 0 at first; null: nobody waits.
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
    seen_ = atomicAdd(begun_, 1);  // looked at when the next part begins, so that it costs no time
    needed_ += num_blocks_;
  }
  // Nobody waits any more.
  CUTLASS_DEVICE void end() {
    if (begun_ != nullptr) atomicAdd(begun_, kMany);
    begun_ = nullptr;
  }

 private:
  static constexpr int kAhead = 1;        // parts
  static constexpr int kMostPolls = 200;  // about 0.2 ms
  static constexpr int kMany = 1 << 22;   // more than all parts

  int32_t* begun_;
  int num_blocks_, needed_, seen_ = 0;
};

}  // namespace ds4s::sm90
