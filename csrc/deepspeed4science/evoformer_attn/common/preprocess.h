// The kernels before a backward's gradients, which compute common inputs in the form that is cheapest to read, and the
// one after them, which sums parts.
//
//   prepare_rows     -delta, math.md (9); in full precision sm80/backward/statistics.h instead
//   copy_bias2       bias2 with rows aligned to 16 bytes, and its transpose for the kernels that own keys
//   sum_parts        dbias1 over heads, math.md (15), and dbias2 over slices, math.md (16), in a fixed order
//
// The hidden keys and the shift of bias1 come from common/key_mask.h.
#pragma once

#include <cutlass/array.h>

#include "common/backward_args.h"

namespace ds4s {

constexpr int kPrepareThreads = 128;

// 16 bytes of a row, from element kVec * chunk on; 0 past its end.
template <typename Config, typename scalar_t = typename Config::scalar_t>
CUTLASS_DEVICE auto load_share(const scalar_t* row, int count, int chunk) {
  constexpr int kVec = 16 / int(sizeof(scalar_t));
  cutlass::AlignedArray<scalar_t, kVec> x;
  if constexpr (Config::kAligned) {
    x.clear();
    if (chunk * kVec < count) x = *reinterpret_cast<const cutlass::AlignedArray<scalar_t, kVec>*>(row + chunk * kVec);
  } else {
    CUTLASS_PRAGMA_UNROLL
    for (int e = 0; e < kVec; ++e) x[e] = chunk * kVec + e < count ? row[chunk * kVec + e] : scalar_t(0);
  }
  return x;
}

// The sum of products of two such parts, x from o and y from do. With TF32, y is rounded as matrix products round it.
template <typename Config, typename Share>
CUTLASS_DEVICE float dot_share(const Share& x, const Share& y) {
  auto operand = [](float a) { return Config::kTf32 ? __uint_as_float(ptx::to_tf32(a)) : a; };
  float sum = 0.f;
  CUTLASS_PRAGMA_UNROLL
  for (int e = 0; e < Share::kElements; ++e) {
    sum = fmaf(float(x[e]), operand(float(y[e])), sum);
  }
  return sum;
}

// kGroup lanes for each (query, head); a block has those of one (b, n).
template <typename Config>
struct PrepareRows {
  using scalar_t = typename Config::scalar_t;
  static constexpr int kChunks = Config::kHeadDim * int(sizeof(scalar_t)) / 16;
  static constexpr int kGroup = kChunks > 16 ? 32 : kChunks > 8 ? 16 : kChunks > 4 ? 8 : kChunks > 2 ? 4 : 2;
  using Share = cutlass::AlignedArray<scalar_t, 16 / int(sizeof(scalar_t))>;
  static_assert(kGroup >= kChunks, "a lane has one part of a row");
  static constexpr int kRowsAtOnce = kPrepareThreads / kGroup;
  static constexpr int kRowsPerGroup = 4;  // rows of a group, whose loads are in flight together
  static constexpr int kRowsPerBlock = kRowsPerGroup * kRowsAtOnce;

  CUTLASS_DEVICE static float reduce(float x) {
    CUTLASS_PRAGMA_UNROLL
    for (int mask = kGroup / 2; mask > 0; mask /= 2) x += ptx::shfl_xor(x, mask);
    return x;
  }

  // Rows are pairs of a query and a head, heads innermost; the next row is found without a division.
  struct Row {
    uint32_t q, h;
    CUTLASS_DEVICE Row() : q(0), h(0) {}
    CUTLASS_DEVICE Row(uint32_t index, uint32_t H) : q(index / H), h(index - q * H) {}
    // Returns whether q has grown by step.q + 1, not by step.q.
    CUTLASS_DEVICE bool advance(const Row& step, uint32_t H) {
      q += step.q, h += step.h;
      if (h < H) return false;
      h -= H, ++q;
      return true;
    }
  };

  // This lane's share of a row of a matrix, from row to row.
  class RowShare {
   public:
    CUTLASS_DEVICE RowShare(const void* matrix, const int64_t (&stride)[4], int64_t b, int64_t n, const Row& row,
                            const Row& step, uint32_t H)
        : at_(element<const scalar_t>(matrix, stride, b, n, row.q, row.h) + first_element()),
          step_(step.q * stride[2] + step.h * stride[3]),
          next_query_(stride[2] - H * stride[3]) {}
    // 0 unless the row exists.
    CUTLASS_DEVICE Share load(int count) const { return load_share<Config>(at_, count - first_element(), 0); }
    // next_query: what Row::advance has returned for the same step.
    CUTLASS_DEVICE void advance(bool next_query) { at_ += step_ + (next_query ? next_query_ : 0); }

   private:
    CUTLASS_DEVICE static int first_element() { return int(threadIdx.x) % kGroup * Share::kElements; }
    const scalar_t* at_;
    const int64_t step_, next_query_;
  };

  // Sums over a group's lanes, of kRowsPerGroup rows at once: each lane ends with the sums of kRowsPerLane rows, from
  // row first_of_lane() on. Groups of more than kRowsPerGroup lanes have each sum kCopies times.
  static constexpr int kRowsPerLane = kGroup < kRowsPerGroup ? kRowsPerGroup / kGroup : 1;
  static constexpr int kCopies = kGroup * kRowsPerLane / kRowsPerGroup;
  CUTLASS_DEVICE static int first_of_lane() { return int(threadIdx.x) % kGroup / kCopies * kRowsPerLane; }
  CUTLASS_DEVICE static void reduce_rows(float (&x)[kRowsPerGroup]) {
    int rows = kRowsPerGroup;
    CUTLASS_PRAGMA_UNROLL
    for (int mask = kGroup / 2; mask > 0; mask /= 2) {
      if (rows == 1) {
        x[0] += ptx::shfl_xor(x[0], mask);
        continue;
      }
      rows /= 2;
      const bool upper = (threadIdx.x & mask) != 0;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < rows; ++i) {
        const float kept = upper ? x[rows + i] : x[i], given = upper ? x[i] : x[rows + i];
        x[i] = kept + ptx::shfl_xor(given, mask);
      }
    }
  }

  // negative_delta: [B, N, H, Lq]; null: stored in dq. It is 0 where the row n sees nothing, whatever o and do_ hold.
  // kLooks: find_visible_keys has not run, so this kernel reads bias1 itself. early: it may still run, and this
  // waits for its end once o and do_ are being loaded.
  template <bool kLooks = false>
  CUTLASS_DEVICE static void run(const BackwardInputs& args, float* negative_delta, uint32_t block,
                                 PostprocessFlag flag, bool early = false) {
    const BwdParams& p = args.p;
    uint32_t H = uint32_t(p.H), num_rows = uint32_t(p.Lq) * H;
    uint32_t blocks = (num_rows + kRowsPerBlock - 1) / kRowsPerBlock;
    int64_t bn = block / blocks, b = uint32_t(bn) / uint32_t(p.N), n = bn - b * p.N;
    const Row first((block - uint32_t(bn) * blocks) * kRowsPerBlock + threadIdx.x / kGroup, H), step(kRowsAtOnce, H);
    bool unseen = !kLooks && !early && args.mask.sees_nothing_now(bn);

    Share o[kRowsPerGroup], do_[kRowsPerGroup];
    Row of_lane[kRowsPerLane];
    {
      Row row = first;
      RowShare of_o(p.o, p.o_stride, b, n, row, step, H), of_do(p.do_, p.do_stride, b, n, row, step, H);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRowsPerGroup; ++i) {
        const int count = row.q < p.Lq && !unseen ? int(p.Dv) : 0;
        o[i] = of_o.load(count), do_[i] = of_do.load(count);
        if (i / kRowsPerLane == first_of_lane() / kRowsPerLane) of_lane[i % kRowsPerLane] = row;
        const bool next_query = row.advance(step, H);
        of_o.advance(next_query), of_do.advance(next_query);
      }
    }
    if constexpr (kLooks) unseen = sees_nothing<scalar_t, kPrepareThreads>(p, b, n);  // while those loads are in flight
    if (early) {
      ptx::wait_for_kernel_before();
      unseen = args.mask.sees_nothing_now(bn);
    }
    float delta[kRowsPerGroup];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRowsPerGroup; ++i) delta[i] = dot_share<Config>(o[i], do_[i]);
    reduce_rows(delta);
    if (threadIdx.x % kCopies != 0) return;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRowsPerLane; ++i) {
      const Row& mine = of_lane[i];
      if (mine.q >= p.Lq) continue;
      store(args, negative_delta, bn, b, n, mine, unseen ? 0.f : delta[i]);
      // O of a query that sees nothing is 0, so where delta is 0, its lse must be looked at.
      if (unseen || fabsf(delta[i]) > 0.f) continue;
      if (p.lse[(bn * p.H + mine.h) * p.Lq + mine.q] == -infinity()) flag.raise();
    }
  }

 private:
  CUTLASS_DEVICE static void store(const BackwardInputs& args, float* negative_delta, int64_t bn, int64_t b, int64_t n,
                                   const Row& row, float delta) {
    if (negative_delta) {
      negative_delta[(bn * args.p.H + row.h) * args.p.Lq + row.q] = -delta;
    } else {
      *DeltaInDq<scalar_t>(args.p, b, n, row.h).at(row.q) = -delta;
    }
  }
};

// Eight resident blocks. Without this number ptxas limits itself to 48 registers and does not keep the loads of a
// group's rows in flight together.
template <typename Config>
__global__ void __launch_bounds__(kPrepareThreads, 8)
    prepare_rows(const __grid_constant__ BackwardInputs args, float* negative_delta, PostprocessFlag flag) {
  ptx::wait_for_kernel_before();
  PrepareRows<Config>::run(args, negative_delta, blockIdx.x, flag);
}

// 32 x 32 tiles of bias2 [nb, nh, Lq, Lk] into rows of pitch elements (if rows is given) and, transposed, into rows of
// pitch_t, or into tiles (kTiles), which lie like those of BiasRows::tiles; these fill pitch_t. Past the ends: zeros.
template <typename scalar_t, bool kTiles>
__global__ void __launch_bounds__(kPrepareThreads)
    copy_bias2(const __grid_constant__ BackwardInputs args, int64_t nh, scalar_t* rows, int64_t pitch,
               scalar_t* columns, int64_t pitch_t) {
  const BwdParams& p = args.p;
  __shared__ scalar_t sTile[32][33];
  uint32_t col_blocks = uint32_t(p.Lk + 31) / 32, row_blocks = uint32_t(kTiles ? pitch_t : p.Lq + 31) / 32;
  uint32_t rest = blockIdx.x / col_blocks;
  int64_t k0 = int64_t(blockIdx.x - rest * col_blocks) * 32;
  int64_t bh = rest / row_blocks, q0 = int64_t(rest - uint32_t(bh) * row_blocks) * 32;
  int64_t b = uint32_t(bh) / uint32_t(nh), h = bh - b * nh;
  const scalar_t* g = element<const scalar_t>(p.bias2, p.bias2_stride, b, h, q0, k0);
  int x = threadIdx.x % 32;

  for (int y = threadIdx.x / 32; y < 32; y += kPrepareThreads / 32) {
    bool exists = q0 + y < p.Lq && k0 + x < p.Lk;
    scalar_t value = exists ? g[y * p.bias2_stride[2] + x * p.bias2_stride[3]] : scalar_t(0);
    sTile[y][x] = value;
    if (rows && q0 + y < p.Lq && k0 + x < pitch) rows[(bh * p.Lq + q0 + y) * pitch + k0 + x] = value;
  }
  __syncthreads();
  if (!columns) return;
  if (kTiles) columns += bh * ((p.Lk + 31) / 32 * 32) * pitch_t + k0 * pitch_t + q0 * 32;
  for (int y = threadIdx.x / 32; y < 32; y += kPrepareThreads / 32) {
    if (kTiles) {
      columns[y * 32 + x] = sTile[x][y];
    } else if (k0 + y < p.Lk && q0 + x < pitch_t) {
      columns[(bh * p.Lk + k0 + y) * pitch_t + q0 + x] = sTile[x][y];
    }
  }
}

// Copies the first rows and cols out of each of `count` matrices of padded_rows x padded_cols.
static __global__ void __launch_bounds__(kPrepareThreads)
    crop_rows(float* out, const float* padded, int64_t count, int64_t rows, int64_t cols, int64_t padded_rows,
              int64_t padded_cols) {
  for (int64_t row = blockIdx.x; row < count * rows; row += gridDim.x) {
    int64_t matrix = row / rows;
    const float* from = padded + (row + matrix * (padded_rows - rows)) * padded_cols;
    for (int64_t col = threadIdx.x; col < cols; col += kPrepareThreads) out[row * cols + col] = from[col];
  }
}

// out[i][j] = sum over s of parts[i][s][j], 0 <= j < inner.
static __global__ void __launch_bounds__(kPrepareThreads)
    sum_parts(float* out, const float* parts, int64_t outer, int64_t num_parts, int64_t inner) {
  int64_t total = outer * inner, step = int64_t(gridDim.x) * kPrepareThreads;
  for (int64_t x = int64_t(blockIdx.x) * kPrepareThreads + threadIdx.x; x < total; x += step) {
    int64_t i = outer == 1 ? 0 : x / inner;
    const float* part = parts + i * num_parts * inner + (x - i * inner);
    float sum = 0.f;
    for (int64_t s = 0; s < num_parts; ++s) sum += part[s * inner];
    out[x] = sum;
  }
}

}  // namespace ds4s
