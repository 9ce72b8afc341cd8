// The configuration of the forward kernel: tile sizes, the layout of shared memory, the registers of each warpgroup.
#pragma once

#include "common/arch.h"
#include "sm90/forward/args.h"
#include "sm90/forward/mask.h"
#include "sm90/forward/tile_sizes.h"
#include "sm90/mma/pipeline.h"

namespace ds4s::sm90 {

template <typename scalar_t_,  // half_t, bfloat16_t
          int kHeadDim_,       // tier of D and Dv
          bool kHasBias1_,     // bias1 is given
          bool kHasBias2_,     // bias2 is given
          typename Tiles>      // ForwardTiles
struct ForwardConfig {
  using scalar_t = scalar_t_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kHasBias1 = kHasBias1_, kHasBias2 = kHasBias2_;
  static constexpr int kRows = Tiles::kRows, kQueryTiles = Tiles::kQueryTiles;
  static constexpr int kStages = Tiles::kStages, kBlocksPerSm = Tiles::kBlocksPerSm;
  static constexpr bool kPipelined = Tiles::kPipelined;
  static constexpr int kSplits = Tiles::kSplits;  // warpgroups of a tile: each computes every kSplits-th step
  static_assert(kSplits == 1 || kPipelined, "attend() takes all steps");
  static_assert(kStages >= 2 * kSplits, "a warpgroup reads V of a step until the end of its next one");

  static constexpr int kQueries = 64;  // rows of one wgmma
  static constexpr int kKeys = 64;     // keys a step
  static constexpr int kBlockQueries = kQueries * kQueryTiles;
  static constexpr int kTiles = kRows * kQueryTiles;
  static constexpr int kWarpgroups = kTiles * kSplits;         // consumers
  static constexpr int kNumThreads = 128 * (kWarpgroups + 1);  // the last warpgroup produces
  // float16 has few subnormals, and its largest bias is finite with any factor (args.h).
  static constexpr bool kScalesQ = cutlass::platform::is_same<scalar_t, cutlass::bfloat16_t>::value;

  using Registers = RegisterShares<kWarpgroups, kBlocksPerSm>;

  using QTile = SwizzledTile<kQueries, kHeadDim>;
  using KTile = SwizzledTile<kKeys, kHeadDim>;  // V's as well
  using BiasTile = SwizzledTile<kQueries, kKeys>;
  // One TMA load fills all tiles of a kind, in the order of Shared. Tiles of wider heads consist of two boxes.
  static constexpr bool kOneLoad = QTile::kNumBoxes == 1;
  using QBox = SwizzledTile<kOneLoad ? kBlockQueries : kQueries, kHeadDim>;
  using BiasBox = SwizzledTile<kBlockQueries, kKeys>;
  static constexpr int kBoxRows = kOneLoad ? kRows : 1;
  static_assert(kBlockQueries <= 256, "a box has up to 256 rows");
  static constexpr int kQSteps = (kHeadDim + 15) / 16;

  // f (bias1 - shift); -inf past the last key
  using Bias1Stage = float[kHasBias1 ? kRows : 1][kHasBias1 ? kKeys : 4];
  // The index of a key's value: the four values of a lane among 16 keys are neighbours.
  CUTLASS_DEVICE static int bias1_index(int key) {
    return (key & ~15) + (key >> 1 & 3) * 4 + (key >> 3 & 1) * 2 + (key & 1);
  }
  // A stage of the pipeline: a step's keys with their biases, and its values, each with barriers. All of it has
  // constant offsets from one address.
  struct Stage {
    alignas(1024) uint8_t k[kRows][KTile::kBytes];
    alignas(1024) uint8_t bias2[kHasBias2 ? kQueryTiles : 1][kHasBias2 ? BiasTile::kBytes : 16];
    alignas(1024) uint8_t v[kRows][KTile::kBytes];
    alignas(16) Bias1Stage bias1;
    FullBarrier k_full, v_full;
    EmptyBarrier k_empty, v_empty;
  };
  // V of a step is loaded with the keys of the next one, whose barrier counts the bytes of both: consumers need it
  // then, and wait once a step. v_full counts V of a tile's last step. Where warpgroups divide the keys, each v_full
  // counts V.
  static constexpr bool kLoadsValuesLater = kSplits == 1;
  using Mask = TileMask<kRows>;
  static_assert(kStepKeys == kKeys, "what is visible is asked for step by step");
  static constexpr int kScanningWarps = kRows < 2 ? 1 : 2;
  // Warps that read a row n of the first tile (first_mask.h).
  static constexpr int kFirstWarps = 4 * kQueryTiles * kSplits;
  // What the producer publishes to the consumers about a tile, together with its Q.
  struct Visible {
    int num_steps;          // loaded steps: those with a visible key, and num_hidden
    int num_hidden;         // 1: the first loaded step was loaded ahead, and all of its keys are hidden
    int tail_units;         // 1 or 2: only the first 16 tail_units keys of the last step are visible
    uint32_t rows;          // a bit for each row n of the tile
    uint32_t visible_rows;  // a bit for each row n that sees a key
  };
  // What a warpgroup has computed of a tile, [element][thread].
  struct Partial {
    float o[kHeadDim / 2][128];
    float m[2][128], l[2][128];
  };
  struct NoPartials {};
  using Partials = cute::conditional_t<(kSplits > 1), Partial[kTiles][kSplits > 1 ? kSplits - 1 : 1], NoPartials>;
  struct Shared {
    alignas(1024) uint8_t q[2][kTiles][QTile::kBytes];  // this tile's and the next one's; O leaves through it
    Stage stages[kStages];
    Mask mask[2];  // this tile's and the next one's
    FirstMaskParts<kRows, kFirstWarps> first_mask;
    Visible visible[2];
    EmptyBarrier mask_full[2], mask_empty[2];
    FullBarrier q_full[2];
    EmptyBarrier q_empty[2];
    Partials partials;
  };
  static constexpr int kSharedBytes = int(sizeof(Shared));
  static_assert(kSharedBytes * kBlocksPerSm <= 227 * 1024, "a multiprocessor of 9.0 has 227 KiB for blocks");

  // One tile of a block: kRows rows n from `row` on, kBlockQueries queries from `query` on.
  struct Coordinates {
    int query, head, row, batch;
    int rows = (1 << kRows) - 1;  // a bit for each of the rows n: half a tile has one of two

    CUTLASS_DEVICE bool has_row(int r, const ForwardArgs& args) const {
      return row + r < args.N && (kRows == 1 || (rows >> r & 1) != 0);
    }
  };
  CUTLASS_DEVICE static Coordinates locate(const ForwardArgs& args, int tile) {
    Coordinates at;
    if (kRows == 2 && tile >= args.first_half) {
      const int past = tile - args.first_half;
      at.rows = 1 << past % 2, tile = args.first_half + past / 2;
    }
    int band, group;
    args.by_band_tiles(band, tile, tile);
    if (band + 1 < args.num_bands) {
      args.by_groups(tile, group, tile);
    } else {
      args.by_last_groups(tile, group, tile);
    }
    args.by_query_blocks(at.head, at.query, tile);
    args.by_row_groups(at.batch, at.row, band * args.by_groups.divisor + group);
    at.query *= kBlockQueries, at.row *= kRows;
    return at;
  }

  // The number of steps of a block's first tile that are loaded before its mask is known.
  CUTLASS_DEVICE static int num_ahead(const ForwardArgs& args, int tile) {
    return args.has_mask() && tile == int(blockIdx.x) ? 1 : 0;
  }

  using Pipe = PipelineState<kStages>;
  using QPipe = PipelineState<2>;  // for Q and masks
};

}  // namespace ds4s::sm90
