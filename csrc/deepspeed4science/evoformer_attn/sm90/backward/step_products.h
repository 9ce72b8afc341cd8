// The products of one step of kernel_dq_dkdv and their operands, for the mainloops of mainloop.h and
// mainloop_dq_global.h. If the kernel owns keys, all matrices are the transposes of their names: rows of s are keys,
// columns queries.
#pragma once

#include "sm90/backward/config.h"

namespace ds4s::sm90 {

template <typename Config>
struct StepProducts {
  using scalar_t = typename Config::scalar_t;
  using Shared = typename Config::Shared;
  using Stage = typename Config::Stage;
  using OwnedTile = typename Config::OwnedTile;
  using StreamedTile = typename Config::StreamedTile;
  using BiasTile = typename Config::BiasTile;
  static constexpr int kHeadDim = Config::kHeadDim, kColumns = Config::kColumns;
  static constexpr int kHeadSteps = Config::kHeadSteps, kColumnSteps = Config::kColumnSteps;
  static constexpr bool kKeys = Config::kKeys, kHasBias2 = Config::kHasBias2, kDqInShared = Config::kDqInShared;

  using Scores = float[kColumns / 2];
  using Packed = uint32_t[kColumns / 4];
  using Result = float[kHeadDim / 2];

  // The results of one owned tile, in registers.
  struct Results {
    float row[2];                          // the term of the exponent that belongs to rows
    Result of_ds;                          // dk or dq
    float of_p[kKeys ? kHeadDim / 2 : 2];  // dv
    float sums[2];                         // this lane's share of dS summed over columns
    float* dbias2;  // where dS is stored, too, if args.stores_dbias2: this lane's first four keys
    int keys_left;  // keys from there on
  };

  // Start addresses of a warpgroup's operands, streamed ones in stage 0.
  struct Operands {
    uint32_t owned, owned_tiles, streamed, products, ones;
    static constexpr uint32_t kNextStage = sizeof(Stage) >> 4;
    static constexpr uint32_t kNextProducts = Config::kRows * Config::kProductsBytes >> 4;  // of streamed queries
    static constexpr uint32_t kOwnedSecond = OwnedTile::kBytes >> 4, kStreamedSecond = StreamedTile::kBytes >> 4;

    CUTLASS_DEVICE Operands(const Shared& shared, int buffer, const ConsumerCoord& at)
        : owned(start_address(&shared.owned[buffer][at.warpgroup])),
          owned_tiles(start_address(shared.owned[buffer])),
          streamed(start_address(&shared.stages[0].streamed[at.row])),
          products(first_products(shared, buffer, at)),
          ones(start_address(shared.ones)) {}
    CUTLASS_DEVICE static uint32_t first_products(const Shared& shared, int buffer, const ConsumerCoord& at) {
      uint32_t start;
      if constexpr (Config::kHasDeltaTerms) {
        start = start_address(shared.delta.terms);
      } else {
        start = start_address(shared.products.tiles[kKeys ? at.row : buffer * Config::kWarpgroups + at.warpgroup]);
      }
      return Config::kPairsRows ? start & 0x3fff : start;  // in a cluster, an address has the block's number, too
    }
  };

  // Offset of the row of an 8x8 matrix whose address a lane passes to ldmatrix.
  CUTLASS_DEVICE static uint32_t bias2_offset(const ConsumerCoord& at) {
    return kKeys ? BiasTile::offset(at.lane % 8 + at.lane / 16 * 8, 2 * at.warp + at.lane / 8 % 2)
                 : BiasTile::offset(16 * at.warp + at.lane % 16, at.lane / 16);
  }
  CUTLASS_DEVICE static uint32_t bias2_address(const Shared& shared, int stage, const ConsumerCoord& at) {
    return shared_address(shared.stages[stage].bias2[kHasBias2 || kDqInShared ? at.tile : 0]) + bias2_offset(at);
  }
  // The initial value of s, math.md (1), (8): biases and the columns' terms.
  CUTLASS_DEVICE static void begin(Scores& s, const Shared& shared, int stage, float unit, const ConsumerCoord& at) {
    const float* columns = shared.scores[stage][at.row] + 2 * (at.lane % 4);
    uint32_t bias2 = bias2_address(shared, stage, at);
    CUTLASS_PRAGMA_UNROLL
    for (int g = 0; g < kColumnSteps; ++g) {
      uint32_t pairs[4];
      if constexpr (kHasBias2) {
        if constexpr (kKeys) {
          ldmatrix_trans(pairs, bias2 + g * 16 * BiasTile::kRowBytes);
        } else {  // offset(row, 2 g + x) is offset(row, x) ^ 32 g: the tile begins at 1024 bytes
          ldmatrix(pairs, (bias2 ^ (32 * (g % 4))) + g / 4 * BiasTile::kBoxBytes);
        }
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4; ++i) {
        int x = 8 * g + 2 * i;
        float2 value = *reinterpret_cast<const float2*>(columns + 16 * g + 8 * (i >> 1));
        if constexpr (kHasBias2) {
          float2 b2 = ptx::unpack<scalar_t>(pairs[i]);
          value.x = fmaf(b2.x, unit, value.x), value.y = fmaf(b2.y, unit, value.y);
        }
        s[x] = value.x, s[x + 1] = value.y;
      }
    }
    fence_registers(s);
  }

  // dp = dO V^T - delta, math.md (10), (11)
  CUTLASS_DEVICE static void start_products(Scores& dp, const Operands& operands, int stage, int step) {
    if constexpr (Config::kHasDeltaTerms) {
      Rank1Terms::start_dense_columns<kColumns>(dp, operands.ones, operands.products + step * kColumns);
    } else if constexpr (Config::kDenseProducts) {
      Rank1Terms::start_dense_columns<kColumns>(dp, operands.ones, operands.products + stage * Operands::kNextProducts);
    } else if constexpr (kKeys) {
      Rank1Terms::start_columns<kColumns>(dp, operands.ones, operands.products + stage * Operands::kNextProducts);
    } else {
      Rank1Terms::start_rows<kColumns>(dp, operands.products, operands.ones);
    }
    start_scores(dp, operands.owned + Operands::kOwnedSecond,
                 operands.streamed + stage * Operands::kNextStage + Operands::kStreamedSecond);
  }
  // x += owned streamed^T
  CUTLASS_DEVICE static void start_scores(Scores& x, uint32_t owned, uint32_t streamed) {
    CUTLASS_PRAGMA_UNROLL
    for (int step = 0; step < kHeadSteps; ++step) {
      wgmma<scalar_t, kColumns, Major::K>(x, OwnedTile::descriptor(owned + OwnedTile::columns_step(step)),
                                          StreamedTile::descriptor(streamed + StreamedTile::columns_step(step)));
    }
    wgmma_commit();
  }
  // result += x streamed: math.md (12), (13), (14)
  CUTLASS_DEVICE static void start_result(Result& result, const Packed& x, uint32_t streamed) {
    CUTLASS_PRAGMA_UNROLL
    for (int step = 0; step < kColumnSteps; ++step) {
      wgmma<scalar_t, kHeadDim, Major::MN>(result, x + 4 * step,
                                           StreamedTile::descriptor(streamed + StreamedTile::rows_step(step)));
    }
  }

  CUTLASS_DEVICE static void pack(Packed& packed, const Scores& x) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kColumns / 4; ++i) packed[i] = ptx::pack<scalar_t>(x[2 * i], x[2 * i + 1]);
  }

  // Keeps operands in their registers until here, for nvcc's front end. ptxas's result is checked in the machine code
  // (tests/system/test_cuda_compile.py); docs/kernels/sm90.md, Registers of a product.
  CUTLASS_DEVICE static void keep(Packed& x) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kColumns / 4; ++i) asm volatile("" : "+r"(x[i])::"memory");
  }
};

}  // namespace ds4s::sm90
