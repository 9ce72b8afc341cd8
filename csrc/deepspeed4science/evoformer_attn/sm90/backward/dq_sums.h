// The elements of dq_global.h's accumulators: float16 times a factor (dq_range.h) for bfloat16 operands, float32 for
// float16 operands. Float16 sums have three bits more than dq in bfloat16, but no more than dq in float16: if keys have
// a large vector in common, which cancels in the sum over all keys but not in those over 128, these would break the
// error law.
//
// The elements lie in the order of dq^T = K^T dS^T in the registers of wgmma: vectors of 16 bytes, one for each thread
// of a warpgroup, and then the next vector of each. A warp has 16 of 64 columns of dq.
#pragma once

#include <cute/numeric/numeric_types.hpp>

#include "common/atomic_add.h"
#include "sm90/backward/args.h"
#include "sm90/mma/pipeline.h"

namespace ds4s::sm90 {

// Which warps have columns that exist.
template <typename Config>
struct DqColumns {
  static constexpr bool kHasAll = Config::kHeadDim % 64 == 0;  // D <= 48: the last warp's do not exist
  CUTLASS_DEVICE static constexpr bool has_warp(int warp) { return kHasAll || 16 * warp < Config::kHeadDim; }
};

template <typename Config>
struct HalfDqSums {
  using scalar_t = typename Config::scalar_t;
  using Columns = DqColumns<Config>;
  static constexpr int kPerVector = 8;

  // Adds a thread's share to its vectors.
  template <int kCount>
  CUTLASS_DEVICE static void add(uint4* to, const float (&sum)[kCount], float factor) {
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < kCount; x += 8) {
      uint32_t halves[4];
      CUTLASS_PRAGMA_UNROLL
      for (int y = 0; y < 4; ++y)
        halves[y] = ptx::pack<cutlass::half_t>(sum[x + 2 * y] * factor, sum[x + 2 * y + 1] * factor);
      atomic_add_halves(to + 16 * x, halves);
    }
  }

  // Writes 16 queries of 64 columns, by one warp, from a stage in shared memory.
  class Writer {
   public:
    CUTLASS_DEVICE explicit Writer(float scale) {}
    // scale: of the sums.
    CUTLASS_DEVICE void set_scale(float scale) { scale_ = scale; }
    CUTLASS_DEVICE void begin_tile() { largest_ = 0; }

    // Of a lane: two neighbouring queries of 16, eight columns of 32.
    CUTLASS_DEVICE static int query_of(int lane) { return lane / 4 * 2; }
    CUTLASS_DEVICE static int column_of(int lane) { return lane % 4 * 8; }
    CUTLASS_DEVICE static constexpr bool has(int vector) { return Columns::has_warp(vector / 32); }
    // Where a lane's vector lies in a stage: every second warp's lanes are exchanged, for eight_columns.
    CUTLASS_DEVICE static int position(int vector, int lane) { return vector + (vector % 64 == 0 ? lane : lane ^ 4); }
    // rows: this lane's first element; columns: the number of columns from there on.
    CUTLASS_DEVICE void write(scalar_t* rows, const uint4* stage, const TensorView<5>& dq, int query, int columns,
                              int lane) {
      CUTLASS_PRAGMA_UNROLL
      for (int y = 0; y < 2; ++y) {  // 32 columns each
        uint4 eights[2];             // both are made before any store, which may be predicated off
        const bool has_columns = Columns::kHasAll || 32 * y + column_of(lane) < Config::kHeadDim;
        eight_columns(eights, stage + 64 * y, has_columns, lane);
        CUTLASS_PRAGMA_UNROLL
        for (int e = 0; e < 2; ++e) {
          const bool exists = has_columns && query + query_of(lane) + e < dq.size[1];
          store_eight(rows + e * dq.stride[1] + 32 * y, eights[e], exists ? columns - 32 * y : 0);
        }
      }
    }
    CUTLASS_DEVICE void end() {
      largest_ = __reduce_max_sync(0xffffffffu, max(largest_ >> 16 & 0x7fff, largest_ & 0x7fff));
    }
    // The largest sum since begin_tile, as bits of float16.
    CUTLASS_DEVICE uint32_t largest() const { return largest_; }

   private:
    // A lane's eight neighbours of two rows, out of 16 queries by 32 columns of two warps. A word has a column of two
    // queries, and eight words of a lane lie 16 apart: those of the second warp in another order, which avoids bank
    // conflicts.
    CUTLASS_DEVICE void eight_columns(uint4 (&eights)[2], const uint4* sums, bool has_columns, int lane) {
      const int second = lane / 2 % 2;
      const uint32_t* x =
          reinterpret_cast<const uint32_t*>(sums) + 128 * second + lane / 4 % 4 * 4 + lane / 16 * 2 + lane % 2;
      uint32_t pairs[2][4];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const uint32_t even = x[32 * i + 16 * second], odd = x[32 * i + 16 - 16 * second];
        if (has_columns) largest_ = ptx::max_of_sizes(ptx::max_of_sizes(largest_, even), odd);
        const float2 a = ptx::unpack<cutlass::half_t>(even), b = ptx::unpack<cutlass::half_t>(odd);
        pairs[0][i] = scaled(a.x, b.x), pairs[1][i] = scaled(a.y, b.y);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < 2; ++e) eights[e] = make_uint4(pairs[e][0], pairs[e][1], pairs[e][2], pairs[e][3]);
    }
    // Times a power of two. bfloat16 has its range, so that rounding may come first.
    CUTLASS_DEVICE uint32_t scaled(float x, float y) const {
      return ptx::scale_word<scalar_t>(ptx::pack<scalar_t>(x, y), scale_);
    }

    float scale_ = 1.f;
    uint32_t largest_ = 0;
  };
};

template <typename Config>
struct FloatDqSums {
  using scalar_t = typename Config::scalar_t;
  using Columns = DqColumns<Config>;
  static constexpr int kPerVector = 4;

  template <int kCount>
  CUTLASS_DEVICE static void add(uint4* to, const float (&sum)[kCount], float /*factor*/) {
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < kCount; x += 4) atomic_add_vector(reinterpret_cast<float*>(to + 32 * x), sum + x);
  }

  class Writer {
   public:
    CUTLASS_DEVICE explicit Writer(float scale) : scale_(scale) {}

    // Of a lane: a query of eight, eight columns of 32.
    CUTLASS_DEVICE static int query_of(int lane) { return lane % 16 / 4 * 2 + lane % 2; }
    CUTLASS_DEVICE static int column_of(int lane) { return lane / 16 * 16 + lane % 4 / 2 * 8; }
    CUTLASS_DEVICE static constexpr bool has(int vector) { return Columns::has_warp(vector / 32 % 4); }
    CUTLASS_DEVICE static int position(int vector, int lane) { return vector + lane; }
    CUTLASS_DEVICE void write(scalar_t* rows, const uint4* stage, const TensorView<5>& dq, int query, int columns,
                              int lane) const {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < 2; ++j) {  // 8 queries each
        uint4 eights[2];             // both are made before any store, which may be predicated off
        CUTLASS_PRAGMA_UNROLL
        for (int y = 0; y < 2; ++y) eights[y] = eight_columns(stage + 128 * j + 64 * y, lane);
        const bool exists = query + 8 * j + query_of(lane) < dq.size[1];
        CUTLASS_PRAGMA_UNROLL
        for (int y = 0; y < 2; ++y) {
          store_eight(rows + 8 * j * dq.stride[1] + 32 * y, eights[y], exists ? columns - 32 * y : 0);
        }
      }
    }
    CUTLASS_DEVICE void end() const {}

   private:
    // A lane's eight neighbours of a row, out of 8 queries by 32 columns of two warps. Half of the lanes read each two
    // neighbours in reverse, which avoids bank conflicts.
    CUTLASS_DEVICE uint4 eight_columns(const uint4* sums, int lane) const {
      const int second = lane / 16;
      const float* x = reinterpret_cast<const float*>(sums) + 128 * second + lane % 16;
      uint32_t pairs[4];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4; ++i) {
        uint32_t pair = ptx::pack<scalar_t>(x[16 * (2 * i + second)] * scale_, x[16 * (2 * i + 1 - second)] * scale_);
        pairs[i] = __byte_perm(pair, 0, second ? 0x1032 : 0x3210);
      }
      return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }

    const float scale_;
  };
};

template <typename Config>
using DqSums = cute::conditional_t<Config::kHalfDqSums, HalfDqSums<Config>, FloatDqSums<Config>>;

}  // namespace ds4s::sm90
