// dq, math.md (13), and dbias2, math.md (16), of a tile of queries, from dS that all warps of a block of keys have
// stored in shared memory.
//
//   DsTile      dS of a tile, 16 bits, [keys][queries]
//   DqProduct   dq += dS K, dbias2 += dS, for 16 queries a warp and all keys of the block
#pragma once

#include "common/atomic_add.h"
#include "sm80/backward/dq_accumulator_pool.h"
#include "sm80/backward/score_tile.h"
#include "sm80/backward/transposed_gradient.h"

namespace ds4s {

// The memory to which a block adds.
struct DqOutputs {
  float* accumulator;
  float* dbias2;  // query 0, the block's first key
  int32_t dbias2_row_bytes;
  int32_t dbias2_keys;  // dbias2 gets the keys before this one, all visible ones among them; 0: dbias2 is not wanted
  int32_t before;       // the previous pair with the same accumulator; negative: none
  int32_t num_blocks;   // blocks that add to dq of the pair
};

template <typename Config>
struct DsTile {
  using scalar_t = typename Config::scalar_t;
  using Mma = typename Config::Mma;
  static constexpr int kQueries = Config::kStreamed, kKeys = Config::kOwned;
  static constexpr int kBytes = kKeys * kQueries * int(sizeof(scalar_t));

  // The order in which 16 keys are contracted: a lane's four keys are neighbours.
  CUTLASS_HOST_DEVICE static constexpr int key_at(int half, int c) { return 4 * (c >> 1) + 2 * half + (c & 1); }

  // Permutes chunks of eight queries, so that neither the stores below nor ldmatrix of eight keys key_at(half, 0 .. 7)
  // have bank conflicts.
  CUTLASS_HOST_DEVICE static constexpr int swizzle(int key) { return (key & 1) << 2 | ((key >> 2) & 3); }
  CUTLASS_HOST_DEVICE static constexpr int offset(int key, int chunk) {
    static_assert(kQueries % 64 == 0, "the swizzle permutes eight chunks");
    return key * kQueries + (chunk ^ swizzle(key)) * 8;
  }

  // Clears all queries of a warp's 32 keys.
  CUTLASS_DEVICE static void clear(scalar_t* sDs, int warp_row, int lane) {
    CUTLASS_PRAGMA_UNROLL
    for (int chunk = 0; chunk < kQueries / 8; ++chunk) {
      *reinterpret_cast<uint4*>(sDs + offset(warp_row + lane, chunk)) = make_uint4(0, 0, 0, 0);
    }
  }
  // The first offset of a lane in a warp's 32 keys x 32 queries, for store().
  CUTLASS_DEVICE static int lane_offset(int warp_row, int lane) {
    return offset(warp_row + Mma::row_of_lane(lane), lane & 3);
  }
  // lane % 4, from lane_offset().
  CUTLASS_DEVICE static int quad_lane(int lane_offset) {
    static_assert(kQueries == 64 && swizzle(4) == 1 && swizzle(8) == 2, "bits of a key's row and of its chunk");
    return (lane_offset ^ lane_offset >> 5) >> 3 & 3;
  }
  // Stores 32 keys x 32 queries. The swizzle of the eighth key from here on differs by 2, that of stripes by 4.
  CUTLASS_DEVICE static void store(scalar_t* sDs, int lane_offset, const ScoreWords& words, int stripe) {
    static_assert(Mma::kRowStep == 8 && swizzle(8) == 2 && swizzle(16) == 0 && kQueries == 64, "swizzled offsets");
    CUTLASS_PRAGMA_UNROLL
    for (int lane_row = 0; lane_row < Mma::kLaneRows; ++lane_row) {
      const uint32_t (&w)[4] = words.w[lane_row];
      const int begin = (lane_offset ^ 8 * (4 * stripe)) ^ 8 * (2 * (lane_row & 1));
      *reinterpret_cast<uint4*>(sDs + begin + Mma::kRowStep * lane_row * kQueries) = make_uint4(w[0], w[1], w[2], w[3]);
    }
  }
};

// A lane's part of the product. A warp computes 16 queries and all channels, or, where K's channels are many
// (kQueryTiles = 2), 32 queries and half of the channels: at D = 64 it reads 4 + 4 KiB of dS and K instead of 2 + 8 for
// 32 keys of a tile.
template <typename Config>
class DqProduct {
  using scalar_t = typename Config::scalar_t;
  using Ds = DsTile<Config>;
  using KTile = Tile<scalar_t, Config::kOwned, Config::kHeadDim>;
  using Layout = DqAccumulatorLayout<Config::kHeadDim>;
  static constexpr int kQueryTiles = Config::kHeadDim >= 64 ? 2 : 1;  // of 16 queries, for each warp
  static constexpr int kTiles = Config::kHeadDim / 8 / kQueryTiles;   // of 8 channels
  static constexpr int kParts = kQueryTiles;                          // of channels, and of the keys of dbias2
  static constexpr int kPartKeys = Config::kOwned / kParts;
  static constexpr int kSteps = kPartKeys / 16;
  static constexpr int kChunkSteps = 4;  // steps whose dS is in registers at a time
  static_assert(Ds::kQueries == Layout::kRows * Config::kWarps, "16 queries for each warp");
  static_assert(kSteps % kChunkSteps == 0 && kTiles % 2 == 0, "whole chunks and pairs");
  using FragDs = uint32_t[4];  // queries q, q + 8 of keys 0, 1 (mod 4), then of keys 2, 3

 public:
  // tile_q: the tile's first query. Adds dq, dbias2, or both.
  template <bool kAddsDq, bool kAddsDbias2>
  CUTLASS_DEVICE static void run(const scalar_t* sDs, const scalar_t* sK, const DqOutputs& where, int tile_q) {
    const DqOutputs outputs = where;
    // Computed for each tile: kept through the loop, they would be in local memory, whose loads wait for the additions.
    const int thread = int(ptx::thread_x()), lane = thread & 31;
    const int of_part = kParts == 1 ? 0 : uniform(thread / 32) % kParts;
    const int warp_row = thread / 32 / kParts * kQueryTiles * Layout::kRows, chunk = warp_row / 8 + ((lane >> 3) & 1);
    const int lane_ds = Ds::offset(Ds::key_at(lane >> 4, lane & 7), chunk);
    const int lane_k = KTile::offset(Ds::key_at((lane >> 3) & 1, lane & 7), 8 * (lane >> 4) + 8 * kTiles * of_part);
    const int first_row = tile_q + warp_row, q = first_row + (lane >> 2);
    const bool odd = lane & 4;
    // Rows q & ~1 and (q & ~1) + 8 of dbias2; computed even if dbias2 is null, but then not used.
    char* rows[kQueryTiles][2];
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < 2 * kQueryTiles; ++half) {
      rows[half / 2][half % 2] = reinterpret_cast<char*>(outputs.dbias2) +
                                 int64_t((q & ~1) + 8 * half) * outputs.dbias2_row_bytes +
                                 (of_part * kPartKeys + 4 * (lane & 3) + (odd ? 16 : 0)) * sizeof(float);
    }
    float acc[kQueryTiles][kTiles][4] = {};
    CUTLASS_PRAGMA_UNROLL
    for (int part = 0; part < (kAddsDq ? kParts : 1); ++part) {
      const int part_key = kParts == 1 ? 0 : (of_part ^ part) * kPartKeys;  // first those keys whose dbias2 it adds
      CUTLASS_PRAGMA_UNROLL
      for (int first = 0; first < kSteps; first += kChunkSteps) {
        FragDs a[kQueryTiles][kChunkSteps];
        CUTLASS_PRAGMA_UNROLL
        for (int step = 0; step < kChunkSteps; ++step) {
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < kQueryTiles; ++i) {
            // Two chunks of queries on; warp_row has no such bit.
            const int ds = (lane_ds ^ Layout::kRows * i) + part_key * Ds::kQueries;
            ptx::ldmatrix_trans(a[i][step], sDs + ds + 16 * (first + step) * Ds::kQueries);
          }
        }
        if constexpr (kAddsDq) {
          CUTLASS_PRAGMA_UNROLL
          for (int step = 0; step < kChunkSteps; ++step) {
            CUTLASS_PRAGMA_UNROLL
            for (int tile = 0; tile < kTiles; tile += 2) {
              uint32_t b[4];
              ptx::ldmatrix_trans(b,
                                  sK + lane_k + KTile::offset(part_key) + KTile::offset(16 * (first + step), 8 * tile));
              CUTLASS_PRAGMA_UNROLL
              for (int i = 0; i < kQueryTiles; ++i) {
                ptx::mma_16x8x16<scalar_t, typename Config::ArchTag>(acc[i][tile], a[i][step], b);
                ptx::mma_16x8x16<scalar_t, typename Config::ArchTag>(acc[i][tile + 1], a[i][step], b + 2);
              }
            }
          }
        }
        if constexpr (kAddsDbias2) {
          if (part > 0 || of_part * kPartKeys + 16 * first >= outputs.dbias2_keys) continue;
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < kQueryTiles; ++i) {
            add_dbias2(rows[i], outputs.dbias2_row_bytes, a[i], 16 * first, odd);
          }
        }
      }
    }
    if constexpr (!kAddsDq) return;
    float* dq = outputs.accumulator + first_row * Config::kHeadDim + Layout::lane_offset(lane) +
                Layout::tile_offset(kTiles * of_part);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kQueryTiles; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int tile = 0; tile < kTiles; ++tile) {
        atomic_add_vector(dq + i * Layout::kRows * Config::kHeadDim + Layout::tile_offset(tile), acc[i][tile]);
      }
    }
  }

 private:
  // Lanes of queries q and q ^ 1 exchange every second step: then a warp adds to 128 neighbouring bytes of four rows at
  // a time instead of 64 of eight (4.20 instead of 4.51 ms for the whole backward at (1,768,768,4,32)).
  CUTLASS_DEVICE static void add_dbias2(char* const (&rows)[2], int row_bytes, const FragDs (&a)[kChunkSteps], int key,
                                        bool odd) {
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
          atomic_add_vector(reinterpret_cast<float*>(rows[half] + row * int64_t(row_bytes)) + key + 16 * step, v);
        }
      }
    }
  }
};

}  // namespace ds4s
