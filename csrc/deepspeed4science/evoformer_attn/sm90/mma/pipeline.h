// Common parts of all kernels of this family: consumer warpgroups and a last warpgroup of producers in a block,
// pipeline stages between them, and tiles loaded and stored by TMA.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/arch/copy_sm90_tma.hpp>

#include "common/ptx.h"
#include "sm90/mma/smem_tile.h"
#include "sm90/mma/tensor_map.h"
#include "sm90/mma/wgmma.h"

namespace ds4s::sm90 {

using FullBarrier = cutlass::arch::ClusterTransactionBarrier;  // completes with the last of the announced bytes
using EmptyBarrier = cutlass::arch::ClusterBarrier;            // completes when every consuming thread has arrived

// A thread's position in a pipeline of kCount stages: a stage, and the phase of its barriers.
template <int kCount>
struct PipelineState {
  int index = 0;
  uint32_t phase = 0;
  CUTLASS_DEVICE void advance() {
    if (++index == kCount) index = 0, phase ^= 1;
  }
  CUTLASS_DEVICE PipelineState before() const {
    return index > 0 ? PipelineState{index - 1, phase} : PipelineState{kCount - 1, phase ^ 1};
  }
};

// Registers of a thread: at launch, and after the producers have released most of theirs to the consumers (setmaxnreg,
// within the block's allocation at launch). kHelper, kSecondHelper: of more warpgroups, if there are any.
constexpr int usual_producer_registers(int num_warpgroups) { return num_warpgroups == 2 ? 40 : 32; }
template <int kWarpgroups, int kBlocksPerSm, int kProducer_ = usual_producer_registers(kWarpgroups), int kHelper_ = 0,
          int kSecondHelper_ = 0>
struct RegisterShares {
  static constexpr int kAll = kWarpgroups + 1 + (kHelper_ > 0) + (kSecondHelper_ > 0);
  static constexpr int kLaunch = 65536 / kBlocksPerSm / (128 * kAll) / 8 * 8;
  static constexpr int kProducer = kProducer_, kHelper = kHelper_, kSecondHelper = kSecondHelper_;
  static constexpr int kShare = (kLaunch * kAll - kProducer - kHelper - kSecondHelper) / kWarpgroups / 8 * 8;
  static constexpr int kConsumer = kShare < 240 ? kShare : 240;
};

// Coordinates of a consumer in its block: kTiles warpgroups for each row n.
struct ConsumerCoord {
  int warpgroup, row, tile, warp, lane;

  template <int kTiles>
  CUTLASS_DEVICE static ConsumerCoord of_thread() {
    int warpgroup = cutlass::canonical_warp_group_idx();  // uniform, which the compiler knows
    return {warpgroup, warpgroup / kTiles, warpgroup % kTiles, cutlass::canonical_warp_idx() % 4,
            int(threadIdx.x) % 32};
  }
  // Of a warpgroup that works for all rows n and tiles of its block.
  CUTLASS_DEVICE static ConsumerCoord of_helper() {
    return {cutlass::canonical_warp_group_idx(), 0, 0, cutlass::canonical_warp_idx() % 4, int(threadIdx.x) % 32};
  }
  CUTLASS_DEVICE bool issues() const { return warp == 0 && lane == 0; }  // stores
  CUTLASS_DEVICE void sync() const { cutlass::arch::NamedBarrier::sync(128, 1 + warpgroup); }
};

// The TMA store of the previous tile, which may still read its buffer. Consumers wait for it during the next tile; then
// all lanes release the buffer, each for its own reads.
struct PendingStore {
  int buffer = -1;
  CUTLASS_DEVICE void finish(EmptyBarrier* empty, const ConsumerCoord& at) {
    if (buffer < 0) return;
    if (at.issues()) cute::tma_store_wait<0>();
    empty[buffer].arrive();
    buffer = -1;
  }
};

// Exchanges four values of an accumulator, two of each of a lane's rows, for four neighbours of one row: lanes 2 i and
// 2 i + 1 exchange halves, and the odd one gets the later row.
CUTLASS_DEVICE void four_of_a_row(float (&four)[4], const float* x, bool odd) {
  float got[2] = {ptx::shfl_xor(odd ? x[0] : x[2], 1), ptx::shfl_xor(odd ? x[1] : x[3], 1)};
  four[0] = odd ? got[0] : x[0], four[1] = odd ? got[1] : x[1];
  four[2] = odd ? x[2] : got[0], four[3] = odd ? x[3] : got[1];
}

// Stores the first `valid` of them; aligned: all such rows are aligned to 16 bytes.
CUTLASS_DEVICE void store_four(float* dst, const float (&x)[4], int valid, bool aligned) {
  const bool whole = valid >= 4 && aligned;
  ptx::store_if(whole, dst, x);
  CUTLASS_PRAGMA_UNROLL
  for (int e = 0; e < 4; ++e) ptx::store_if(!whole && e < valid, dst + e, x[e]);
}

// Fetches tensor maps ahead of their first use. Called by one thread.
template <typename... Maps>
CUTLASS_DEVICE void prefetch_maps(const Maps&... maps) {
  (cute::prefetch_tma_descriptor(&maps), ...);
}

template <typename Tile>
CUTLASS_DEVICE void load_tile(const CUtensorMap& map, FullBarrier& barrier, uint8_t* dst, int x0, int x1, int x2,
                              int x3, int x4) {
  CUTLASS_PRAGMA_UNROLL
  for (int box = 0; box < Tile::kNumBoxes; ++box) {
    cute::SM90_TMA_LOAD_5D::copy(&map, reinterpret_cast<uint64_t*>(&barrier),
                                 uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL), dst + box * Tile::kBoxBytes,
                                 x0 + box * Tile::kBoxColumns, x1, x2, x3, x4);
  }
}

// The same, to the same address in both blocks of a cluster; the barrier at this address in each block counts its
// bytes.
template <typename Tile>
CUTLASS_DEVICE void load_tile_for_both(const CUtensorMap& map, FullBarrier& barrier, uint8_t* dst, int x0, int x1,
                                       int x2, int x3, int x4) {
  CUTLASS_PRAGMA_UNROLL
  for (int box = 0; box < Tile::kNumBoxes; ++box) {
    cute::SM90_TMA_LOAD_MULTICAST_5D::copy(&map, reinterpret_cast<uint64_t*>(&barrier), uint16_t(0b11),
                                           uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                                           dst + box * Tile::kBoxBytes, x0 + box * Tile::kBoxColumns, x1, x2, x3, x4);
  }
}

// Multiplies rows of accumulators by factor[i], rounds them, writes them to a tile that is no longer read, and stores
// it by TMA. x: in the layout of wgmma.h; coordinates from the tile's row on.
template <typename scalar_t, typename Tile, int kCount>
CUTLASS_DEVICE void store_tile(const CUtensorMap& map, uint8_t* tile, const float (&x)[kCount],
                               const float (&factor)[2], const ConsumerCoord& at, int x1, int x2, int x3, int x4) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kCount; i += 2) {
    int r = row_of(i);
    int byte = Tile::offset(16 * at.warp + at.lane / 4 + 8 * r, i / 4) + 4 * (at.lane % 4);
    *reinterpret_cast<uint32_t*>(tile + byte) = ptx::pack<scalar_t>(x[i] * factor[r], x[i + 1] * factor[r]);
  }
  cute::tma_store_fence();
  at.sync();
  if (at.issues()) {
    for (int box = 0; box < Tile::kNumBoxes; ++box) {
      cute::SM90_TMA_STORE_5D::copy(&map, tile + box * Tile::kBoxBytes, box * Tile::kBoxColumns, x1, x2, x3, x4);
    }
    cute::tma_store_arrive();
  }
}

// Stores eight elements, if so many exist: head dimensions are multiples of eight. dst is aligned to 16 bytes. This
// kernel never reads them again, so L2 evicts them first.
template <typename scalar_t>
CUTLASS_DEVICE void store_eight(scalar_t* dst, uint4 eight, int left) {
  if (left > 0) __stcs(reinterpret_cast<uint4*>(dst), eight);
}

// Exchanges values so that each of the four lanes of a row has eight neighbours of 32 columns, from 8 (lane % 4) on.
// mine: this lane's pairs, one of each 8 columns.
CUTLASS_DEVICE uint4 eight_of_a_row(const uint32_t (&mine)[4], int lane) {
  const bool odd = lane % 2 != 0, upper = lane % 4 >= 2;
  uint32_t pairs[2][2];  // first index: columns from 8 (lane % 2) on, and 16 more; second: of the even and odd lane
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 2; ++i) {
    uint32_t got = ptx::shfl_xor(odd ? mine[2 * i] : mine[2 * i + 1], 1);
    pairs[i][0] = odd ? got : mine[2 * i], pairs[i][1] = odd ? mine[2 * i + 1] : got;
  }
  uint32_t got[2] = {ptx::shfl_xor(upper ? pairs[0][0] : pairs[1][0], 2),
                     ptx::shfl_xor(upper ? pairs[0][1] : pairs[1][1], 2)};
  return upper ? make_uint4(got[0], got[1], pairs[1][0], pairs[1][1])
               : make_uint4(pairs[0][0], pairs[0][1], got[0], got[1]);
}

// Multiplies rows of accumulators by `factor`, rounds and stores them without a buffer in shared memory.
template <typename scalar_t, int kCount>
CUTLASS_DEVICE void store_rows(const TensorView<5>& out, const float (&x)[kCount], float factor,
                               const ConsumerCoord& at, int x1, int x2, int x3, int x4) {
  const int eight = 8 * (at.lane % 4);
  CUTLASS_PRAGMA_UNROLL
  for (int r = 0; r < 2; ++r) {
    const int row = x1 + 16 * at.warp + at.lane / 4 + 8 * r;
    const int64_t offset = row * out.stride[1] + x2 * out.stride[2] + x3 * out.stride[3] + x4 * out.stride[4];
    CUTLASS_PRAGMA_UNROLL
    for (int column = 0; column < kCount * 2; column += 32) {
      uint32_t mine[4];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4; ++i) {
        int e = column / 2 + 4 * i + 2 * r;
        mine[i] = e < kCount ? ptx::pack<scalar_t>(x[e] * factor, x[e + 1] * factor) : 0;
      }
      store_eight(static_cast<scalar_t*>(const_cast<void*>(out.ptr)) + offset + column + eight,
                  eight_of_a_row(mine, at.lane), row < out.size[1] ? int(out.size[0]) - column - eight : 0);
    }
  }
}

}  // namespace ds4s::sm90
