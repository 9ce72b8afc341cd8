// Sources of a bias tile: three policies with one interface, and the functor that adds up to two of them into shared
// memory: bias1 - shift and bias2 of math.md (1).
//
//   BroadcastNoLoad   no bias
//   BroadcastA        row vector  [B, N, 1, 1, L]: the same for every row of the tile and every head
//   BroadcastB        matrix      [B, 1, H, L, L]: the same for every n
//
// A ThreadMap says which elements a thread reads (CUTLASS's pitch-linear thread maps serve, and ScoreThreadMap below):
// kElementsPerAccess neighbours of a row at initial_offset(thread_id) + (contiguous, strided) iterations * Delta. A
// member kAligned = true also promises that every row may be read in whole 16-byte chunks.
#pragma once

#include <cutlass/array.h>
#include <cutlass/layout/matrix.h>
#include <cutlass/matrix_coord.h>
#include <cutlass/matrix_shape.h>
#include <cutlass/pitch_linear_coord.h>
#include <cutlass/tensor_ref.h>

#include "../common/ptx.h"

namespace ds4s {

// One element in a register, not converted: a load issued early is then waited for only where it is used
// (ptx::load_bits).
template <typename scalar_t>
struct ElementBits {
  uint32_t bits = 0;
  CUTLASS_DEVICE void clear() { bits = 0; }
  CUTLASS_DEVICE float value() const { return ptx::bits_to_float<scalar_t>(bits); }
};

// The fragment that a thread of a map reads: an array, or with a member kKeepsBits = true one element's bits.
template <typename ThreadMap, typename scalar_t, typename = void>
struct MapFragment {
  using Type = cutlass::Array<scalar_t, ThreadMap::Iterations::kCount * ThreadMap::kElementsPerAccess>;
};
template <typename ThreadMap, typename scalar_t>
struct MapFragment<ThreadMap, scalar_t, typename cutlass::platform::enable_if<ThreadMap::kKeepsBits>::type> {
  using Type = ElementBits<scalar_t>;
};

template <typename ThreadMap, typename = void>
struct MapIsAligned {
  static constexpr bool kValue = false;
};
template <typename ThreadMap>
struct MapIsAligned<ThreadMap, typename cutlass::platform::enable_if<ThreadMap::kAligned>::type> {
  static constexpr bool kValue = true;
};

// Loads one access: elements [0, valid) of gmem, zeros after them.
template <int kCount, bool kVector, typename scalar_t>
CUTLASS_DEVICE void load_access(scalar_t* dst, const scalar_t* gmem, int valid) {
  constexpr bool kWide = kVector && kCount * sizeof(scalar_t) == 16;
  if constexpr (kWide) {
    uint4 x = make_uint4(0, 0, 0, 0);
    if (valid > 0) x = __ldg(reinterpret_cast<const uint4*>(gmem));
    *reinterpret_cast<uint4*>(dst) = x;
  } else {
    CUTLASS_PRAGMA_UNROLL
    for (int e = 0; e < kCount; ++e) dst[e] = e < valid ? gmem[e] : scalar_t(0);
  }
}

// The tile of a matrix whose rows are `stride` elements apart; 0 repeats one row.
template <typename ThreadMap, typename Fragment, typename scalar_t>
CUTLASS_DEVICE void load_tile(Fragment& frag, const scalar_t* ptr, int thread_id, const cutlass::MatrixCoord& extent,
                              int64_t stride) {
  using Iterations = typename ThreadMap::Iterations;
  using Delta = typename ThreadMap::Delta;
  constexpr int kCount = ThreadMap::kElementsPerAccess;
  constexpr bool kAligned = MapIsAligned<ThreadMap>::kValue;
  constexpr bool kWide = kCount * sizeof(scalar_t) == 16;
  auto start = ThreadMap::initial_offset(thread_id);
  const scalar_t* row_ptr = ptr + int64_t(start.strided()) * stride + start.contiguous();
  int rows = extent.row() - int(start.strided());
  int columns = extent.column() - int(start.contiguous());
  auto load = [&](auto whole, auto vector) {
    const scalar_t* p = row_ptr;
    CUTLASS_PRAGMA_UNROLL
    for (int s = 0; s < Iterations::kStrided; ++s, p += Delta::kStrided * stride) {
      // The last row's address follows from the last but one, not from a multiple of the stride, which takes more
      // instructions: (1,768,768,4,32) 0.995 of the time.
      if (Iterations::kStrided > 2 && s == Iterations::kStrided - 2) ptx::keep(p);
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < Iterations::kContiguous; ++c) {
        int valid = s * Delta::kStrided < rows ? columns - c * Delta::kContiguous : 0;
        if constexpr (decltype(whole)::value) valid = kCount;
        load_access<kCount, decltype(vector)::value>(
            reinterpret_cast<scalar_t*>(&frag) + (s * Iterations::kContiguous + c) * kCount, p + c * Delta::kContiguous,
            valid);
      }
    }
  };
  // Whole tiles, the common case, need no bounds checks; without a promise of alignment it is tested here.
  using Yes = cutlass::platform::true_type;
  using No = cutlass::platform::false_type;
  bool fast = (Iterations::kStrided - 1) * Delta::kStrided < rows &&
              (Iterations::kContiguous - 1) * Delta::kContiguous + kCount <= columns;
  if constexpr (kWide && !kAligned) {
    fast = fast && reinterpret_cast<uintptr_t>(row_ptr) % 16 == 0 && stride % kCount == 0;
  }
  if (kWide && fast) {
    load(Yes(), Yes());
  } else if constexpr (kAligned) {
    load(No(), Yes());
  } else {
    load(No(), No());
  }
}
template <typename ThreadMap, typename scalar_t>
CUTLASS_DEVICE void load_tile(ElementBits<scalar_t>& element, const scalar_t* ptr, int thread_id,
                              const cutlass::MatrixCoord& extent, int64_t stride) {
  auto start = ThreadMap::initial_offset(thread_id);
  const uint32_t column = start.contiguous();
  element.clear();
  if (column < uint32_t(extent.column())) element.bits = ptx::load_bits(ptr + start.strided() * stride + column);
}

}  // namespace ds4s

template <typename ThreadMap, typename Shape, typename scalar_t>
struct BroadcastNoLoad {
  static const bool kEnable = false;
  static const bool kIsRow = false;  // one value for each column, whatever the row
  using Fragment = typename ds4s::MapFragment<ThreadMap, scalar_t>::Type;

  CUTLASS_DEVICE static void load(Fragment&, scalar_t*, int, const cutlass::MatrixCoord&, int64_t) {}
  CUTLASS_DEVICE static scalar_t* advance(scalar_t* ptr, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t) {
    return ptr;
  }
};

template <typename ThreadMap, typename Shape, typename scalar_t>
struct BroadcastA : public BroadcastNoLoad<ThreadMap, Shape, scalar_t> {
  static const bool kEnable = true;
  static const bool kIsRow = true;
  using layout = cutlass::layout::AffineRank2RowMajor;
  using Fragment = typename BroadcastNoLoad<ThreadMap, Shape, scalar_t>::Fragment;

  // stride belongs to the common interface; the rows of the tile are one row of memory.
  CUTLASS_DEVICE static void load(Fragment& frag, scalar_t* ptr, int thread_id, const cutlass::MatrixCoord& extent,
                                  int64_t /*stride*/) {
    ds4s::load_tile<ThreadMap>(frag, ptr, thread_id, extent, 0);
  }
  CUTLASS_DEVICE static scalar_t* advance(scalar_t* ptr, int64_t B_id, int64_t N_id, int64_t /*H_id*/, int64_t strideB,
                                          int64_t strideN, int64_t /*strideH*/) {
    return ptr + B_id * strideB + N_id * strideN;
  }
};

template <typename ThreadMap, typename Shape, typename scalar_t>
struct BroadcastB : public BroadcastNoLoad<ThreadMap, Shape, scalar_t> {
  static const bool kEnable = true;
  using layout = cutlass::layout::RowMajor;
  using Fragment = typename BroadcastNoLoad<ThreadMap, Shape, scalar_t>::Fragment;

  CUTLASS_DEVICE static void load(Fragment& frag, scalar_t* ptr, int thread_id, const cutlass::MatrixCoord& extent,
                                  int64_t stride) {
    ds4s::load_tile<ThreadMap>(frag, ptr, thread_id, extent, stride);
  }
  CUTLASS_DEVICE static scalar_t* advance(scalar_t* ptr, int64_t B_id, int64_t /*N_id*/, int64_t H_id, int64_t strideB,
                                          int64_t /*strideN*/, int64_t strideH) {
    return ptr + B_id * strideB + H_id * strideH;
  }
};

namespace ds4s {

// kThreads threads sweep a kRow x kColumn tile, kElementsPerAccess_ neighbours each.
template <typename Shape, int kThreads, int kElementsPerAccess_>
struct SweepThreadMap {
  static constexpr int kElementsPerAccess = kElementsPerAccess_;
  static constexpr int kThreadsPerRow = Shape::kColumn / kElementsPerAccess;
  static constexpr int kRowsPerPass = kThreads / kThreadsPerRow;
  static_assert(Shape::kColumn % kElementsPerAccess == 0, "a row is a whole number of accesses");
  static_assert(kThreads % kThreadsPerRow == 0 && Shape::kRow % kRowsPerPass == 0, "the sweep covers the tile exactly");
  struct Iterations {
    static constexpr int kContiguous = 1;
    static constexpr int kStrided = Shape::kRow / kRowsPerPass;
    static constexpr int kCount = kStrided;
  };
  struct Delta {
    static constexpr int kContiguous = 0;
    static constexpr int kStrided = kRowsPerPass;
  };
  CUTLASS_DEVICE static cutlass::PitchLinearCoord initial_offset(int thread) {
    return {thread % kThreadsPerRow * kElementsPerAccess, thread / kThreadsPerRow};
  }
};

// One element of a row; the thread passes its index as thread id.
struct RowThreadMap {
  static constexpr int kElementsPerAccess = 1;
  static constexpr bool kKeepsBits = true;
  CUTLASS_DEVICE static cutlass::PitchLinearCoord initial_offset(int index) { return {index, 0}; }
};

// The accumulator's own layout (sm80/mma/mma.h): a lane reads the elements that it adds to its scores. Warps are
// numbered along the queries first.
template <typename Mma, int kWarpsM, bool kAligned_>
struct ScoreThreadMap {
  static constexpr int kElementsPerAccess = Mma::kVec;
  static constexpr bool kAligned = kAligned_;
  struct Iterations {
    static constexpr int kContiguous = Mma::kGroups;
    static constexpr int kStrided = Mma::kLaneRows;
    static constexpr int kCount = kContiguous * kStrided;
  };
  struct Delta {
    static constexpr int kContiguous = Mma::kGroupStep;
    static constexpr int kStrided = Mma::kRowStep;
  };
  CUTLASS_DEVICE static cutlass::PitchLinearCoord initial_offset(int thread) {
    int lane = thread & 31, warp = thread >> 5;
    return {warp / kWarpsM * 32 + Mma::first_column(lane), warp % kWarpsM * 32 + Mma::row_of_lane(lane)};
  }
};

}  // namespace ds4s

// ref[row][column] = bias1 - shift1 + bias2 over a tile; elements outside the extent count as 0. The caller
// synchronises.
template <typename Shape, typename scalar_t, int kThreads, template <typename, typename, typename> class Broadcast1_,
          template <typename, typename, typename> class Broadcast2_>
struct AttentionBiasEpilogue {
  static constexpr int kWanted = Shape::kCount / kThreads;  // elements a thread
  static constexpr int kElementsPerAccess = kWanted < 16 / int(sizeof(scalar_t)) ? kWanted : 16 / int(sizeof(scalar_t));
  using ThreadMap = ds4s::SweepThreadMap<Shape, kThreads, kElementsPerAccess>;
  using Broadcast1 = Broadcast1_<ThreadMap, Shape, scalar_t>;
  using Broadcast2 = Broadcast2_<ThreadMap, Shape, scalar_t>;
  using Ref = cutlass::TensorRef<float, cutlass::layout::RowMajor>;

  // stride: elements between the rows of a matrix bias.
  CUTLASS_DEVICE void operator()(const Ref& ref, scalar_t* ptr1, scalar_t* ptr2, int thread_id,
                                 const cutlass::MatrixCoord& extent, int64_t stride, float shift1 = 0.f) {
    typename Broadcast1::Fragment frag1;
    typename Broadcast2::Fragment frag2;
    frag1.clear();
    frag2.clear();
    Broadcast1::load(frag1, ptr1, thread_id, extent, stride);
    Broadcast2::load(frag2, ptr2, thread_id, extent, stride);
    auto start = ThreadMap::initial_offset(thread_id);
    CUTLASS_PRAGMA_UNROLL
    for (int s = 0; s < ThreadMap::Iterations::kStrided; ++s) {
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < kElementsPerAccess; ++e) {
        int i = s * kElementsPerAccess + e;
        float sum = 0;
        if constexpr (Broadcast1::kEnable) sum += float(frag1[i]) - shift1;
        if constexpr (Broadcast2::kEnable) sum += float(frag2[i]);
        ref.at({start.strided() + s * ThreadMap::Delta::kStrided, start.contiguous() + e}) = sum;
      }
    }
  }
};
