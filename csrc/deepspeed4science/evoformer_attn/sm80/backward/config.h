// The configurations of the backward's kernels, each choice with its reason (docs/kernels/sm80.md has the budgets).
#pragma once

#include "sm80/backward/args.h"
#include "sm80/backward/tile_sizes.h"

namespace ds4s {

// The gradients that a kernel of kernel_dq_dkdv.h computes: dq of owned queries, or dk, dv and dbias1 of owned keys.
enum class Gradients { kDq, kDkDv, kDk, kDv };

template <typename scalar_t_,  // half_t; bfloat16_t (Sm80); float
          typename ArchTag_,   // cutlass::arch::Sm70, Sm75, Sm80
          bool kAligned_,      // pointers, strides, D and Dv are multiples of 16 bytes
          int kHeadDim_,       // tier: at least D and Dv, a multiple of 16
          bool kHasBias2_,     // bias2 is given
          bool kTf32_>         // float on Sm80: TF32 instead of full precision
struct BackwardConfig {
  using scalar_t = scalar_t_;
  using ArchTag = ArchTag_;
  using Mma = WarpMma<scalar_t, ArchTag, kTf32_>;
  using Traits = ArchTraits<ArchTag>;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kAligned = kAligned_;
  static constexpr bool kHasBias2 = kHasBias2_;
  static constexpr bool kAsync = Traits::kHasCpAsync && kAligned;
  static constexpr int kMaxStages = kAsync ? 2 : 1;  // the launcher takes one where shared memory is too small for two

  static constexpr bool kTf32 = kTf32_;
  // Full precision: sums are taken with fewer roundings (score_tile.h).
  static constexpr bool kExact = sizeof(scalar_t) == 4 && !kTf32_;
  // The type that holds lse or delta of a query. In full precision, where one float has too few digits: the largest
  // score and the sum, and delta in two parts (statistics.h).
  using QueryValue = typename cutlass::platform::conditional<kExact, float2, float>::type;

  // The transposed copy of bias2 consists of tiles of 32 x 32 (TiledBias2Stripe); else of rows.
  static constexpr bool kTilesBias2 = Mma::kVectorsInOrder;

  static constexpr int kChannelBytes = kHeadDim * int(sizeof(scalar_t));
  static_assert(kHeadDim % 16 == 0 && kHeadDim <= 256, "tiers are multiples of 16 up to 256");
  static_assert(kHeadDim <= 128 || sizeof(scalar_t) == 2, "a warp copies rows of 512 bytes at most");
  // The number of channels of dq, dk or dv that a block computes, and of registers a lane; kParts blocks compute the
  // same scores.
  static constexpr int kPartChannels = kHeadDim <= 128 ? kHeadDim : 128;
  static constexpr int kParts = kHeadDim / kPartChannels;
  static_assert(kHeadDim % kPartChannels == 0, "whole parts");

  static constexpr BackwardTileSizes kTiles = backward_tiles(kChannelBytes, int(sizeof(scalar_t)), Traits::kHasCpAsync);
  static constexpr int kWarps = kTiles.warps;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kLoadThreads = kThreads >= 64 ? kThreads / 2 : kThreads;
  static constexpr int kOwned = kTiles.owned;
  static constexpr int kStreamed = kTiles.streamed;
  static constexpr int kStripes = kStreamed / 32;

  // One kernel for all gradients, fused, where atomic additions of four floats exist. With single additions it takes
  // 9.1 to 14.1 ms at (1,768,768,4,32) instead of 4.2; the three separate kernels take 5.6. Without bias2 nothing is
  // gained.
  static constexpr bool kCanFuse =
      has_vector_atomics() && kAsync && kHasBias2 && sizeof(scalar_t) == 2 && kHeadDim <= 64;

  // dk and dv together need 2 kHeadDim registers a lane; past 128 registers two kernels compute one each.
  static constexpr bool kSplitsKeys = kHeadDim > 64;
};

template <typename Config, Gradients kWhat_, bool kWantsDbias1_ = false>
struct OwnedTileConfig : Config {
  static constexpr Gradients kWhat = kWhat_;
  static constexpr bool kOwnsKeys = kWhat != Gradients::kDq;                              // rows are keys
  static constexpr bool kWantsDv = kWhat == Gradients::kDkDv || kWhat == Gradients::kDv;  // P is an operand
  static constexpr bool kWantsDs = kWhat != Gradients::kDv;                               // dS is an operand
  // Without dbias1 an instantiation without its sums runs: dk and dv in 2.27 instead of 2.41 ms (1,768,768,4,32).
  static constexpr bool kWantsDbias1 = kWantsDbias1_;
  static constexpr bool kFusesDq = false;
  static constexpr bool kPairsRows = false;
  static constexpr bool kKeepsAddresses = false;
  static constexpr bool kKeepsThread = true;
  static constexpr bool kTransposesDv = false;
  static constexpr bool kStaggers = false;
  static constexpr bool kTransposesBias2 = false;
  static constexpr int kUnrolledStripes = 1;
  static_assert(!kWantsDbias1 || (kOwnsKeys && kWantsDs), "dbias1 is a sum of a key's dS");
  static constexpr int kAccumulators = (kWantsDv + kWantsDs) * Config::kPartChannels;  // registers a lane
  // The owned operands stay in registers where the other values that live through the loop leave enough registers for
  // scores and addresses.
  static constexpr int kOperandRegisters = (1 + kWantsDs) * Config::kChannelBytes / 4;
  static constexpr bool kResident = sizeof(typename Config::scalar_t) == 2 && kAccumulators + kOperandRegisters <= 128;
  // Narrow 16-bit heads: eight warps and four score tiles alive at a time, without spills in the loop, beat twelve
  // warps and two tiles: dk and dv 2.10 against 2.41 ms for (1,768,768,4,32), and for dq 0.98 of the whole backward.
  // Without cp.async, dq spills nothing with twelve; with eight, 7.5's code took 1.03 of the backward's time on an
  // H200.
  static constexpr bool kFewWarps =
      (kWhat == Gradients::kDkDv || (kWhat == Gradients::kDq && Config::Traits::kHasCpAsync)) && kResident &&
      Config::kChannelBytes <= 64;
  static constexpr int kChunkTiles = kResident && !kFewWarps ? 2 : 4;  // score tiles alive at a time
  static constexpr int kMinBlocks =
      (Config::kChannelBytes <= 64 && kAccumulators <= 64 && !kFewWarps ? 12 : 8) / Config::kWarps;
};

// The fused kernel: a block owns keys and also adds to dq and dbias2, so that dS is computed once for all gradients
// (dq_accumulator.h; docs/kernels/sm80.md).
template <typename Config, bool kWantsDbias1_>
struct FusedConfig : OwnedTileConfig<Config, Gradients::kDkDv, kWantsDbias1_> {
  static constexpr bool kFusesDq = true;
  // Blocks of two neighbouring rows n are a cluster and add their dS to dbias2 together (row_partner.h). H100,
  // (1,768,768,4,32): 3.42 ms instead of 3.95. Of (1,512,256,8,16) it takes 0.99, and wider heads have no memory for
  // it.
  static constexpr bool kPairsRows = Config::kHeadDim == 32;
  // A lane's offsets in the loop over stripes, and the address of its next copy, stay in registers. Wider heads have
  // none left and compute them for each tile, as all heads compute the offsets of the product for dq.
  static constexpr bool kKeepsAddresses = Config::kHeadDim <= 32;
  // The thread's number, and its query of a tile, stay in registers. D = 64 has none left and reads threadIdx.x again.
  static constexpr bool kKeepsThread = Config::kHeadDim < 64;
  // dk and dv are computed transposed (transposed_gradient.h), except dv at D = 64, where the loop would spill more.
  static constexpr bool kTransposesDv = Config::kHeadDim < 64;
  // dq and dbias2 of a tile are added at three times in the next tile, so that fewer additions wait in L2's queues at a
  // time. Warp 0 adds before its first stripe, warp 2 before its second, and warps 1 and 3 at the end: at
  // (1,768,768,4,32) 0.98 of the time of two warps before either stripe. At D = 64, where the loop would take more
  // registers, each warp adds dq before its first stripe, half of dbias2 before its second, and the rest at the end: at
  // (1,256,1024,4,64) 0.977 of the time of all before the first.
  static constexpr bool kStaggers = Config::kHeadDim < 64;
  // bias2 is transposed through shared memory. D = 64 has no shared memory left and reads a transposed copy.
  static constexpr bool kTransposesBias2 = Config::kHeadDim < 64;
  static constexpr int kStreamed = Config::kTiles.fused_streamed;
  static constexpr int kStripes = kStreamed / 32;
  // (1,256,1024,4,64): 3.62 ms, as a loop 3.69; narrower heads would be up to 2 % slower.
  static constexpr int kUnrolledStripes = Config::kHeadDim > 48 ? kStripes : 1;
};

template <typename Config>
struct Dbias2TileConfig : Config {
  static constexpr bool kIs16Bit = sizeof(typename Config::scalar_t) == 2;
  static constexpr int kStripes = Config::kTiles.dbias2_stripes;  // of 32 keys, for each warp
  static constexpr int kQueries = Config::kTiles.dbias2_queries;
  static constexpr int kKeys = Config::kTiles.dbias2_keys;
  static constexpr bool kIsWide = kStripes == 2 && Config::kChannelBytes > 64;
  static constexpr int kThreads = kQueries * kKeys / (32 * kStripes);
  static constexpr int kLoadThreads = kThreads >= 64 ? kThreads / 2 : kThreads;
  static constexpr bool kResident = kIs16Bit && Config::kChannelBytes <= 128 && !kIsWide;
  static constexpr int kChunkTiles = kIs16Bit ? 2 : 4;
  static constexpr int kMinBlocks = 8 * 32 / kThreads;
  // A thread's address in a tile of Q, dO, K or V is found once, not for each row n: fewer instructions, more
  // registers. The three kernels of (1,256,1024,4,64): 0.987 of the time, of (1,384,384,4,32) 1.006.
  static constexpr bool kKeepsAddresses = Config::kChannelBytes > 64 && Config::kChannelBytes <= 128;
};

}  // namespace ds4s
