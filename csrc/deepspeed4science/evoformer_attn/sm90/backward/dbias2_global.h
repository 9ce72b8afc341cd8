// dbias2, math.md (16), in kernel_dq_dkdv above D = 64: dS of a step is added to dbias2 in float32, so that no other
// kernel computes dS again.
//
// Four registers of a warpgroup's lanes hold a unit of dS^T, 8 queries by 64 keys: eight rows of 64 elements in dbias2.
// Until the kernel ends, these rows hold the unit in the order of the accumulators, two rows for each warp, so that a
// warp adds to 2 x 256 bytes without exchanging data. Afterwards `order_dbias2` moves the elements into row-major
// order. Incomplete units, at the last queries and keys, are row-major from the beginning.
#pragma once

#include "common/atomic_add.h"
#include "sm90/backward/args.h"
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

// Units of a block of 128 threads of order_dbias2, one after another along the queries.
constexpr int kOrderUnits = 4;
static __global__ void __launch_bounds__(128) order_dbias2(const BackwardArgs args) {
  ptx::wait_for_kernel_before();
  ptx::let_next_kernel_start();
  constexpr int kQueries = Dbias2Unit::kQueries;
  const uint32_t key_units = uint32_t(args.Lk) / Dbias2Unit::kKeys, query_units = uint32_t(args.Lq) / kQueries;
  const uint32_t query_blocks = (query_units + kOrderUnits - 1) / kOrderUnits;
  const uint32_t rest = blockIdx.x / key_units, matrix = rest / query_blocks;
  const int first = int(rest - matrix * query_blocks) * kOrderUnits, count = min(int(query_units) - first, kOrderUnits);
  const Dbias2Unit unit{args.Lk, int(threadIdx.x) / 32, int(threadIdx.x) % 32};
  float* dst = args.dbias2_global + (int64_t(matrix) * args.Lq + first * kQueries) * args.Lk +
               (blockIdx.x - rest * key_units) * Dbias2Unit::kKeys;
  float4 four[kOrderUnits];
  CUTLASS_PRAGMA_UNROLL
  for (int u = 0; u < kOrderUnits; ++u) {
    if (u < count) four[u] = *reinterpret_cast<const float4*>(dst + u * kQueries * unit.pitch + unit.offset());
  }
  __syncthreads();
  CUTLASS_PRAGMA_UNROLL
  for (int u = 0; u < kOrderUnits; ++u) {
    const float x[4] = {four[u].x, four[u].y, four[u].z, four[u].w};
    CUTLASS_PRAGMA_UNROLL
    for (int e = 0; e < 4; ++e) {
      if (u < count) dst[u * kQueries * unit.pitch + unit.home(e)] = x[e];
    }
  }
}

}  // namespace ds4s::sm90
