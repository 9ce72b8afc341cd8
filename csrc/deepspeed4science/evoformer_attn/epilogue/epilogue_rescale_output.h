// The output operator of the online softmax, math.md (7): rescales the previous result to the new reference maximum,
// adds the new part and, in the last call, divides by the sum.
//
//   alpha = isLast ? 1 / s_prime[row] : 1        beta = alpha * m_prime[row]
//   output = alpha * accumulator + beta * source       (without the second term when isFirst)
#pragma once

#include <cutlass/array.h>
#include <cutlass/numeric_conversion.h>

template <typename ElementOutput_,       // of the result
          typename ElementSource_,       // of the previous result
          int Count,                     // elements of one row handled by one call
          typename ElementAccumulator_,  // of the new part
          typename ElementCompute_,      // alpha, beta and the sum
          bool isFirst,                  // there is no previous result
          bool isLast,                   // divide by s_prime
          typename FragmentAlphaBeta_,   // s_prime, m_prime: indexed by row
          cutlass::FloatRoundStyle Round = cutlass::FloatRoundStyle::round_to_nearest>
class MemoryEfficientAttentionNormalize {
 public:
  using ElementOutput = ElementOutput_;
  using ElementSource = ElementSource_;
  using ElementAccumulator = ElementAccumulator_;
  using ElementCompute = ElementCompute_;
  using FragmentOutput = cutlass::Array<ElementOutput, Count>;
  using FragmentSource = cutlass::Array<ElementSource, Count>;
  using FragmentAccumulator = cutlass::Array<ElementAccumulator, Count>;
  using FragmentCompute = cutlass::Array<ElementCompute, Count>;
  using FragmentAlphaBeta = FragmentAlphaBeta_;
  static constexpr int kCount = Count;
  static constexpr bool kIsFirst = isFirst;
  static constexpr bool kIsLast = isLast;

  // s_prime: sum of exp(score - maximum) of each row; m_prime: exp(old maximum - new maximum). Both are referenced.
  CUTLASS_HOST_DEVICE
  MemoryEfficientAttentionNormalize(FragmentAlphaBeta const& s_prime, FragmentAlphaBeta const& m_prime)
      : s_prime_(s_prime), m_prime_(m_prime) {}

  // The same from plain arrays with one value for each row.
  template <int kRows>
  CUTLASS_HOST_DEVICE MemoryEfficientAttentionNormalize(ElementCompute const (&s_prime)[kRows],
                                                        ElementCompute const (&m_prime)[kRows])
      : s_prime_(reinterpret_cast<FragmentAlphaBeta const&>(s_prime)),
        m_prime_(reinterpret_cast<FragmentAlphaBeta const&>(m_prime)) {
    static_assert(sizeof(FragmentAlphaBeta) == sizeof(s_prime), "one value for each row of the fragment");
  }

  CUTLASS_HOST_DEVICE
  FragmentOutput operator()(int row, FragmentAccumulator const& accumulator, FragmentSource const& source) const {
    if constexpr (isFirst) {
      return (*this)(row, accumulator);
    } else {
      ElementCompute alpha = alpha_of(row);
      ElementCompute beta = alpha * ElementCompute(m_prime_[row]);
      FragmentCompute a =
          cutlass::NumericArrayConverter<ElementCompute, ElementAccumulator, Count, Round>()(accumulator);
      FragmentCompute s = cutlass::NumericArrayConverter<ElementCompute, ElementSource, Count, Round>()(source);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Count; ++i) a[i] = beta * s[i] + alpha * a[i];
      return cutlass::NumericArrayConverter<ElementOutput, ElementCompute, Count, Round>()(a);
    }
  }

  CUTLASS_HOST_DEVICE
  FragmentOutput operator()(int row, FragmentAccumulator const& accumulator) const {
    ElementCompute alpha = alpha_of(row);
    FragmentCompute a = cutlass::NumericArrayConverter<ElementCompute, ElementAccumulator, Count, Round>()(accumulator);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Count; ++i) a[i] = alpha * a[i];
    return cutlass::NumericArrayConverter<ElementOutput, ElementCompute, Count, Round>()(a);
  }

 private:
  CUTLASS_HOST_DEVICE ElementCompute alpha_of(int row) const {
    return isLast ? reciprocal(ElementCompute(s_prime_[row])) : ElementCompute(1);
  }
  // A result of 16 bits needs no exact reciprocal: rcp.approx.ftz (PTX ISA, 9.7.3.13) is off by one unit in the last
  // place. It is 0 for sums from 2^126 on.
  CUTLASS_HOST_DEVICE static ElementCompute reciprocal(ElementCompute x) {
#if defined(__CUDA_ARCH__)
    if constexpr (cutlass::platform::is_same<ElementCompute, float>::value && sizeof(ElementOutput) == 2) {
      float y;
      asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
      return y;
    }
#endif
    return ElementCompute(1) / x;
  }

  FragmentAlphaBeta const& s_prime_;
  FragmentAlphaBeta const& m_prime_;
};
