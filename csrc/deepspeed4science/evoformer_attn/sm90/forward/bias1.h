// A warp loads bias1 of a step and stores f (bias1 - shift), math.md (1a), in shared memory as floats, with -inf past
// the last key. TMA cannot do this: rows may begin at any byte. The loads run while the warp waits for its stage.
#pragma once

#include "sm90/forward/config.h"

namespace ds4s::sm90 {

// For rows that begin at 16 bytes and consist of whole 16-byte pieces: a lane loads neighbouring keys.
template <typename Config>
class Bias1Vectors {
 public:
  using scalar_t = typename Config::scalar_t;
  static constexpr int kKeys = Config::kKeys, kCount = Config::kRows * kKeys / 32;  // values of a lane
  using Vector = cute::conditional_t<kCount == 4, uint2, uint32_t>;
  static_assert(sizeof(Vector) == kCount * sizeof(scalar_t), "one or two rows n: a lane loads two or four values");

  CUTLASS_DEVICE Bias1Vectors(const ForwardArgs& args, const typename Config::Coordinates& at, int lane)
      : row_(kCount * lane / kKeys), key_(kCount * lane % kKeys), keys_left_(args.Lk - key_) {
    const int n = min(at.row + row_, args.N - 1);
    bias1_ =
        static_cast<const scalar_t*>(args.bias1) + at.batch * args.bias1_stride[0] + n * args.bias1_stride[1] + key_;
  }
  CUTLASS_DEVICE void take_shift(const typename Config::Mask& mask) { shift_ = mask.shift[row_]; }
  CUTLASS_DEVICE void load(int key) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount / 2; ++i) pairs_[i] = ptx::pack<scalar_t>(-infinity(), -infinity());
    if (key < keys_left_) *reinterpret_cast<Vector*>(pairs_) = __ldg(reinterpret_cast<const Vector*>(bias1_ + key));
  }
  CUTLASS_DEVICE void store(typename Config::Bias1Stage& stage, float f) const {
    float* values = &stage[row_][Config::bias1_index(key_)];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount / 2; ++i) {
      const float2 pair = ptx::unpack<scalar_t>(pairs_[i]);
      *reinterpret_cast<float2*>(values + 4 * i) = make_float2((pair.x - shift_) * f, (pair.y - shift_) * f);
    }
  }

 private:
  int row_, key_, keys_left_;
  const scalar_t* bias1_;
  float shift_;
  alignas(8) uint32_t pairs_[kCount / 2];
};

// For rows with any strides: a lane loads every 32nd key.
template <typename Config>
class Bias1Elements {
 public:
  using scalar_t = typename Config::scalar_t;
  static constexpr int kRows = Config::kRows, kPerLane = Config::kKeys / 32;

  CUTLASS_DEVICE Bias1Elements(const ForwardArgs& args, const typename Config::Coordinates& at, int lane)
      : stride_(args.bias1_stride[2]), Lk_(args.Lk), lane_(lane) {
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const int n = min(at.row + r, args.N - 1);
      row_[r] = static_cast<const scalar_t*>(args.bias1) + at.batch * args.bias1_stride[0] + n * args.bias1_stride[1];
    }
  }
  CUTLASS_DEVICE void take_shift(const typename Config::Mask& mask) {
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) shift_[r] = mask.shift[r];
  }
  CUTLASS_DEVICE void load(int key) {
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < kRows * kPerLane; ++x) {
      const int k = key + x % kPerLane * 32 + lane_;
      value_[x] = k < Lk_ ? float(row_[x / kPerLane][k * stride_]) : -infinity();
    }
  }
  CUTLASS_DEVICE void store(typename Config::Bias1Stage& stage, float f) const {
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < kRows * kPerLane; ++x) {
      stage[x / kPerLane][x % kPerLane * 32 + Config::bias1_index(lane_)] = (value_[x] - shift_[x / kPerLane]) * f;
    }
  }

 private:
  int64_t stride_;
  int Lk_, lane_;
  const scalar_t* row_[kRows];
  float shift_[kRows], value_[kRows * kPerLane];
};

}  // namespace ds4s::sm90
