// Stores the results of one owned tile of kernel_dq_dkdv: dk and dv, or dq, and the tile's part of dbias1, math.md
// (15).
#pragma once

#include "sm90/backward/cluster_reduce.h"
#include "sm90/backward/maps.h"
#include "sm90/backward/partial_sums.h"
#include "sm90/backward/step_products.h"

namespace ds4s::sm90 {

template <typename Config>
struct DqDkdvEpilogue {
  using scalar_t = typename Config::scalar_t;
  using Shared = typename Config::Shared;
  using Coordinates = typename Config::Coordinates;
  using OwnedTile = typename Config::OwnedTile;
  using Results = typename StepProducts<Config>::Results;
  static constexpr int kOwned = Config::kOwned;
  static constexpr bool kKeys = Config::kKeys, kDqInShared = Config::kDqInShared;

  CUTLASS_DEVICE static void finish(Shared& shared, const BackwardArgs& args, const DqDkdvMaps& maps,
                                    const Coordinates& block, const typename Config::OwnedPipe& pipe, bool computed,
                                    Results& results, uint32_t& exchanged, const ConsumerCoord& at) {
    auto& owned = shared.owned[pipe.index][at.warpgroup];
    int l = block.owned + at.tile * kOwned, n = block.row + at.row;
    if (kKeys && args.dbias1 != nullptr) {
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2; ++r) {
        float sum = results.sums[r];
        sum += ptx::shfl_xor(sum, 1);
        sum += ptx::shfl_xor(sum, 2);
        int k = l + 16 * at.warp + at.lane / 4 + 8 * r;
        if (at.lane % 4 != 0 || k >= args.Lk) continue;
        int64_t bn = int64_t(block.batch) * args.N + n;
        if (!Config::kPairsRows && args.stores_dbias1) {
          args.dbias1[(bn * args.H + block.head) * args.Lk + k] = sum;
        } else if (computed) {
          atomicAdd(args.dbias1 + bn * args.Lk + k, sum);
        }
      }
    }
    if constexpr (Config::kHasQueryParts) {
      const bool is_computed = ptx::any(computed);  // a warp's lanes agree, which nvcc 13.5 does not see
      if (block.part > 0 && !is_computed) return;   // the first part has stored zeros
      if (is_computed && args.num_query_parts > 1) {
        const PartialSums<Config> sums(args, maps, block, l, at);
        if (block.part > 0) sums.add_to(results.of_ds, results.of_p);
        if (block.part + 1 < args.num_query_parts) return sums.store(results.of_ds, results.of_p);
      }
    }
    bool stores_first = args.stores_first, stores_second = kKeys && args.stores_second;
    if constexpr (Config::kStoresFromRegisters) {
      if (stores_second) store_rows<scalar_t>(maps.second_rows, results.of_p, 1.f, at, l, block.head, n, block.batch);
      if (stores_first) {
        store_rows<scalar_t>(maps.first_rows, results.of_ds, args.scale, at, l, block.head, n, block.batch);
      }
      return;
    }
    uint8_t *first = owned.first, *second = owned.second;  // where results wait to be stored
    if constexpr (Config::kHasResultsBuffer) {
      first = shared.dq.results[at.tile][0], second = shared.dq.results[at.tile][1];
    } else if constexpr (kDqInShared) {
      shared.dq.keys_read[pipe.index].wait(pipe.phase);
    }
    // Nothing reads there any more: neither the products of all warps nor, with a buffer of their own, the last tile's
    // store, for which one thread has waited.
    at.sync();
    if constexpr (Config::kClusterBlocks > 1 && !Config::kSplitsKeys) {
      if (computed) ClusterReduce<Config>::exchange(shared, first, results.of_ds, results.of_p, exchanged, at);
      stores_first &= Config::rank() == 0, stores_second &= Config::rank() == 1;
    }
    const float scale[2] = {args.scale, args.scale}, one[2] = {1.f, 1.f};
    if (stores_second) {
      store_tile<scalar_t, OwnedTile>(maps.result_second, second, results.of_p, one, at, l, block.head, n, block.batch);
    }
    if (stores_first) {
      store_tile<scalar_t, OwnedTile>(maps.result_first, first, results.of_ds, scale, at, l, block.head, n,
                                      block.batch);
    }
  }
};

}  // namespace ds4s::sm90
