// In place of common/ptx.h on the host: a warp is 32 threads, which exchange what they have at a barrier.
#pragma once

#include <cutlass/bfloat16.h>
#include <cutlass/cutlass.h>
#include <cutlass/half.h>

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <limits>
#include <mutex>

#undef CUTLASS_DEVICE
#define CUTLASS_DEVICE inline
#undef CUTLASS_PRAGMA_NO_UNROLL
#define CUTLASS_PRAGMA_NO_UNROLL
#undef CUTLASS_PRAGMA_UNROLL
#define CUTLASS_PRAGMA_UNROLL

namespace ds4s {

using std::max;
using std::min;

struct ThreadIndex {
  int x = 0;
};
inline thread_local ThreadIndex threadIdx;

class Warp {
 public:
  // What every lane has; all of them come here.
  const uint32_t* exchange(uint32_t mine) {
    wait();
    values_[threadIdx.x] = mine;
    wait();
    return values_;
  }

 private:
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    const int round = round_;
    if (++count_ == 32) {
      count_ = 0, ++round_;
      arrived_.notify_all();
    } else {
      arrived_.wait(lock, [&] { return round_ != round; });
    }
  }
  std::mutex mutex_;
  std::condition_variable arrived_;
  int count_ = 0, round_ = 0;
  uint32_t values_[32];
};
inline Warp warp;

template <typename To, typename From>
To bits_of(From x) {
  To y;
  std::memcpy(&y, &x, sizeof(y));
  return y;
}
inline int __float_as_int(float x) { return bits_of<int>(x); }
inline float __int_as_float(int x) { return bits_of<float>(x); }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(unsigned(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
template <typename T>
T __ldg(const T* x) {
  return *x;
}
inline uint32_t __ballot_sync(uint32_t, bool vote) {
  const uint32_t* votes = warp.exchange(vote);
  uint32_t result = 0;
  for (int lane = 0; lane < 32; ++lane) result |= votes[lane] << lane;
  return result;
}
inline int __reduce_max_sync(uint32_t, int x) {
  const uint32_t* all = warp.exchange(uint32_t(x));
  int largest = int(all[0]);
  for (int lane = 1; lane < 32; ++lane) largest = max(largest, int(all[lane]));
  return largest;
}
inline uint32_t __shfl_sync(uint32_t, uint32_t x, int lane) { return warp.exchange(x)[lane]; }

inline float infinity() { return std::numeric_limits<float>::infinity(); }

namespace ptx {
inline uint32_t shfl_xor(uint32_t x, int mask) { return warp.exchange(x)[threadIdx.x ^ mask]; }
inline float shfl_xor(float x, int mask) { return bits_of<float>(shfl_xor(bits_of<uint32_t>(x), mask)); }
template <typename T>
T load_written(const T* x) {
  return *x;
}
// NaN as the instruction gives it, positive.
inline float max_nan(float x, float y) {
  return std::isnan(x) || std::isnan(y) ? bits_of<float>(0x7fffffff) : std::max(x, y);
}
template <typename T>
uint32_t pack(float x, float y) {
  return uint32_t(T(x).raw()) | uint32_t(T(y).raw()) << 16;
}
template <typename T>
float2 unpack(uint32_t pair) {
  return {float(T::bitcast(uint16_t(pair))), float(T::bitcast(uint16_t(pair >> 16)))};
}
template <typename T>
uint32_t max_nan_pairs(uint32_t x, uint32_t y) {
  const float2 a = unpack<T>(x), b = unpack<T>(y);
  return pack<T>(max_nan(a.x, b.x), max_nan(a.y, b.y));
}
inline void store_16(void* to, const uint4& x) { std::memcpy(to, &x, sizeof(x)); }
inline void cp_async_16(void* to, const void* from, bool exists) {
  if (exists) {
    std::memcpy(to, from, 16);
  } else {
    std::memset(to, 0, 16);
  }
}
template <typename T>
uint32_t load_bits(const T* x) {
  return x->raw();
}
template <typename T>
float bits_to_float(uint32_t x) {
  return float(T::bitcast(uint16_t(x)));
}
}  // namespace ptx
}  // namespace ds4s
