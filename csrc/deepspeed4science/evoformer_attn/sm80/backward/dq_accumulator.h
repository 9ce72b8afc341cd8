// dq, math.md (13), in the fused kernel, where the order of additions may vary: every block of keys adds its share of
// dq to a float32 accumulator that stays in L2 (dq_product.h), and the last block of a pair (b n, h) writes dq.
// dq_accumulator_pool.h assigns accumulators to pairs.
//
// Invariants (docs/kernels/dq-accumulators.md has a diagram, and why waiting ends):
//   S1  A block draws its number when it begins, so all blocks with smaller numbers have begun.
//   S2  Only blocks with a visible key add and count. A pair is done when as many blocks have counted as its keys have
//       such blocks; the last one writes dq. A pair whose row n sees nothing has no accumulator and announces that.
//   S3  A pair adds to its accumulator when the previous pair with the same accumulator is done. All blocks of that
//       pair have smaller numbers, so waiting ends on any number of multiprocessors.
//   S4  Accumulators may lie in the memory of dk and dv of the last rows n, their hosts. The pairs of a host use no
//       accumulators in their own group of rows n or before it, and write dk and dv when all earlier pairs are done.
#pragma once

#include "sm80/backward/dq_accumulator_pool.h"
#include "sm80/backward/score_tile.h"

namespace ds4s {

template <typename Config>
struct OrderedDqAdd {
  using scalar_t = typename Config::scalar_t;
  const DqAccumulatorPool& pool;
  uint32_t pair;

  CUTLASS_DEVICE static uint32_t draw(const DqAccumulatorPool& pool, char* shared) {
    uint32_t* sNumber = reinterpret_cast<uint32_t*>(shared);
    if (threadIdx.x == 0) *sNumber = atomicAdd(pool.ticket, 1u);
    __syncthreads();
    uint32_t number = uniform(*sNumber);
    __syncthreads();
    return number;
  }
  // Waits until the accumulator is free; first_before = before(pair) is the pair that had it before. Called by one
  // thread, before a barrier that precedes the first addition.
  CUTLASS_DEVICE void wait(int32_t first_before) const { wait_for(first_before); }
  // Waits until no accumulator in the memory of dk or dv is in use. Called by all threads before dk or dv is written.
  CUTLASS_DEVICE void wait_for_hosted() const {
    const int group = pool.group_of(pair);
    if (group == 0) return;
    const uint32_t first = pool.groups[group].first_pair;
    // Pairs whose accumulator may lie in the memory of dk or dv.
    const uint32_t num = pool.groups[0].count + first - pool.groups[1].first_pair;
    for (uint32_t x = threadIdx.x; x < num; x += Config::kThreads) wait_for(int32_t(first - 1 - x));
    __syncthreads();
  }

  // Called after the last addition: the last block of a pair writes dq and leaves zeros. num_blocks: blocks that add.
  CUTLASS_DEVICE void finish(const BwdParams& p, scalar_t* gDq, float* accumulator, char* shared,
                             int num_blocks) const {
    if (!is_last(shared, num_blocks)) return;
    write_dq(p, gDq, accumulator);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) ptx::store_release(pool.progress + pair, DqAccumulatorPool::kDone);
  }
  // Called by one block of a pair whose row n sees nothing.
  CUTLASS_DEVICE void announce_nothing() const {
    if (threadIdx.x == 0) ptx::store_release(pool.progress + pair, DqAccumulatorPool::kSeesNothing);
  }

 private:
  // Waits until pair `other` is done. If it sees nothing, waits for the previous pair with the same accumulator
  // instead.
  CUTLASS_DEVICE void wait_for(int32_t other) const {
    while (other >= 0) {
      const int32_t state = ptx::load_acquire(pool.progress + other);
      if (state == DqAccumulatorPool::kDone) return;
      if (state == DqAccumulatorPool::kSeesNothing) other = pool.before(uint32_t(other));
    }
  }
  CUTLASS_DEVICE bool is_last(char* shared, int num_blocks) const {
    int32_t* sIsLast = reinterpret_cast<int32_t*>(shared);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) *sIsLast = atomicAdd(pool.progress + pair, 1) == num_blocks - 1;
    __syncthreads();
    bool last = *sIsLast != 0;
    if (last) __threadfence();
    return last;
  }
  // A thread writes eight channels of queries q and q + 8 at a time: four pieces of 16 bytes.
  CUTLASS_DEVICE static void write_dq(const BwdParams& p, scalar_t* gDq, float* accumulator) {
    using Layout = DqAccumulatorLayout<Config::kHeadDim>;
    constexpr int kTiles = Config::kHeadDim / 8, kAtATime = 4, kPieces = 4;
    const int num_shares = (int(p.Lq) + Layout::kRows - 1) / Layout::kRows * kTiles * 8;
    float4* pieces = reinterpret_cast<float4*>(accumulator);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int first = int(threadIdx.x); first < num_shares; first += kAtATime * Config::kThreads) {
      float4 x[kAtATime][kPieces];
      CUTLASS_PRAGMA_UNROLL
      for (int y = 0; y < kAtATime; ++y) {
        const int share = min(first + y * Config::kThreads, num_shares - 1);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kPieces; ++i) x[y][i] = __ldcg(pieces + kPieces * share + i);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int y = 0; y < kAtATime; ++y) {
        const int share = first + y * Config::kThreads, tile = share / 8;
        const int q = tile / kTiles * Layout::kRows + share % 8, channel = tile % kTiles * 8;
        if (share >= num_shares) break;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kPieces; ++i) pieces[kPieces * share + i] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (channel >= p.D) continue;
        auto pack = [&](float a, float b) { return ptx::pack<scalar_t>(p.scale * a, p.scale * b); };
        auto store = [&](int row, uint4 channels) {
          if (row < int(p.Lq)) *reinterpret_cast<uint4*>(gDq + row * p.dq_stride[2] + channel) = channels;
        };
        store(q, make_uint4(pack(x[y][0].x, x[y][0].y), pack(x[y][1].x, x[y][1].y), pack(x[y][2].x, x[y][2].y),
                            pack(x[y][3].x, x[y][3].y)));
        store(q + 8, make_uint4(pack(x[y][0].z, x[y][0].w), pack(x[y][1].z, x[y][1].w), pack(x[y][2].z, x[y][2].w),
                                pack(x[y][3].z, x[y][3].w)));
      }
    }
  }
};

}  // namespace ds4s
