// In place of common/ptx.h on the host: a warp is 32 threads, which exchange what they have at a barrier. A block may
// have several warps; a program sets the number of its threads (block.threads), if __syncthreads is called.
#pragma once

#include <cutlass/bfloat16.h>
#include <cutlass/cutlass.h>
#include <cutlass/half.h>

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <mutex>
#include <utility>

#undef CUTLASS_DEVICE
#define CUTLASS_DEVICE inline
#undef CUTLASS_PRAGMA_NO_UNROLL
#define CUTLASS_PRAGMA_NO_UNROLL
#undef CUTLASS_PRAGMA_UNROLL
#define CUTLASS_PRAGMA_UNROLL
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__

namespace ds4s {

using std::max;
using std::min;

struct Coordinates {
  int x = 0, y = 0, z = 0;
};
inline thread_local Coordinates threadIdx, blockIdx;
inline Coordinates gridDim;

class Barrier {
 public:
  int threads = 32;
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    const int round = round_;
    if (++count_ == threads) {
      count_ = 0, ++round_;
      arrived_.notify_all();
    } else {
      arrived_.wait(lock, [&] { return round_ != round; });
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable arrived_;
  int count_ = 0, round_ = 0;
};
class Warp {
 public:
  // What every lane has; all of them come here.
  const uint32_t* exchange(uint32_t mine) {
    arrived_.wait();
    values_[threadIdx.x % 32] = mine;
    arrived_.wait();
    return values_;
  }

 private:
  Barrier arrived_;
  uint32_t values_[32];
};
inline Warp warps[32];
inline Barrier block;
inline const uint32_t* exchange(uint32_t mine) { return warps[threadIdx.x / 32].exchange(mine); }

template <typename To, typename From>
To bits_of(From x) {
  To y;
  std::memcpy(&y, &x, sizeof(y));
  return y;
}
inline int __float_as_int(float x) { return bits_of<int>(x); }
inline float __int_as_float(int x) { return bits_of<float>(x); }
inline uint32_t __float_as_uint(float x) { return bits_of<uint32_t>(x); }
inline float __uint_as_float(uint32_t x) { return bits_of<float>(x); }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(unsigned(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t bits) {
  return uint32_t((uint64_t(high) << 32 | low) >> bits % 32);
}
template <typename T>
T __ldg(const T* x) {
  return *x;
}
inline uint32_t __ballot_sync(uint32_t, bool vote) {
  const uint32_t* votes = exchange(vote);
  uint32_t result = 0;
  for (int lane = 0; lane < 32; ++lane) result |= votes[lane] << lane;
  return result;
}
inline void __syncwarp() { exchange(0); }
inline void __syncthreads() { block.wait(); }
inline bool __syncthreads_or(bool) { std::abort(); }  // no program calls it
inline void __threadfence() {}
inline void __nanosleep(int) {}
inline int __reduce_min_sync(uint32_t, int x) {
  const uint32_t* all = exchange(uint32_t(x));
  int least = int(all[0]);
  for (int lane = 1; lane < 32; ++lane) least = min(least, int(all[lane]));
  return least;
}
template <typename T>
T __reduce_max_sync(uint32_t, T x) {
  const uint32_t* all = exchange(uint32_t(x));
  T largest = T(all[0]);
  for (int lane = 1; lane < 32; ++lane) largest = max(largest, T(all[lane]));
  return largest;
}
inline uint32_t __shfl_sync(uint32_t, uint32_t x, int lane) { return exchange(x)[lane]; }

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
inline float infinity() { return std::numeric_limits<float>::infinity(); }

using std::isnan;
// Of threads that change different elements.
template <typename T>
T atomicAdd(T* to, T x) {
  return std::exchange(*to, *to + x);
}
// Of threads that change the same one.
inline int atomicMin(int* to, int x) {
  int before = *to;
  while (!__atomic_compare_exchange_n(to, &before, min(before, x), false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
  }
  return before;
}
inline int atomicMax(int* to, int x) {
  int before = *to;
  while (!__atomic_compare_exchange_n(to, &before, max(before, x), false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
  }
  return before;
}

namespace ptx {
inline void wait_for_kernel_before() {}
inline void let_next_kernel_start() {}
inline int load_acquire(const int* flag) { return *flag; }
int wait_for(const int* counter, int at_least);            // not called
void store_release(int* flag, int value);                  // of the program
void load_if(bool wanted, const void* from, uint32_t& x);  // not called
inline bool any(bool x) { return __ballot_sync(~0u, x) != 0; }
uint32_t to_tf32(float);  // not called
inline uint32_t shfl_xor(uint32_t x, int mask) { return exchange(x)[threadIdx.x % 32 ^ mask]; }
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
inline float exp2(float x) { return std::exp2(x); }
inline float log2(float x) { return std::log2(x); }
inline uint32_t max_half_pairs(uint32_t x, uint32_t y) {
  const float2 a = unpack<cutlass::half_t>(x), b = unpack<cutlass::half_t>(y);
  return pack<cutlass::half_t>(std::fmax(a.x, b.x), std::fmax(a.y, b.y));
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
