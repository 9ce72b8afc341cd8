// dq, math.md (13), and dbias2, math.md (16), of a tile of queries, from dS that all warps of a block of keys have
// stored in shared memory.
//
//   dq += dS K, dbias2 += dS, for 16 queries a warp and all keys of the block
#pragma once

#include "common/atomic_add.h"
#include "sm80/backward/dq_accumulator_pool.h"
#include "sm80/backward/row_partner.h"
#include "sm80/backward/score_tile.h"

namespace ds4s {

// The memory to which a block adds.
struct DqOutputs {
  float* accumulator;
  float* dbias2;  // query 0, the block's first key
  int32_t dbias2_row_bytes;
  int32_t dbias2_begin, dbias2_end;  // the keys whose dbias2 it adds; end = 0: dbias2 is not wanted
  int32_t has_partner;               // dS of the row partner is added to them as well (row_partner.h)
  int32_t before;      // the previous pair with the same accumulator, if it was not done at first; negative: none
  int32_t num_others;  // in the last block that adds to dq of the pair: the number of those before it; else negative
};

// What DqProduct::run adds: of dbias2 all of a warp's queries, or a half of them.
enum class Additions { kDq, kDqAndDbias2, kDbias2, kDbias2FirstHalf, kDbias2SecondHalf };

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
  static constexpr int kParts = kQueryTiles;                          // of channels
  static constexpr int kKeyParts = Config::kPairsRows ? 2 : kParts;   // of keys; dbias2 of one may be another's task
  static constexpr int kPartKeys = Config::kOwned / kKeyParts;
  static constexpr int kSteps = kPartKeys / 16;
  static constexpr int kChunkSteps = 4;  // steps whose dS is in registers at a time
  static_assert(Ds::kQueries == Layout::kRows * Config::kWarps, "16 queries for each warp");
  static_assert(kSteps % kChunkSteps == 0 && kTiles % 2 == 0, "whole chunks and pairs");
  using FragDs = uint32_t[4];  // queries q, q + 8 of keys 0, 1 (mod 4), then of keys 2, 3

 public:
  // more: the row partner sends another tile to the same buffer.
  template <Additions kWhat>
  CUTLASS_DEVICE static void run(const scalar_t* sDs, const scalar_t* sK, const DqOutputs& where, int tile,
                                 PartnerBuffers<Config>* partner, bool more) {
    constexpr bool kAddsDq = kWhat == Additions::kDq || kWhat == Additions::kDqAndDbias2;
    constexpr bool kAddsDbias2 = kWhat != Additions::kDq;
    // The query tiles whose dbias2 is added.
    constexpr int kBegin = kWhat == Additions::kDbias2SecondHalf ? kQueryTiles / 2 : 0;
    constexpr int kEnd = kWhat == Additions::kDbias2FirstHalf ? kQueryTiles / 2 : kQueryTiles;
    static_assert(kBegin < kEnd, "a half is not empty");
    const DqOutputs outputs = where;
    // Computed for each tile: kept through the loop, they would be in local memory, whose loads wait for the additions.
    const int thread = int(ptx::thread_x()), lane = thread & 31;
    const int of_part = kParts == 1 ? 0 : uniform(thread / 32) % kParts;
    const int warp_row = thread / 32 / kParts * kQueryTiles * Layout::kRows, chunk = warp_row / 8 + ((lane >> 3) & 1);
    const int lane_ds = Ds::offset(Ds::key_at(lane >> 4, lane & 7), chunk);
    const int lane_k = KTile::offset(Ds::key_at((lane >> 3) & 1, lane & 7), 8 * (lane >> 4) + 8 * kTiles * of_part);
    const int first_row = tile * Ds::kQueries + warp_row, q = first_row + (lane >> 2);
    const bool odd = lane & 4;
    // Rows q & ~1 and (q & ~1) + 8 of dbias2; computed even if dbias2 is null, but then not used.
    char* rows[kQueryTiles][2];
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < 2 * kQueryTiles; ++half) {
      rows[half / 2][half % 2] = reinterpret_cast<char*>(outputs.dbias2) +
                                 int64_t((q & ~1) + 8 * half) * outputs.dbias2_row_bytes +
                                 (4 * (lane & 3) + (odd ? 16 : 0)) * sizeof(float);
    }
    float acc[kQueryTiles][kTiles][4] = {};
    // The part whose dbias2 is added comes first, but with a row partner, whose dS has to arrive, last.
    const int first_part = Config::kPairsRows ? (outputs.dbias2_begin == 0) : of_part;
    CUTLASS_PRAGMA_UNROLL
    for (int part = 0; part < (kAddsDq || Config::kPairsRows ? kKeyParts : 1); ++part) {
      const int part_key = kKeyParts == 1 ? 0 : (first_part ^ part) * kPartKeys;
      CUTLASS_PRAGMA_UNROLL
      for (int first = 0; first < kSteps; first += kChunkSteps) {
        FragDs a[kQueryTiles][kChunkSteps];
        CUTLASS_PRAGMA_UNROLL
        for (int step = 0; step < kChunkSteps; ++step) {
          CUTLASS_PRAGMA_UNROLL
          for (int i = kAddsDq ? 0 : kBegin; i < (kAddsDq ? kQueryTiles : kEnd); ++i) {
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
        if constexpr (kAddsDbias2 && Config::kPairsRows) {
          if (part == 0 && outputs.has_partner) continue;
          FragDs theirs[kChunkSteps] = {};
          if (outputs.has_partner) {
            const scalar_t* sTheirs = RowPartner<Config>::receive(partner, tile, thread) + lane_ds;
            CUTLASS_PRAGMA_UNROLL
            for (int step = 0; step < kChunkSteps; ++step) {
              ptx::ldmatrix_trans(theirs[step], sTheirs + 16 * step * Ds::kQueries);
            }
          }
          if (part_key < outputs.dbias2_end) {
            add_dbias2(rows[0], outputs.dbias2_row_bytes, a[0], theirs, part_key, odd);
          }
          if (outputs.has_partner && more) RowPartner<Config>::release(partner, tile, lane);
        } else if constexpr (kAddsDbias2) {
          if (part > 0 || part_key + 16 * first >= outputs.dbias2_end) continue;
          CUTLASS_PRAGMA_UNROLL
          for (int i = kBegin; i < kEnd; ++i) {
            add_dbias2(rows[i], outputs.dbias2_row_bytes, a[i], a[i], part_key + 16 * first, odd);
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
  // Adds a, with a row partner the sum of a and theirs. Lanes of queries q and q ^ 1 exchange every second step: then a
  // warp adds to 128 neighbouring bytes of four rows at a time instead of 64 of eight (4.20 instead of 4.51 ms for the
  // whole backward at (1,768,768,4,32)).
  CUTLASS_DEVICE static void add_dbias2(char* const (&rows)[2], int row_bytes, const FragDs (&a)[kChunkSteps],
                                        const FragDs (&theirs)[kChunkSteps], int key, bool odd) {
    CUTLASS_PRAGMA_UNROLL
    for (int step = 0; step < kChunkSteps; step += 2) {
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < 2; ++half) {
        float v[2][4], w[2][4];
        exchange(v, a[step], a[step + 1], half, odd);
        if constexpr (Config::kPairsRows) {
          exchange(w, theirs[step], theirs[step + 1], half, odd);
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < 8; ++i) v[i / 4][i % 4] += w[i / 4][i % 4];
        }
        CUTLASS_PRAGMA_UNROLL
        for (int row = 0; row < 2; ++row) {
          atomic_add_vector(reinterpret_cast<float*>(rows[half] + row * int64_t(row_bytes)) + key + 16 * step, v[row]);
        }
      }
    }
  }
  // v: four keys of rows q & ~1 and q | 1.
  CUTLASS_DEVICE static void exchange(float (&v)[2][4], const FragDs& even_step, const FragDs& odd_step, int half,
                                      bool odd) {
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < 2; ++x) {
      const uint32_t even = even_step[half + 2 * x], uneven = odd_step[half + 2 * x];
      const uint32_t other = ptx::shfl_xor(odd ? even : uneven, 4);
      const float2 low = ptx::unpack<scalar_t>(odd ? other : even), high = ptx::unpack<scalar_t>(odd ? uneven : other);
      v[0][2 * x] = low.x, v[0][2 * x + 1] = low.y, v[1][2 * x] = high.x, v[1][2 * x + 1] = high.y;
    }
  }
};

}  // namespace ds4s
