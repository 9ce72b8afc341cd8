// dq, math.md (13), in shared memory, in kernel_dq_dkdv that owns keys. In each step all warpgroups of a block store
// their parts of dS, queries by keys, and one warpgroup computes dq += dS K over all keys of the block: the consumers
// in turn, another one in each step (Config::kTakesTurns), or one that does nothing else (dq_warpgroup.h). dq of one
// (b, n, h) stays in shared memory while the block iterates over the keys.
#pragma once

#include "sm90/backward/cluster_barrier.h"
#include "sm90/backward/config.h"
#include "sm90/backward/maps.h"

namespace ds4s::sm90 {

template <typename Config>
struct DqShared {
  using scalar_t = typename Config::scalar_t;
  using Shared = typename Config::Shared;
  using OwnedTile = typename Config::OwnedTile;
  using DsTile = typename Config::BiasTile;
  using Sum = float[Config::kHeadDim / 2];
  static constexpr int kTiles = Config::kTiles, kOwned = Config::kOwned, kColumns = Config::kColumns;

  CUTLASS_DEVICE static void init(typename Config::Dq& dq) {
    for (auto& barrier : dq.full) barrier.init(128 * kTiles);
    for (auto& barrier : dq.keys_read) barrier.init(128 * kTiles);
  }

  // One tile of keys.
  struct TileState {
    const DqDkdvMaps& maps;
    const typename Config::Coordinates& block;
    const typename Config::OwnedPipe& owned_pipe;
    bool first, last;  // among the tiles of this (b, n, h) with a visible key
    // Whether this row n sees one of the keys: with kPairsRows maybe only the other row n does, with kSplitsKeys maybe
    // only other blocks' keys are seen. Unseen keys may be NaN.
    bool sees_keys = true;
  };

  // Multiplies dS of step `index` if that step is this warpgroup's. Waiting for the other warpgroups' parts of dS ends,
  // since they store them without waiting for this one.
  CUTLASS_DEVICE static void add(const TileState& state, int index, const typename Config::Pipe& pipe, Shared& shared,
                                 const BackwardArgs& args, const ConsumerCoord& at) {
    if (index % kTiles != at.tile) return;
    const int first_query = Config::columns(args, state.block.part).begin;
    if (state.first && index < kTiles) wait_for_stores(at);
    add_step(state, index, first_query, pipe, shared, args, at, [] {});
  }
  // This warpgroup's stores of the last (b, n, h) leave shared memory.
  CUTLASS_DEVICE static void wait_for_stores(const ConsumerCoord& at) {
    if (at.issues()) cute::tma_store_wait<0>();
    at.sync();
  }
  // Multiplies dS of step `index`, and calls `beside` while the product runs. first_query: of this block.
  template <typename Beside>
  CUTLASS_DEVICE static void add_step(const TileState& state, int index, int first_query,
                                      const typename Config::Pipe& pipe, Shared& shared, const BackwardArgs& args,
                                      const ConsumerCoord& at, Beside&& beside) {
    auto& tile = shared.dq.tiles[index];
    float4* mine = reinterpret_cast<float4*>(tile.x[0][32 * at.warp + at.lane]);
    Sum sum = {};
    if (!state.first) load(sum, mine);
    shared.dq.full[pipe.index].wait(pipe.phase);
    if constexpr (Config::kHasDqWarpgroup) cutlass::arch::fence_view_async_shared();  // for the consumers' stores
    if (!(Config::kPairsRows || Config::kSplitsKeys) || state.sees_keys) {
      start_product(sum, start_address(shared.stages[pipe.index].bias2),
                    start_address(shared.owned[state.owned_pipe.index]));
    }
    beside();
    wgmma_wait<0>();
    fence_registers(sum);
    shared.empty[pipe.index].arrive();
    if (!state.last) {
      store(mine, sum);
      return;
    }
    at.sync();  // all threads have read the tile that store_out overwrites
    store_out(state, tile, sum, first_query + index * kColumns, args, at);
  }

  // Stores dq = 0 of a (b, n, h) that sees no key.
  CUTLASS_DEVICE static void store_zeros(const TileState& state, Shared& shared, const BackwardArgs& args,
                                         const ConsumerCoord& at) {
    const typename Config::Columns columns = Config::columns(args, state.block.part);
    wait_for_stores(at);
    const Sum zeros = {};
    for (int index = at.tile; index < columns.num_steps(); index += Config::kTakesTurns ? kTiles : 1) {
      store_out(state, shared.dq.tiles[index], zeros, columns.begin + index * kColumns, args, at);
    }
  }

  // Stores dq of a (b, n, h) whose keys are divided among the blocks of a cluster: each block sums some of the tiles
  // over all blocks, in the order of the blocks.
  CUTLASS_DEVICE static void sum_in_cluster(Shared& shared, const BackwardArgs& args, const DqDkdvMaps& maps) {
    const ConsumerCoord at = ConsumerCoord::of_thread<kTiles>();
    const int num_blocks = int(cute::cluster_shape().x), num_steps = Config::columns(args, /*part=*/0).num_steps();
    const auto block = Config::locate(args, int(cute::cluster_id_in_grid().x) * args.by_blocks.divisor);
    const typename Config::OwnedPipe owned_pipe;
    const TileState state{maps, block, owned_pipe, true, true};
    CUTLASS_PRAGMA_NO_UNROLL
    for (int index = Config::rank() * kTiles + at.tile; index < num_steps; index += num_blocks * kTiles) {
      auto& tile = shared.dq.tiles[index];
      const uint32_t mine = shared_address(tile.x[0][threadIdx.x % 128]);
      Sum sum = {};
      CUTLASS_PRAGMA_NO_UNROLL
      for (int rank = 0; rank < num_blocks; ++rank) add_remote(sum, cute::set_block_rank(mine, rank));
      at.sync();  // all threads have read the tile that store_out overwrites
      store_out(state, tile, sum, index * kColumns, args, at);
    }
    if (at.issues()) cute::tma_store_wait<0>();
  }

 private:
  CUTLASS_DEVICE static void add_remote(Sum& sum, uint32_t address) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Config::kHeadDim / 8; ++i) {
      const float4 x = load_four(address + 2048 * i);
      sum[4 * i] += x.x, sum[4 * i + 1] += x.y, sum[4 * i + 2] += x.z, sum[4 * i + 3] += x.w;
    }
  }
  CUTLASS_DEVICE static void store_out(const TileState& state, typename Config::DqTile& tile, const Sum& sum, int query,
                                       const BackwardArgs& args, const ConsumerCoord& at) {
    const float scale[2] = {args.scale, args.scale};
    store_tile<scalar_t, OwnedTile>(state.maps.dq, reinterpret_cast<uint8_t*>(&tile), sum, scale, at, query,
                                    state.block.head, state.block.row, state.block.batch);
  }
  CUTLASS_DEVICE static void load(Sum& sum, const float4* mine) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Config::kHeadDim / 8; ++i) {
      float4 x = mine[128 * i];
      sum[4 * i] = x.x, sum[4 * i + 1] = x.y, sum[4 * i + 2] = x.z, sum[4 * i + 3] = x.w;
    }
  }
  CUTLASS_DEVICE static void store(float4* mine, const Sum& sum) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Config::kHeadDim / 8; ++i) {
      mine[128 * i] = make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]);
    }
  }
  // sum += dS K
  CUTLASS_DEVICE static void start_product(Sum& sum, uint32_t ds, uint32_t keys) {
    constexpr uint32_t kNextKeys = 2 * OwnedTile::kBytes >> 4, kNextDs = DsTile::kBytes >> 4;
    fence_registers(sum);
    wgmma_begin();
    CUTLASS_PRAGMA_UNROLL
    for (int t = 0; t < kTiles; ++t) {
      CUTLASS_PRAGMA_UNROLL
      for (int step = 0; step < kOwned / 16; ++step) {
        wgmma<scalar_t, Config::kHeadDim, Major::MN>(
            sum, DsTile::descriptor(ds + t * kNextDs + DsTile::columns_step(step)),
            OwnedTile::descriptor(keys + t * kNextKeys + OwnedTile::rows_step(step)));
      }
    }
    wgmma_commit();
  }
};

}  // namespace ds4s::sm90
