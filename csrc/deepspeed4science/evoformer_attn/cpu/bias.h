// The two biases as the kernels read them: bias1 as a row of floats, bias2 as a tile of its own type.
#pragma once

#include <cstdint>

#include "../params.h"
#include "scalar.h"

namespace ds4s::cpu {

inline float load_element(const void* data, int32_t dtype, int64_t index) {
  if (dtype == kFloat32) return static_cast<const float*>(data)[index];
  if (dtype == kFloat16) return to_float(static_cast<const half_t*>(data)[index]);
  return to_float(static_cast<const bfloat16_t*>(data)[index]);
}

template <typename T>
inline void strided_to_float(float* out, const void* data, int64_t offset, int64_t stride, int count) {
  const T* in = static_cast<const T*>(data) + offset;
  for (int i = 0; i < count; ++i) out[i] = to_float(in[i * stride]);
}

inline void strided_to_float(float* out, const void* data, int32_t dtype, int64_t offset, int64_t stride, int count) {
  if (dtype == kFloat32) return strided_to_float<float>(out, data, offset, stride, count);
  if (dtype == kFloat16) return strided_to_float<half_t>(out, data, offset, stride, count);
  strided_to_float<bfloat16_t>(out, data, offset, stride, count);
}

// bias1[b, n, :] as floats; zeros where there is no bias1.
template <typename Params>
inline void load_bias1(float* out, const Params& p, int64_t b, int64_t n, int64_t first, int count) {
  if (p.bias1 == nullptr) {
    for (int i = 0; i < count; ++i) out[i] = 0.0f;
    return;
  }
  const int64_t offset = b * p.bias1_stride[0] + n * p.bias1_stride[1] + first * p.bias1_stride[2];
  strided_to_float(out, p.bias1, p.bias1_dtype, offset, p.bias1_stride[2], count);
}

// How a bias2 tile is loaded: a DType, or kNoBias.
constexpr int kNoBias = -1;

struct BiasTile {
  const void* data;    // element (0, 0) of the tile
  int64_t row_stride;  // in elements; columns are contiguous
  int kind;            // DType or kNoBias
};

// The tile of bias2[b, h] at (q0, k0). Where its columns are not contiguous it is gathered into `scratch`
// [rows][ld].
template <typename Params>
inline BiasTile bias2_tile(const Params& p, int64_t b, int64_t h, int64_t q0, int64_t k0, int rows, int cols,
                           float* scratch, int ld) {
  if (p.bias2 == nullptr) return {nullptr, 0, kNoBias};
  const int64_t* stride = p.bias2_stride;
  const int64_t offset = b * stride[0] + h * stride[1] + q0 * stride[2] + k0 * stride[3];
  if (stride[3] == 1) {
    const int64_t bytes = p.bias2_dtype == kFloat32 ? 4 : 2;
    return {static_cast<const char*>(p.bias2) + offset * bytes, stride[2], p.bias2_dtype};
  }
  for (int i = 0; i < rows; ++i) {
    strided_to_float(scratch + int64_t(i) * ld, p.bias2, p.bias2_dtype, offset + i * stride[2], stride[3], cols);
  }
  return {scratch, ld, kFloat32};
}

template <typename Params>
inline bool gathers_bias2(const Params& p) {
  return p.bias2 != nullptr && p.bias2_stride[3] != 1;
}

// s + bias2 at one vector, whole or only its first `count` lanes.
template <typename V, int kKind>
inline typename V::Vec add_bias2(typename V::Vec s, const BiasTile& tile, int64_t index) {
  if constexpr (kKind == kFloat32) return V::add(s, V::load(static_cast<const float*>(tile.data) + index));
  if constexpr (kKind == kFloat16) return V::add(s, V::load(static_cast<const half_t*>(tile.data) + index));
  if constexpr (kKind == kBFloat16) return V::add(s, V::load(static_cast<const bfloat16_t*>(tile.data) + index));
  return s;
}

template <typename V, int kKind>
inline typename V::Vec add_bias2_first(typename V::Vec s, const BiasTile& tile, int64_t index, int count) {
  if constexpr (kKind == kFloat32) {
    return V::add(s, V::load_first(static_cast<const float*>(tile.data) + index, count));
  }
  if constexpr (kKind == kFloat16) {
    return V::add(s, V::load_first(static_cast<const half_t*>(tile.data) + index, count));
  }
  if constexpr (kKind == kBFloat16) {
    return V::add(s, V::load_first(static_cast<const bfloat16_t*>(tile.data) + index, count));
  }
  return s;
}

}  // namespace ds4s::cpu
