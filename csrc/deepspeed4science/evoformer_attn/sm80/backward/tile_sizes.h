// Tile sizes of the backward for Sm70, Sm75 and Sm80, with the limit or the measurement that chose them (H200, bf16,
// both biases, the whole backward unless a kernel is named; docs/history/sm80-backward.md). Plain arithmetic, since
// plans include it on the host.
#pragma once

namespace ds4s {

// The blocks of so many neighbouring n run side by side, since they read the same part of bias2.
constexpr int kSideBySide = 16;
// In the fused kernel they also add to the same part of dbias2. At (1,768,768,4,32): 3.89 ms with 8, 3.97 with 16, 3.89
// with 4. Wider heads: (1,256,1024,4,64) 3.62 with 8, 3.59 with 16; (1,48,768,16,48) 1.415 and 1.390.
constexpr int fused_side_by_side(int head_dim) { return head_dim <= 32 ? 8 : 16; }

// Blocks of the fused kernel that are under way on a multiprocessor of 9.0. Up to 16 channels without dbias1, its
// registers leave room for a third. (1,384,384,4,16), accumulators for three instead of two: 0.993, half of the keys
// hidden 0.940.
constexpr int fused_resident_blocks(int head_dim) { return head_dim <= 16 ? 3 : 2; }

// How many accumulators of dq the fused kernel has besides one for each (b, n, h) under way (dq_accumulator_plan.h).
// Twice as many are no faster at D = 32, three times as many at D = 48 and 64 neither.
constexpr int spare_accumulators(int head_dim) { return head_dim <= 32 ? 8 : head_dim <= 48 ? 16 : 32; }
static_assert(spare_accumulators(32) >= fused_side_by_side(32) && spare_accumulators(48) >= fused_side_by_side(48) &&
                  spare_accumulators(64) >= fused_side_by_side(64),
              "neighbouring rows n, whose blocks have their numbers in turn, share no accumulator (S3)");

// The number of tiles of 32 x 32 behind the transposed copy of bias2. Kernels of keys load the stripe that follows the
// last tile of streamed queries, too, and ignore it.
constexpr int kTilesPastEnd = 4;

struct BackwardTileSizes {
  int warps;           // of a block of kernel_dq_dkdv.h, 32 queries or keys each
  int owned;           // queries whose dq, or keys whose dk and dv, a block computes
  int streamed;        // keys, or queries, that a block streams at a time
  int fused_streamed;  // queries that a block of the fused kernel streams at a time
  int dbias2_queries;  // a block's tile of dbias2
  int dbias2_keys;
  int dbias2_stripes;  // of 32 keys, for each of its warps
};

// row_bytes: of a query's or key's channels; async: global memory to shared memory without registers.
constexpr BackwardTileSizes backward_tiles(int row_bytes, int element_bytes, bool async) {
  BackwardTileSizes tiles{};
  // Two tiles of four warps would fill the 64 KiB of compute capability 7.5 from 129 bytes a row on, two tiles of two
  // warps from 257 on.
  tiles.warps = row_bytes <= 128 ? 4 : row_bytes <= 256 ? 2 : 1;
  tiles.owned = 32 * tiles.warps;
  // Two stages of two such tiles are at most 72 KiB.
  tiles.streamed = row_bytes <= 64 ? 128 : row_bytes <= 128 ? 64 : 32;
  // 64, because dS of 128 keys lies in shared memory twice: two blocks of 67 to 109 KiB on a multiprocessor.
  tiles.fused_streamed = 64;
  tiles.dbias2_queries = tiles.owned;
  // (1,256,1024,4,64), kernel_dbias2: 32 x 64 scores a warp, left operands from shared memory, 1.87 ms; 32 x 32 with
  // operands in registers 2.22. Compute capability 7.5 has too little shared memory for it.
  const bool is_wide = element_bytes == 2 && async && row_bytes > 64 && row_bytes <= 128;
  const bool is_broad = row_bytes <= 64 || is_wide;
  tiles.dbias2_stripes = is_broad ? 2 : 1;
  tiles.dbias2_keys = is_broad ? 128 : row_bytes <= 128 ? 64 : 32;
  return tiles;
}

}  // namespace ds4s
