// In place of sm80/mma/mma.h on the host: a "warp" of one lane, which has all values of its rows.
#pragma once

#include <cutlass/array.h>

#include <cmath>
#include <limits>

namespace ds4s {

inline float infinity() { return std::numeric_limits<float>::infinity(); }
constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

namespace ptx {
inline float exp2(float x) { return std::exp2(x); }
inline float log2(float x) { return std::log2(x); }
inline bool any(bool x) { return x; }
inline float shfl_xor(float x, int) { return x; }
}  // namespace ptx

// kLaneRows rows in a tile of eight values: 4 with Sm70 and FFMA, 2 from Sm75 on.
template <int kLaneRows_>
struct OneLane {
  static constexpr int kLaneRows = kLaneRows_;
  static constexpr int lane_row_of(int i) { return i / 2 % kLaneRows; }
  static float reduce_max(float x) { return x; }
  template <typename Row>
  static void reduce_max_in_loop(Row&) {}
  static float reduce_sum(float x) { return x; }
};

}  // namespace ds4s
