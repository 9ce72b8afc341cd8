// dq, math.md (13), in the fused kernel, where the order of additions may vary: every block of keys adds its share of
// dq to a float32 accumulator that stays in L2 (dq_product.h), and the last block of a pair (b n, h) writes dq.
// dq_accumulator_pool.h assigns accumulators to pairs.
//
// Invariants (docs/kernels/dq-accumulators.md has a diagram, and why waiting ends):
//   S1  A block draws its number when it begins, so all blocks with smaller numbers have begun.
//   S2  Only blocks with a visible key add. All but the last one count when they have added; the last one waits for
//       these counts, writes dq, and then the pair is done. A pair whose row n sees nothing has no accumulator and
//       announces that.
//   S3  A pair adds to its accumulator when the previous pair with the same accumulator is done. All blocks of that
//       pair have smaller numbers, so waiting ends on any number of multiprocessors.
//   S4  Accumulators may lie in the memory of dk and dv of the last rows n, their hosts. The pairs of a host use no
//       accumulators in their own group of rows n or before it, and write dk and dv when the last pair of each
//       accumulator in that row n is done.
#pragma once

#include "sm80/backward/dq_accumulator_pool.h"
#include "sm80/backward/gradient_rows.h"
#include "sm80/backward/score_tile.h"

namespace ds4s {

template <typename Config>
struct OrderedDqAdd {
  using scalar_t = typename Config::scalar_t;
  const DqAccumulatorPool& pool;
  uint32_t pair;

  // shared: 4 bytes that are not written before the next barrier.
  CUTLASS_DEVICE static uint32_t draw(const DqAccumulatorPool& pool, char* shared) {
    uint32_t* sNumber = reinterpret_cast<uint32_t*>(shared);
    if (threadIdx.x == 0) *sNumber = atomicAdd(pool.ticket, 1u);
    __syncthreads();
    return uniform(*sNumber);
  }
  // Waits until pair `other` is done. If it sees nothing, waits for the previous pair with the same accumulator
  // instead. The accumulator is free when before(pair) is done: one thread waits for that, before a barrier that
  // precedes the first addition.
  CUTLASS_DEVICE void wait_for(int32_t other) const {
    while (other >= 0) {
      const int32_t state = ptx::load_acquire(pool.progress + other);
      if (state == DqAccumulatorPool::kDone) return;
      if (state == DqAccumulatorPool::kSeesNothing) other = pool.before(uint32_t(other));
    }
  }
  // Waits until no accumulator in dk or dv of row n, b n = row, is in use. Called by all threads before these are
  // written.
  CUTLASS_DEVICE void wait_for_hosted(uint32_t row) const {
    const int group = pool.group_of(pair);
    if (group > 0) wait_for_hosted(pool, group, row);
  }

  // Called after the block's last addition to dq: counts the block, unless it is the last one that adds. Only thread 0
  // waits for the additions, while the other warps go on. It does not read the count, which would take as long again.
  // num_others: DqOutputs.
  CUTLASS_DEVICE void count(int num_others) const {
    __syncthreads();
    if (num_others < 0 && threadIdx.x == 0) ptx::add_release(pool.progress + pair, 1);
  }
  // Called after count(): the last block that adds waits for the others, writes dq and leaves zeros.
  CUTLASS_DEVICE void finish(const BwdParams& p, scalar_t* gDq, float* accumulator, int num_others) const {
    if (num_others < 0) return;
    if (threadIdx.x == 0) {  // without the pauses of ptx::wait_for: other blocks wait for the accumulator
      while (ptx::load_acquire(pool.progress + pair) != num_others) {
      }
    }
    __syncthreads();
    write_dq(accumulator, p.scale, gDq, p.dq_stride[2], int(p.Lq), int(p.D));
    __syncthreads();
    if (threadIdx.x == 0) ptx::store_release(pool.progress + pair, DqAccumulatorPool::kDone);
  }
  // Called by one block of a pair whose row n sees nothing.
  CUTLASS_DEVICE void announce_nothing() const {
    if (threadIdx.x == 0) ptx::store_release(pool.progress + pair, DqAccumulatorPool::kSeesNothing);
  }

 private:
  // The last pair of each accumulator has waited for those before. Not inlined: inlined it changes the register
  // allocation of the mainloop, 95 instructions more for a tile of queries at D = 64.
  __device__ __noinline__ static void wait_for_hosted(const DqAccumulatorPool& pool, int group, uint32_t row) {
    const auto dk = pool.hosted_in_dk(group, row), dv = pool.hosted_in_dv(group, row);
    for (uint32_t x = threadIdx.x; x < dk.count + dv.count; x += Config::kThreads) {
      const uint32_t index = x < dk.count ? dk.first + x : dv.first + (x - dk.count);
      OrderedDqAdd{pool, 0}.wait_for(pool.last_before(group, index));
    }
    __syncthreads();
  }
  // The pairs of tiles that a warp loads at a time while it writes dq. Blocks wait for the accumulator: with 4,
  // (1,256,1024,4,64) would take 1.04 of the time, and 1.18 with half of the keys hidden. With 16, D = 16 would
  // have no registers for a third block on a multiprocessor of 9.0.
  static constexpr int kAtATime = Config::kHeadDim < 32 ? 12 : 16;
  // Converts an accumulator to dq and leaves zeros. A warp takes two tiles of 16 queries x 8 channels at a time, from
  // neighbouring addresses. Not inlined: inlined it changes the register allocation of the mainloop, 52 instructions
  // more for a tile of queries at D = 64 and 28 at D = 48.
  __device__ __noinline__ static void write_dq(float* accumulator, float scale, scalar_t* gDq, int64_t stride,
                                               int num_queries, int channels) {
    using Layout = DqAccumulatorLayout<Config::kHeadDim>;
    constexpr int kPairs = Config::kHeadDim / 16;
    static_assert(Config::kHeadDim % 16 == 0, "whole pairs of tiles");
    // The warp's index is uniform, since all lanes must take part in the exchange.
    const int lane = int(threadIdx.x) % 32, quad_lane = lane & 3, warp = uniform(int(threadIdx.x) / 32);
    const int num_pairs = (num_queries + Layout::kRows - 1) / Layout::kRows * kPairs;
    float4* const pieces = reinterpret_cast<float4*>(accumulator) + lane;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int first = warp; first < num_pairs; first += kAtATime * Config::kWarps) {
      float4 x[kAtATime][2];
      CUTLASS_PRAGMA_UNROLL
      for (int y = 0; y < kAtATime; ++y) {
        const int pair = first + y * Config::kWarps;
        CUTLASS_PRAGMA_UNROLL
        for (int tile = 0; tile < 2; ++tile) {
          if (pair < num_pairs) x[y][tile] = __ldcg(pieces + 64 * pair + 32 * tile);
        }
      }
      CUTLASS_PRAGMA_UNROLL
      for (int y = 0; y < kAtATime; ++y) {
        const int pair = first + y * Config::kWarps;
        if (pair >= num_pairs) break;
        uint32_t words[4];  // of queries lane / 4 and lane / 4 + 8, in the first tile and in the second
        CUTLASS_PRAGMA_UNROLL
        for (int tile = 0; tile < 2; ++tile) {
          const float4 v = x[y][tile];
          pieces[64 * pair + 32 * tile] = make_float4(0.f, 0.f, 0.f, 0.f);
          words[2 * tile] = ptx::pack<scalar_t>(scale * v.x, scale * v.y);
          words[2 * tile + 1] = ptx::pack<scalar_t>(scale * v.z, scale * v.w);
        }
        const uint4 eight = transpose_4x4(words, quad_lane);
        const int q = pair / kPairs * Layout::kRows + lane / 4 + 8 * (quad_lane & 1);
        const int channel = pair % kPairs * 16 + 8 * (quad_lane >> 1);
        if (q < num_queries && channel < channels) *reinterpret_cast<uint4*>(gDq + q * stride + channel) = eight;
      }
    }
  }
};

}  // namespace ds4s
