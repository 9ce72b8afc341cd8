// dq inside of the pass over keys, where the order of additions may vary: every block of keys adds its share of dq to
// fp32 rows that stay in L2, and the last of a pair (b n, h) writes dq. The same tiles of dS give dbias2.
//
//   DsTile              dS of one column tile, 16 bits, [keys][queries] in shared memory: where warps hand it to one
//                       another
//   DqProduct           dq += dS K, dbias2 += dS, for 16 queries a warp and all keys of the block
//   DqAccumulatorPool   the fp32 rows
//   OrderedDqAdd        one block's part in it
//
// Invariants:
// 1. Blocks draw their numbers when they begin, so blocks of smaller numbers have begun.
// 2. Only blocks with a visible key add and count. A pair is done when as many have counted as its keys have such
//    blocks: the last one writes dq. A pair whose row n sees nothing never has an accumulator and says so.
// 3. A pair adds to its accumulator when the last pair before it that had the same one is done. All blocks of that one
//    have smaller numbers, so waiting ends however few multiprocessors there are.
// 4. Accumulators may lie in the memory of dk and dv of the last rows n, their hosts. The pairs of a host use the
//    workspace's accumulators only, and write dk and dv when all earlier pairs are done with theirs.
#pragma once

#include "common/atomic_add.h"
#include "sm80/backward/score_tile.h"

namespace ds4s {

struct DqAccumulatorPool {
  float* own;         // [num_own, padded_queries, kHeadDim], zeros where nobody adds
  float* in_dk;       // [num_in_dk, the same]
  float* in_dv;       // [num_accumulators - num_own - num_in_dk, the same]
  int32_t* progress;  // [B N H], in the order of the blocks: how many have added, or one of the two below
  uint32_t* ticket;   // the next block's number
  uint32_t num_own;   // at least kSideBySide: whose accumulator is waited for has all its blocks' numbers behind it
  uint32_t num_in_dk;
  uint32_t num_accumulators;
  uint32_t first_host;     // pair; a multiple of kSideBySide H, at least num_accumulators
  int32_t padded_queries;  // Lq and Lk in whole tiles: nothing is masked, for dS is 0 past the ends
  int32_t padded_keys;
  float* dbias2;  // [B, H, padded_queries, padded_keys]; null where it is not wanted

  static constexpr int32_t kDone = -1;         // dq is written, the accumulator zeros again
  static constexpr int32_t kSeesNothing = -2;  // the pair has no accumulator
};

// Where a block adds.
struct DqOutputs {
  float* accumulator;
  float* dbias2;  // query 0, the block's first key
  int64_t dbias2_pitch;
  int32_t num_keys;  // all visible ones are before this one
};

template <typename Config>
struct DsTile {
  using scalar_t = typename Config::scalar_t;
  using Mma = typename Config::Mma;
  static constexpr int kQueries = Config::kStreamed, kKeys = Config::kOwned;
  static constexpr int kBytes = kKeys * kQueries * int(sizeof(scalar_t));

  // The order in which 16 keys are contracted: a lane's are four neighbours.
  CUTLASS_HOST_DEVICE static constexpr int key_at(int half, int c) { return 4 * (c >> 1) + 2 * half + (c & 1); }

  // Chunks of eight queries. Neither the stores below nor ldmatrix of eight keys key_at(half, 0 .. 7) meet a bank
  // twice.
  CUTLASS_HOST_DEVICE static constexpr int swizzle(int key) { return (key & 1) << 2 | ((key >> 2) & 3); }
  CUTLASS_HOST_DEVICE static constexpr int offset(int key, int chunk) {
    static_assert(kQueries % 64 == 0, "the swizzle permutes eight chunks");
    return key * kQueries + (chunk ^ swizzle(key)) * 8;
  }

  // All queries of a warp's 32 keys.
  CUTLASS_DEVICE static void clear(scalar_t* sDs, int warp_row, int lane) {
    CUTLASS_PRAGMA_UNROLL
    for (int chunk = 0; chunk < kQueries / 8; ++chunk) {
      *reinterpret_cast<uint4*>(sDs + offset(warp_row + lane, chunk)) = make_uint4(0, 0, 0, 0);
    }
  }
  // A warp's 32 keys x 32 queries: the operands of both steps of from_scores.
  CUTLASS_DEVICE static void store(scalar_t* sDs, const typename Mma::FragA (&a)[2], int warp_row, int stripe,
                                   int lane) {
    CUTLASS_PRAGMA_UNROLL
    for (int slot = 0; slot < Mma::kSlots; ++slot) {
      int key = warp_row + Mma::kRowStep * slot + Mma::row_of_lane(lane), m = slot >> 1, x = slot & 1;
      *reinterpret_cast<uint4*>(sDs + offset(key, 4 * stripe + (lane & 3))) =
          make_uint4(a[0].r[m][x], a[0].r[m][x + 2], a[1].r[m][x], a[1].r[m][x + 2]);
    }
  }
};

template <typename Config>
struct DqProduct {
  using scalar_t = typename Config::scalar_t;
  using Ds = DsTile<Config>;
  using KTile = Tile<scalar_t, Config::kOwned, Config::kHeadDim>;
  static constexpr int kSteps = Config::kOwned / 16;
  static constexpr int kChunkSteps = 4;  // whose dS is in registers at a time
  static constexpr int kTiles = Config::kHeadDim / 8;
  static_assert(Ds::kQueries == 16 * Config::kWarps, "16 queries for each warp");
  static_assert(kSteps % kChunkSteps == 0 && kTiles % 2 == 0, "whole chunks and pairs");
  using FragDs = uint32_t[4];  // queries q, q + 8 of keys 0, 1 (mod 4), then of keys 2, 3

  // tile_q: the tile's first query.
  CUTLASS_DEVICE static void run(const scalar_t* sDs, const scalar_t* sK, const DqOutputs& where, int tile_q) {
    DqOutputs outputs = where;
    int warp = int(uniform(threadIdx.x / 32)), lane = threadIdx.x % 32;
    // This lane's part of the addresses that it names to ldmatrix.
    sDs += Ds::offset(Ds::key_at(lane >> 4, lane & 7), 2 * warp + ((lane >> 3) & 1));
    sK += KTile::offset(Ds::key_at((lane >> 3) & 1, lane & 7), 8 * (lane >> 4));
    int q = tile_q + 16 * warp + (lane >> 2);
    float acc[kTiles][4] = {};
    CUTLASS_PRAGMA_UNROLL
    for (int first = 0; first < kSteps; first += kChunkSteps) {
      if (first > 0 && 16 * first >= outputs.num_keys) break;
      FragDs a[kChunkSteps];
      CUTLASS_PRAGMA_UNROLL
      for (int step = 0; step < kChunkSteps; ++step) {
        ptx::ldmatrix_trans(a[step], sDs + 16 * (first + step) * Ds::kQueries);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int step = 0; step < kChunkSteps; ++step) {
        CUTLASS_PRAGMA_UNROLL
        for (int tile = 0; tile < kTiles; tile += 2) {
          uint32_t b[4];
          ptx::ldmatrix_trans(b, sK + KTile::offset(16 * (first + step), 8 * tile));
          ptx::mma_16x8x16<scalar_t, typename Config::ArchTag>(acc[tile], a[step], b);
          ptx::mma_16x8x16<scalar_t, typename Config::ArchTag>(acc[tile + 1], a[step], b + 2);
        }
      }
      if (outputs.dbias2) add_dbias2(outputs, a, q, 16 * first, lane);
    }
    add_dq(outputs.accumulator + q * Config::kHeadDim, acc, lane);
  }

 private:
  // Lanes of queries q and q ^ 1 exchange every second step: then a warp adds to 128 neighbouring bytes of four rows at
  // a time instead of 64 of eight (4.20 instead of 4.51 ms for the whole backward at (1,768,768,4,32)).
  CUTLASS_DEVICE static void add_dbias2(const DqOutputs& outputs, const FragDs (&a)[kChunkSteps], int q, int key,
                                        int lane) {
    bool odd = lane & 4;
    float* rows = outputs.dbias2 + (q & ~1) * outputs.dbias2_pitch + key + 4 * (lane & 3) + (odd ? 16 : 0);
    CUTLASS_PRAGMA_UNROLL
    for (int step = 0; step < kChunkSteps; step += 2) {
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < 2; ++half) {
        uint32_t words[2][2];  // of rows q & ~1 and q | 1
        CUTLASS_PRAGMA_UNROLL
        for (int x = 0; x < 2; ++x) {
          uint32_t even_step = a[step][half + 2 * x], odd_step = a[step + 1][half + 2 * x];
          uint32_t other = ptx::shfl_xor(odd ? even_step : odd_step, 4);
          words[0][x] = odd ? other : even_step, words[1][x] = odd ? odd_step : other;
        }
        CUTLASS_PRAGMA_UNROLL
        for (int row = 0; row < 2; ++row) {
          float2 low = ptx::unpack<scalar_t>(words[row][0]), high = ptx::unpack<scalar_t>(words[row][1]);
          const float v[4] = {low.x, low.y, high.x, high.y};
          atomic_add_vector(rows + (8 * half + row) * outputs.dbias2_pitch + 16 * step, v);
        }
      }
    }
  }

  // Lanes 2 x and 2 x + 1 exchange halves of two tiles, so that each adds four neighbours. row: query q.
  CUTLASS_DEVICE static void add_dq(float* row, const float (&acc)[kTiles][4], int lane) {
    bool odd = lane & 1;
    row += (odd ? 8 : 0) + 4 * ((lane & 3) >> 1);
    CUTLASS_PRAGMA_UNROLL
    for (int tile = 0; tile < kTiles; tile += 2) {
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < 2; ++half) {
        const float *even_tile = &acc[tile][2 * half], *odd_tile = &acc[tile + 1][2 * half];
        float x = ptx::shfl_xor(odd ? even_tile[0] : odd_tile[0], 1);
        float y = ptx::shfl_xor(odd ? even_tile[1] : odd_tile[1], 1);
        const float v[4] = {odd ? x : even_tile[0], odd ? y : even_tile[1], odd ? odd_tile[0] : x,
                            odd ? odd_tile[1] : y};
        atomic_add_vector(row + 8 * half * Config::kHeadDim + 8 * tile, v);
      }
    }
  }
};

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
  // The accumulator of a pair, and the pair that had it before; negative: none.
  CUTLASS_DEVICE uint32_t index_of(uint32_t x) const {
    return x < pool.first_host ? x % pool.num_accumulators : (x - pool.first_host) % pool.num_own;
  }
  CUTLASS_DEVICE int32_t before(uint32_t x) const {
    if (x < pool.first_host) return int32_t(x - pool.num_accumulators);
    const uint32_t number = x - pool.first_host;
    if (number >= pool.num_own) return int32_t(x - pool.num_own);
    return int32_t(pool.first_host - 1 - (pool.first_host - 1 - number) % pool.num_accumulators);
  }
  CUTLASS_DEVICE float* accumulator() const {
    uint32_t x = index_of(pair);
    float* begin = pool.own;
    if (x >= pool.num_own) {
      x -= pool.num_own, begin = pool.in_dk;
      if (x >= pool.num_in_dk) x -= pool.num_in_dk, begin = pool.in_dv;
    }
    return begin + x * accumulator_size();
  }

  // One thread, before a barrier that the others' first addition comes after: until the accumulator is free.
  CUTLASS_DEVICE void wait() const { wait_for(before(pair)); }
  // All threads, before dk or dv is written: until nobody needs its memory.
  CUTLASS_DEVICE void wait_for_hosted() const {
    if (pair < pool.first_host) return;
    for (uint32_t x = threadIdx.x; x < pool.num_accumulators; x += Config::kThreads) {
      wait_for(int32_t(pool.first_host - 1 - x));
    }
    __syncthreads();
  }

  // After the last addition: the last block of a pair writes dq and leaves zeros. blocks: how many add.
  template <typename NumBlocks>
  CUTLASS_DEVICE void finish(const BwdParams& p, scalar_t* gDq, char* shared, NumBlocks num_blocks) const {
    if (!is_last(shared, num_blocks)) return;
    write_dq(p, gDq);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) ptx::store_release(pool.progress + pair, DqAccumulatorPool::kDone);
  }
  // By one block of a pair whose row n sees nothing.
  CUTLASS_DEVICE void announce_nothing() const {
    if (threadIdx.x == 0) ptx::store_release(pool.progress + pair, DqAccumulatorPool::kSeesNothing);
  }

 private:
  // Until that pair is done, or where it sees nothing the last one before it that has the same accumulator.
  CUTLASS_DEVICE void wait_for(int32_t other) const {
    while (other >= 0) {
      const int32_t state = ptx::load_acquire(pool.progress + other);
      if (state == DqAccumulatorPool::kDone) return;
      if (state == DqAccumulatorPool::kSeesNothing) other = before(uint32_t(other));
    }
  }
  template <typename NumBlocks>
  CUTLASS_DEVICE bool is_last(char* shared, NumBlocks num_blocks) const {
    int32_t* sIsLast = reinterpret_cast<int32_t*>(shared);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) *sIsLast = atomicAdd(pool.progress + pair, 1) == num_blocks() - 1;
    __syncthreads();
    bool last = *sIsLast != 0;
    if (last) __threadfence();
    return last;
  }
  CUTLASS_DEVICE void write_dq(const BwdParams& p, scalar_t* gDq) const {
    constexpr int kChunks = Config::kHeadDim / 8, kAtATime = 8;
    int num_chunks = int(p.Lq) * kChunks;
    float4* rows = reinterpret_cast<float4*>(accumulator());
    CUTLASS_PRAGMA_NO_UNROLL
    for (int first = int(threadIdx.x); first < num_chunks; first += kAtATime * Config::kThreads) {
      float4 x[kAtATime][2];
      CUTLASS_PRAGMA_UNROLL
      for (int y = 0; y < kAtATime; ++y) {
        int chunk = min(first + y * Config::kThreads, num_chunks - 1);
        x[y][0] = __ldcg(rows + 2 * chunk), x[y][1] = __ldcg(rows + 2 * chunk + 1);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int y = 0; y < kAtATime; ++y) {
        int chunk = first + y * Config::kThreads, q = chunk / kChunks, col = chunk % kChunks * 8;
        if (chunk >= num_chunks) break;
        rows[2 * chunk] = rows[2 * chunk + 1] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (col >= p.D) continue;
        auto pack = [&](float a, float b) { return ptx::pack<scalar_t>(p.scale * a, p.scale * b); };
        *reinterpret_cast<uint4*>(gDq + q * p.dq_stride[2] + col) =
            make_uint4(pack(x[y][0].x, x[y][0].y), pack(x[y][0].z, x[y][0].w), pack(x[y][1].x, x[y][1].y),
                       pack(x[y][1].z, x[y][1].w));
      }
    }
  }
  CUTLASS_DEVICE int64_t accumulator_size() const { return int64_t(pool.padded_queries) * Config::kHeadDim; }
};

}  // namespace ds4s
