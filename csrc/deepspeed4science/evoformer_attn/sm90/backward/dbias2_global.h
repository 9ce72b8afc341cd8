// dbias2, math.md (16), in kernel_dq_dkdv above D = 64: dS of a step is added to dbias2 in float32, so that no other
// kernel computes dS again.
//
// Four registers of a warpgroup's lanes hold a unit of dS^T, 8 queries by 64 keys: eight rows of 64 elements in dbias2.
// Until the kernel ends, these rows hold the unit in the order of the accumulators, two rows for each warp, so that a
// warp adds to 2 x 256 bytes without exchanging data. Afterwards `order_dbias2` moves the elements into row-major
// order and finishes the rows. Incomplete units, at the last queries and keys, are row-major from the beginning.
#pragma once

#include "common/atomic_add.h"
#include "common/dbias2_rows.h"
#include "sm90/backward/args.h"
#include "sm90/backward/seen_tiles.h"
#include "sm90/mma/pipeline.h"

namespace ds4s::sm90 {

// Offsets in a unit: of a lane's four registers before order_dbias2, and of the e-th of them afterwards.
struct Dbias2Unit {
  static constexpr int kQueries = 8, kKeys = 64;
  int64_t pitch;
  int warp, lane;

  CUTLASS_DEVICE int64_t offset() const { return (2 * warp + lane / 16) * pitch + 4 * (lane % 16); }
  CUTLASS_DEVICE int query(int e) const { return 2 * (lane % 4) + e % 2; }
  CUTLASS_DEVICE int key(int e) const { return 16 * warp + lane / 4 + e / 2 * 8; }
  CUTLASS_DEVICE int64_t home(int e) const { return query(e) * pitch + key(e); }
};

template <typename Config>
struct Dbias2Global {
  static_assert(Config::kOwned == Dbias2Unit::kKeys, "a warpgroup's keys");

  // Where a warpgroup adds, from step to step of one tile.
  struct TileIterator {
    float* next;  // of the step's first unit, this lane's four elements; null where dbias2 is not wanted
    int queries_left, keys_left;

    CUTLASS_DEVICE TileIterator(const BackwardArgs& args, const typename Config::Coordinates& block,
                                const ConsumerCoord& at) {
      const int key = block.owned + at.tile * Config::kOwned;
      queries_left = args.Lq, keys_left = args.Lk - key;
      next = args.dbias2_global;
      if (next == nullptr) return;
      next += (int64_t(block.batch) * args.H + block.head) * args.Lq * args.Lk + key;
      next += Dbias2Unit{args.Lk, at.warp, at.lane}.offset();
    }
  };

  template <int kCount>
  CUTLASS_DEVICE static void add(TileIterator& it, const float (&ds)[kCount], const BackwardArgs& args,
                                 const ConsumerCoord& at) {
    if (it.next == nullptr) return;
    if (it.queries_left >= Config::kColumns && it.keys_left >= Dbias2Unit::kKeys) {
      CUTLASS_PRAGMA_UNROLL
      for (int x = 0; x < kCount; x += 4) atomic_add_vector(it.next + 2 * x * args.Lk, ds + x);
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int x = 0; x < kCount; x += 4) add_ragged(it, 2 * x, ds + x, args, at);
    }
    it.next += int64_t(Config::kColumns) * args.Lk, it.queries_left -= Config::kColumns;
  }

 private:
  CUTLASS_DEVICE static void add_ragged(const TileIterator& it, int query, const float* four, const BackwardArgs& args,
                                        const ConsumerCoord& at) {
    const Dbias2Unit unit{args.Lk, at.warp, at.lane};
    float* dst = it.next + int64_t(query) * args.Lk;
    const int queries = it.queries_left - query;
    if (queries >= Dbias2Unit::kQueries && it.keys_left >= Dbias2Unit::kKeys) {
      atomic_add_vector(dst, four);
      return;
    }
    dst -= unit.offset();
    CUTLASS_PRAGMA_UNROLL
    for (int e = 0; e < 4; ++e) {
      if (unit.query(e) < queries && unit.key(e) < it.keys_left) atomicAdd(dst + unit.home(e), four[e]);
    }
  }
};

// Row-major order for rows of dbias2, which then add up to 0, math.md (16a). A block has eight queries of one matrix,
// the queries of a row of units, or the last few. It keeps kHeld units in registers, or reads all units twice.
constexpr int kOrderThreads = 128;
class OrderedRows {
  static constexpr int kQueries = Dbias2Unit::kQueries, kKeys = Dbias2Unit::kKeys, kWarps = kOrderThreads / 32;
  static constexpr int kHeld = 16;
  using Held = float4[kHeld];

 public:
  struct Shared {
    float sum[kWarps][kQueries], size[kWarps][kQueries];
  };

  CUTLASS_DEVICE OrderedRows(const BackwardArgs& args, bool corrects, Shared& shared, uint32_t block)
      : corrects_(corrects),
        shared_(shared),
        unit_{args.Lk, int(threadIdx.x) / 32, int(threadIdx.x) % 32},
        Lk_(args.Lk) {
    const uint32_t blocks = (uint32_t(args.Lq) + kQueries - 1) / kQueries;
    matrix_ = block / blocks;
    const int first = int(block - matrix_ * blocks) * kQueries;
    queries_ = min(kQueries, args.Lq - first);
    units_ = queries_ == kQueries ? args.Lk / kKeys : 0;
    rows_ = args.dbias2_global + (int64_t(matrix_) * args.Lq + first) * args.Lk;
  }
  CUTLASS_DEVICE uint32_t matrix() const { return matrix_; }  // of B H
  CUTLASS_DEVICE void finish() {
    Held held;
    const bool keeps = units_ <= kHeld;
    add_units(held);
    add_others();
    __syncthreads();
    float excess[2];  // of this lane's queries in a unit
    CUTLASS_PRAGMA_UNROLL
    for (int e = 0; e < 2; ++e) excess[e] = excess_of(unit_.query(e));
    CUTLASS_PRAGMA_NO_UNROLL
    for (int first = 0; first < units_; first += kHeld) {
      if (!keeps) load(held, first);
      __syncthreads();  // all of these units have been read
      store(held, first, excess);
    }
    CUTLASS_PRAGMA_NO_UNROLL
    for (int q = 0; q < queries_ && units_ * kKeys < Lk_; ++q) {
      const float of_query = excess_of(q);
      float* row = rows_ + int64_t(q) * Lk_;
      for (int key = units_ * kKeys + int(threadIdx.x); key < Lk_; key += kOrderThreads) {
        row[key] = without(of_query, row[key]);
      }
    }
  }

 private:
  CUTLASS_DEVICE void load(Held& held, int first) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kHeld; ++i) {
      const bool exists = first + i < units_;
      held[i] = exists ? *reinterpret_cast<const float4*>(rows_ + (first + i) * kKeys + unit_.offset())
                       : make_float4(0.f, 0.f, 0.f, 0.f);
    }
  }
  CUTLASS_DEVICE void store(const Held& held, int first, const float (&excess)[2]) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kHeld; ++i) {
      if (first + i >= units_) break;
      const float x[4] = {held[i].x, held[i].y, held[i].z, held[i].w};
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < 4; ++e) rows_[(first + i) * kKeys + unit_.home(e)] = without(excess[e % 2], x[e]);
    }
  }
  // Sums of all units; of each warp.
  CUTLASS_DEVICE void add_units(Held& held) const {
    float sum[2] = {}, size[2] = {};
    CUTLASS_PRAGMA_NO_UNROLL
    for (int first = 0; first < units_; first += kHeld) {
      load(held, first);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kHeld; ++i) {
        sum[0] += held[i].x + held[i].z, size[0] += fabsf(held[i].x) + fabsf(held[i].z);
        sum[1] += held[i].y + held[i].w, size[1] += fabsf(held[i].y) + fabsf(held[i].w);
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int e = 0; e < 2; ++e) {
      CUTLASS_PRAGMA_UNROLL
      for (int mask = 4; mask < 32; mask *= 2)
        sum[e] += ptx::shfl_xor(sum[e], mask), size[e] += ptx::shfl_xor(size[e], mask);
      if (unit_.lane >= 4) continue;
      shared_.sum[unit_.warp][unit_.query(e)] = sum[e], shared_.size[unit_.warp][unit_.query(e)] = size[e];
    }
    __syncwarp();
  }
  // Sums of the keys without a unit, which each warp adds to its own.
  CUTLASS_DEVICE void add_others() const {
    CUTLASS_PRAGMA_NO_UNROLL
    for (int q = 0; q < queries_ && units_ * kKeys < Lk_; ++q) {
      const float* row = rows_ + int64_t(q) * Lk_;
      float sum = 0.f, size = 0.f;
      for (int key = units_ * kKeys + int(threadIdx.x); key < Lk_; key += kOrderThreads) {
        sum += row[key], size += fabsf(row[key]);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int mask = 1; mask < 32; mask *= 2) sum += ptx::shfl_xor(sum, mask), size += ptx::shfl_xor(size, mask);
      if (unit_.lane == 0) shared_.sum[unit_.warp][q] += sum, shared_.size[unit_.warp][q] += size;
    }
  }
  CUTLASS_DEVICE float excess_of(int query) const {
    float sum = 0.f, size = 0.f;
    CUTLASS_PRAGMA_UNROLL
    for (int warp = 0; warp < kWarps; ++warp) sum += shared_.sum[warp][query], size += shared_.size[warp][query];
    return corrects_ ? excess_share(sum, size) : 0.f;
  }
  CUTLASS_DEVICE static float without(float excess, float x) {
    return excess != 0.f ? fmaf(-excess, fabsf(x), x) : x;  // 0 times infinity is NaN
  }

  const bool corrects_;
  Shared& shared_;
  const Dbias2Unit unit_;
  const int Lk_;
  float* rows_;
  uint32_t matrix_;
  int queries_, units_;
};

static __global__ void __launch_bounds__(kOrderThreads) order_dbias2(const BackwardArgs args, bool corrects) {
  ptx::let_next_kernel_start();
  __shared__ OrderedRows::Shared shared;
  OrderedRows rows(args, corrects, shared, blockIdx.x);
  // kernel_dq_dkdv ends with the tiles of the last head, so other heads need not wait for its end: for all (b, n, h)
  // of a matrix, all blocks have added.
  const int num_tiles = SeenTiles::num_of_pair(args);
  CUTLASS_PRAGMA_NO_UNROLL
  for (int n = threadIdx.x; n < args.N; n += kOrderThreads) {
    ptx::wait_for(args.dq_progress + int64_t(rows.matrix()) * args.N + n, num_tiles);
  }
  __syncthreads();
  rows.finish();
  ptx::wait_for_kernel_before();  // a kernel that waits for this one finds kernel_dq_dkdv's results complete
}

}  // namespace ds4s::sm90
