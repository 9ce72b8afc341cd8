// In place of common/key_mask.h on the host: the words that find_visible_keys leaves, and the warp's intrinsics.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>

#define CUTLASS_DEVICE inline
#define CUTLASS_PRAGMA_NO_UNROLL

namespace ds4s {

template <typename T>
T __ldg(const T* x) {
  return *x;
}
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(unsigned(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
// A warp is 32 threads of the host.
struct ThreadIndex {
  int x = 0;
};
inline thread_local ThreadIndex threadIdx;
struct Ballot {
  std::mutex mutex;
  std::condition_variable arrived;
  int count = 0, round = 0;
  uint32_t votes = 0, result = 0;
};
inline Ballot ballot;
inline uint32_t __ballot_sync(uint32_t, bool vote) {
  std::unique_lock<std::mutex> lock(ballot.mutex);
  const int round = ballot.round;
  ballot.votes |= uint32_t(vote) << threadIdx.x;
  if (++ballot.count == 32) {
    ballot.result = ballot.votes, ballot.votes = 0, ballot.count = 0, ++ballot.round;
    ballot.arrived.notify_all();
  } else {
    ballot.arrived.wait(lock, [&] { return ballot.round != round; });
  }
  return ballot.result;
}

namespace ptx {
inline bool any(bool vote) { return __ballot_sync(0xffffffffu, vote) != 0; }
template <typename T>
T load_written(const T* x) {
  return *x;
}
}  // namespace ptx
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
  return uint32_t((uint64_t(high) << 32 | low) >> shift % 32);
}
struct int2 {
  int x, y;
};
inline int2 make_int2(int x, int y) { return {x, y}; }

struct KeyMask {
  static constexpr int kUnit = 16, kWordKeys = 512;
  static constexpr int num_words(int64_t Lk) { return int((Lk + 511) / 512); }
  const float* shift;
  const uint32_t* visible;
  const int2* range;
  int32_t words;

  uint32_t units(int64_t bn, int key, int num_units) const {
    uint32_t bits = 0;
    for (int i = 0; i < num_units; ++i) {
      int unit = key / kUnit + i;
      bool seen = visible == nullptr || (unit / 32 < words && (visible[bn * words + unit / 32] >> unit % 32 & 1) != 0);
      bits |= uint32_t(seen) << i;
    }
    return bits;
  }
};

}  // namespace ds4s
