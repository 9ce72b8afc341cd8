// The mainloop of kernel_dbias2 for one tile: loads bias2 into registers (load_bias2), computes dbias2 += P (dP -
// delta) over the rows n, math.md (8), (10), (11), (16), and stores dbias2 (store).
#pragma once

#include "common/atomic_add.h"
#include "sm90/backward/config_dbias2.h"
#include "sm90/mma/rank1_mma.h"

namespace ds4s::sm90 {

template <typename Config, int kKeys_>  // keys of a warpgroup: Config::kKeys, or fewer
struct Dbias2Mainloop {
  using scalar_t = typename Config::scalar_t;
  using Shared = typename Config::Shared;
  using Stage = typename Config::Stage;
  using Coordinates = typename Config::Coordinates;
  using QueryTile = typename Config::QueryTile;
  using KeyTile = typename Config::KeyTile;
  static constexpr int kKeys = kKeys_;
  static constexpr int kColumns = kKeys < Config::kKeys ? kKeys : Config::kColumns;
  using Scores = float[kColumns / 2];
  using Sums = float[kKeys / 2];

  // The coordinates of a lane's first element.
  CUTLASS_DEVICE static int first_query(const Coordinates& block, const ConsumerCoord& at) {
    return block.query + at.row * Config::kQueries + 16 * at.warp + at.lane / 4;
  }
  CUTLASS_DEVICE static int first_key(const Coordinates& block, const ConsumerCoord& at) {
    return block.key + at.tile * kKeys + 2 * (at.lane % 4);
  }

  // Loads log2(e) bias2 in the order of the accumulators; nothing is read past the ends of bias2.
  CUTLASS_DEVICE static void load_bias2(Sums& bias2, const BackwardArgs& args, const Coordinates& block,
                                        const ConsumerCoord& at) {
    int query = first_query(block, at), key = first_key(block, at);
    const scalar_t* ptr = static_cast<const scalar_t*>(args.bias2) + block.batch * args.bias2_stride[0] +
                          block.head * args.bias2_stride[1];
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < kKeys / 2; x += 2) {
      int i = query + 8 * row_of(x), j = key + x / 4 * 8;
      uint32_t pair = 0;
      const scalar_t* element = ptr + i * args.bias2_stride[2] + j;
      if (i < args.Lq && j + 1 < args.Lk) pair = *reinterpret_cast<const uint32_t*>(element);
      if (i < args.Lq && j + 1 == args.Lk) pair = ptx::load_bits(element);
      float2 value = ptx::unpack<scalar_t>(pair);
      bias2[x] = value.x * kLog2e, bias2[x + 1] = value.y * kLog2e;
    }
    fence_registers(bias2);  // otherwise the compiler would unpack them again for every row n
  }
  // s becomes P; bias2 from its element `part` on.
  CUTLASS_DEVICE static void exponentiate(Scores& s, const Sums& bias2, int part, float c) {
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < kColumns / 2; ++x) s[x] = ptx::exp2(fmaf(s[x], c, bias2[part + x]));
  }

  // x += queries keys^T
  CUTLASS_DEVICE static void start(Scores& x, uint32_t queries, uint32_t keys) {
    const uint64_t first_query = QueryTile::descriptor(queries), first_key = KeyTile::descriptor(keys);
    CUTLASS_PRAGMA_UNROLL
    for (int step = 0; step < Config::kHeadSteps; ++step) {
      wgmma<scalar_t, kColumns, Major::K>(x, first_query + QueryTile::columns_step(step),
                                          first_key + KeyTile::columns_step(step));
    }
    wgmma_commit();
  }

  CUTLASS_DEVICE static void run_steps(Shared& shared, const BackwardArgs& args, typename Config::Pipe& pipe,
                                       const Sums& bias2, Sums& dbias2, const ConsumerCoord& at) {
    constexpr uint32_t kNextStage = sizeof(Stage) >> 4;
    // Start addresses of this warpgroup's rows in the first stage, and of the terms of their rank-1 updates.
    const int row = at.row * (Config::kQueries / 16), key = at.tile * (kKeys / 8);  // row: in 16, key: in 8
    const uint32_t first_queries = start_address(shared.stages[0].queries.tile) + QueryTile::rows_step(row);
    const uint32_t first_keys = start_address(shared.stages[0].keys.tile) + key * (KeyTile::rows_step(1) / 2);
    const uint32_t first_query_terms = start_address(shared.stages[0].queries.terms) + Rank1Tile::rows_step(row);
    const uint32_t first_key_terms = start_address(shared.stages[0].keys.terms) + key * (Rank1Tile::rows_step(1) / 2);
    const uint32_t ones = start_address(shared.ones);
    Scores s, dp;
    shared.full[pipe.index].wait(pipe.phase);
    int left = uniform(shared.num_rows[pipe.index]);
    CUTLASS_PRAGMA_NO_UNROLL
    do {
      const typename Config::Pipe of_scores = pipe, of_products = Config::second(pipe);
      pipe = of_products;
      pipe.advance();
      shared.full[of_scores.index].wait(of_scores.phase);
      CUTLASS_PRAGMA_UNROLL
      for (int part = 0; part < kKeys; part += kColumns) {
        const uint32_t keys = first_keys + KeyTile::rows_step(part / 16);
        uint32_t stage = of_scores.index * kNextStage;
        wgmma_begin();
        Rank1Terms::start_sum<kColumns>(s, stage + first_query_terms,
                                        stage + first_key_terms + Rank1Tile::rows_step(part / 16));
        start(s, stage + first_queries, stage + keys);
        if (part == 0) shared.full[of_products.index].wait(of_products.phase);
        stage = of_products.index * kNextStage;
        wgmma_begin();
        Rank1Terms::start_rows<kColumns>(dp, stage + first_query_terms, ones);
        start(dp, stage + first_queries, stage + keys);
        wgmma_wait<1>();
        fence_registers(s);
        if (part + kColumns == kKeys) shared.empty[of_scores.index].arrive();
        exponentiate(s, bias2, part / 2, args.c);
        wgmma_wait<0>();
        fence_registers(dp);
        if (part + kColumns == kKeys) shared.empty[of_products.index].arrive();
        CUTLASS_PRAGMA_UNROLL
        for (int x = 0; x < kColumns / 2; ++x) {
          float& sum = dbias2[part / 2 + x];
          sum = fmaf(s[x], dp[x], sum);
        }
      }
    } while (--left != 0);
  }

  CUTLASS_DEVICE static void store(const Sums& dbias2, const BackwardArgs& args, const Coordinates& block, bool adds,
                                   const ConsumerCoord& at) {
    if (args.waits_before_stores) ptx::wait_for_kernel_before();
    int query = first_query(block, at), key = first_key(block, at);
    int64_t offset = (int64_t(block.batch) * args.H + block.head) * args.Lq;
    if (!args.adds_dbias2) offset += int64_t(block.slice) * args.B * args.H * args.Lq;
    bool odd = at.lane % 2 != 0;
    query += odd ? 8 : 0, key -= odd ? 2 : 0;
    float* out = args.dbias2 + (offset + query) * args.Lk + key;
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < kKeys / 2; x += 4) {
      float value[4];
      four_of_a_row(value, dbias2 + x, odd);
      int valid = query < args.Lq ? args.Lk - (key + 2 * x) : 0;
      float* dst = out + 2 * x;
      if (adds) {
        atomic_add_access<4>(dst, value, valid);
      } else {
        store_four(dst, value, valid, args.Lk % 4 == 0);
      }
    }
  }
};

}  // namespace ds4s::sm90
