// Any processor: four floats a vector, in the compiler's own vector extension (GCC and Clang; SSE, NEON, VSX, ...).
#pragma once

#include "scalar.h"

namespace ds4s::cpu {

struct Portable {
  typedef float Vec __attribute__((vector_size(16)));
  typedef int32_t Mask __attribute__((vector_size(16)));

  static constexpr int kWidth = 4;
  // 4 x 2 accumulators, 2 right operands and one broadcast fit the sixteen registers of SSE.
  static constexpr int kTileRows = 4;
  static constexpr int kTileVecs = 2;

  static Vec zero() { return Vec{}; }
  static Vec set1(float x) { return Vec{x, x, x, x}; }
  static Vec add(Vec a, Vec b) { return a + b; }
  static Vec sub(Vec a, Vec b) { return a - b; }
  static Vec mul(Vec a, Vec b) { return a * b; }
  static Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }  // fused where -ffp-contract=fast and the target allow
  static Vec fms(Vec a, Vec b, Vec c) { return a * b - c; }
  static Vec max(Vec a, Vec b) { return a > b ? a : b; }

  static Mask first(int count) { return Mask{0, 1, 2, 3} < count; }
  static Vec select(Mask mask, Vec yes, Vec no) { return mask ? yes : no; }

  static Vec load(const float* p) {
    Vec x;
    std::memcpy(&x, p, sizeof x);
    return x;
  }
  template <typename T>
  static Vec load(const T* p) {
    return Vec{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])};
  }
  template <typename T>
  static Vec load_first(const T* p, int count) {
    Vec x{};
    for (int i = 0; i < 4; ++i) {
      if (i < count) x[i] = to_float(p[i]);
    }
    return x;
  }

  static void store(float* p, Vec x) { std::memcpy(p, &x, sizeof x); }
  template <typename T>
  static void store(T* p, Vec x) {
    store_first(p, x, 4);
  }
  template <typename T>
  static void store_first(T* p, Vec x, int count) {
    for (int i = 0; i < 4; ++i) {
      if (i < count) p[i] = from_float<T>(x[i]);
    }
  }

  static float reduce_max(Vec x) {
    const float low = x[0] > x[1] ? x[0] : x[1];
    const float high = x[2] > x[3] ? x[2] : x[3];
    return low > high ? low : high;
  }
  static float reduce_add(Vec x) { return (x[0] + x[2]) + (x[1] + x[3]); }

  static void transpose(Vec (&x)[4]) {
    const Vec a{x[0][0], x[1][0], x[2][0], x[3][0]};
    const Vec b{x[0][1], x[1][1], x[2][1], x[3][1]};
    const Vec c{x[0][2], x[1][2], x[2][2], x[3][2]};
    const Vec d{x[0][3], x[1][3], x[2][3], x[3][3]};
    x[0] = a;
    x[1] = b;
    x[2] = c;
    x[3] = d;
  }

  // x * 2^n where z >= cutoff, NaN where z is NaN, else 0. n holds integers from -126 on where z >= cutoff.
  static Vec scale_above(Vec x, Vec n, Vec z, Vec cutoff) {
    const Mask keep = z >= cutoff;
    // Converting an out-of-range float to an integer is undefined, so the lanes not kept take 0.
    const Mask exponent = __builtin_convertvector(keep ? n : Vec{}, Mask);
    const Vec scaled = reinterpret_cast<Vec>(reinterpret_cast<Mask>(x) + exponent * (1 << 23));
    return z != z ? z : keep ? scaled : Vec{};
  }
};

}  // namespace ds4s::cpu
