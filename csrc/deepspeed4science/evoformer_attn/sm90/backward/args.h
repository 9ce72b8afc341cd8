// Arguments of the Hopper backward's kernels, besides their tensor maps, and the statistics of a row of scores.
#pragma once

#include <cutlass/fast_math.h>

#include "common/backward_args.h"
#include "common/key_mask.h"
#include "common/ptx.h"

namespace ds4s::sm90 {

struct BackwardArgs {
  const void* bias1;        // [B, N, Lk] with stride 1 over keys, or null
  int64_t bias1_stride[2];  // B, N
  const void* bias2;        // [B, H, Lq, Lk] with rows of whole 8-element pieces, or null
  int64_t bias2_stride[3];  // B, H, Lq
  KeyMask mask;
  RowLists row_lists;       // for each of kernel_dbias2's tiles of keys
  const float* lse;         // [B, N, H, Lq], of the shifted scores
  float* negative_delta;    // [B, N, H, Lq]; where kernel_dq_dkdv computes it, see row_delta.h
  int32_t* delta_progress;  // the (b, n, h) whose delta kernel_dq_dkdv has stored, or left out; null: nobody asks
  PostprocessFlag flag;     // kernel_dq_dkdv raises it if it computes delta and finds a query that sees nothing
  float* dbias1;            // math.md (15): [B, N, Lk] to add to, [B, N, H, Lk] to store (stores_dbias1), or null
  float* dbias2;            // [B, H, Lq, Lk]; [slices, B, H, Lq, Lk] where several slices store

  uint4* dq_accumulators;       // [num_dq_accumulators] accumulators of dq_global.h, zeros while not in use; or null
  int32_t* dq_progress;         // of each section of a (b, n, h): number of blocks that have added or written dq
  int32_t* dq_released;         // released accumulators, numbered from 1, in the order of release
  int32_t* dq_num_released;     // number of entries of dq_released
  const int32_t* dq_exponents;  // where sums of dq are float16: of their factors, and the largest ones that have
  uint32_t* dq_largest;         // been written (dq_range_args.h)
  const int32_t* later_delta;   // 1 where later_delta.h has completed the (b, n, h) from number num_first_pairs on
  int32_t* next_tile;           // the first tile that no block has taken (tile_scheduler.h)
  int32_t* next_dbias2_tile;    // as next_tile, for kernel_dbias2 (cluster_tile_scheduler.h); null: fixed tiles
  int32_t dbias2_stride;        // in row_pairs.h: from one row of dbias2_global to the next
  float* dbias2_global;         // kernel_dq_dkdv adds dS to it (dbias2_global.h, row_pairs.h); or null

  int32_t B, N, H, Lq, Lk;
  int32_t num_first_pairs;  // the (b, n, h) whose delta is there from the beginning
  int32_t num_dq_accumulators;
  int32_t num_tiles;   // of the whole grid
  int32_t num_slices;  // kernel_dbias2: number of slices of the rows n; 0: the kernel chooses
  // kernel_dq_dkdv: blocks of tiles per row n and head, and N in groups of kRows.
  cutlass::FastDivmod by_blocks, by_row_groups;
  // kernel_dbias2: the tiles of one slice, innermost dimension first.
  cutlass::FastDivmod by_key_blocks, by_query_blocks, by_batches;
  cutlass::FastDivmod by_heads;      // both
  int32_t bias2_B, bias2_H;          // 1, or 0 where bias2 is the same for every b or head
  bool stores_first, stores_second;  // kernel_dq_dkdv: which results are wanted
  bool stores_dbias1;                // each head stores a part of its own
  bool adds_dbias2;                  // several slices add into one result
  bool partitions_rows;              // kernel_dbias2 may divide the rows n by RowPartition
  bool stores_dbias2;                // N = 1: dS is dbias2, and kernel_dq_dkdv stores it; rounded where it splits keys
  bool waits_for_delta;              // kernel_dbias2: kernel_dq_dkdv computes delta, beside its beginning
  bool waits;                        // at its beginning the kernel waits for the end of the previous one
  bool waits_before_stores;          // it waits before its stores: accumulators of dq may lie in dbias2

  // The kernels compute s = Q K^T + (bias1 + bias2 - lse) / scale and P = 2^(c s), math.md (8). Some terms are initial
  // values of the accumulator, the others are added in the exponent.
  float scale;
  float unit;  // 1 / scale
  float c;     // scale log2(e)

  // kernel_dq_dkdv in clusters that divide the queries, or with kHasQueryParts.
  int32_t queries_of_part;  // of a block of the cluster, or at a time; the last part may have fewer
  int32_t num_query_parts;
  uint16_t* part_exponents;  // [blocks, tiles of keys, warps]: of dk and dv between two parts (partial_sums.h)
  bool heads_outside;        // tiles are numbered rows n first, then heads

  // dq_global.h: an accumulator holds so many steps of queries, a section; so many of these cover all queries.
  int32_t section_steps, num_sections;
  const int2* seen_tiles;  // the tiles of keys that some row n sees (seen_tiles.h); null: all

  // The index of a row n among all B N.
  CUTLASS_DEVICE int64_t row_index(int batch, int n) const { return int64_t(batch) * N + n; }
};

// bias1 - shift of one (b, n), math.md (1a); -inf past the end, 0 without bias1. `load` starts the load and does not
// wait; `value`, called later, does.
template <typename scalar_t>
struct Bias1OfRow {
  const scalar_t* ptr = nullptr;
  float shift;
  int Lk;

  CUTLASS_DEVICE Bias1OfRow(const BackwardArgs& args, int b, int n)
      : shift(args.mask.shift_of(args.row_index(b, n))), Lk(args.Lk) {
    if (args.bias1 == nullptr) return;
    ptr = static_cast<const scalar_t*>(args.bias1) + b * args.bias1_stride[0] + n * args.bias1_stride[1];
  }
  CUTLASS_DEVICE uint32_t load(int k) const { return ptr != nullptr ? ptx::load_bits(ptr + min(k, Lk - 1)) : 0; }
  CUTLASS_DEVICE float value(uint32_t bits, int k) const { return value(bits, shift, k, Lk); }
  CUTLASS_DEVICE static float value(uint32_t bits, float shift, int k, int Lk) {
    return k < Lk ? ptx::bits_to_float<scalar_t>(bits) - shift : -infinity();
  }
};

// -lse and -delta, math.md (6) and (9), of the queries of one (b, n, h). For queries that see no key, do not exist or
// have an lse below -kLargestLse, -lse is replaced by -inf, so that their P is 0.
struct QueryStatistics {
  const BackwardArgs& args;
  uint32_t begin;  // of the (b, n, h) in lse: 32 bits (Sm90Backward::fits), since these warps have few registers

  CUTLASS_DEVICE QueryStatistics(const BackwardArgs& args, int b, int n, int h)
      : args(args), begin(uint32_t(args.row_index(b, n) * args.H + h) * uint32_t(args.Lq)) {}
  CUTLASS_DEVICE float2 load(int q) const { return load(q, begin); }
  CUTLASS_DEVICE float2 load(int q, uint32_t begin_of_delta) const {
    return make_float2(load_lse(q), args.negative_delta[begin_of_delta + existing(q)]);
  }
  CUTLASS_DEVICE float load_lse(int q) const { return args.lse[begin + existing(q)]; }
  CUTLASS_DEVICE uint32_t existing(int q) const { return uint32_t(min(q, args.Lq - 1)); }
  CUTLASS_DEVICE static float2 value(float2 loaded, int q, int Lq) {
    if (q >= Lq) return make_float2(-infinity(), 0.f);
    return make_float2(loaded.x < -kLargestLse ? -infinity() : -loaded.x, loaded.y);
  }
};

}  // namespace ds4s::sm90
