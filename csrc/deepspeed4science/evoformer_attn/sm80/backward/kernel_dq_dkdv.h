// dq of queries, math.md (13), or dk, dv and dbias1 of keys, math.md (12), (14), (15). A block owns kOwned queries or
// keys and streams the other side, kStreamed at a time (mainloop.h); only dbias1 is added across blocks.
//
//                    owned: queries (kDq)                 owned: keys (kDk, kDv, kDkDv)
//   scores           S  = Q K^T + bias1 / scale           S^T = K Q^T - lse / scale          raw units
//   probabilities    P  = 2^(c S + log2e (bias2 - lse))   P^T = 2^(c S^T + log2e (bias2^T + bias1))
//   dP - delta       dO V^T - delta                       V dO^T - delta
//   dS               P * (dP - delta)                     the same, transposed
//   out              dq = scale dS K                      dk = scale dS^T Q,  dv = P^T dO,  dbias1 = sums of dS
//
// A term of the streamed side is the accumulator's initial value and costs nothing; a term of the owned side is added
// in the exponent. Warp w owns queries or keys 32 w .. 32 w + 31 and computes them against the whole streamed side.
// Shared memory: SharedLayout (mainloop.h).
//
// Hidden keys (common/key_mask.h): where queries are owned, tiles without a visible key are not loaded, and stripes
// after a tile's last visible key are not computed. A block that owns hidden keys stores zeros, and a warp of hidden
// keys computes nothing (kSkipsWarps).
//
// With kFusesDq (the fused kernel) a block that owns keys also adds to dq and dbias2 (dq_accumulator.h), with
// kPairsRows together with the block of a neighbouring row n (row_partner.h).
#pragma once

#include "sm80/backward/fused_prologue.h"
#include "sm80/backward/mainloop.h"
#include "sm80/mma/tile_loader.h"

namespace ds4s {

template <typename Config>
struct KernelDqDkdv {
  using scalar_t = typename Config::scalar_t;
  using Mma = typename Config::Mma;
  using Loop = Mainloop<Config>;
  using Streamed = typename Loop::Streamed;
  using Exponent = typename Loop::Warp::Exponent;
  using QueryValue = typename Config::QueryValue;
  using Position = TilePosition<Config>;
  using OwnedTile = typename SharedLayout<Config>::OwnedTile;
  using OwnedLoader = TileLoader<scalar_t, OwnedTile, Config::kThreads, Config::kAligned, Config::kAsync>;
  using OwnedValue = typename cutlass::platform::conditional<Config::kOwnsKeys, uint32_t, QueryValue>::type;

  static constexpr int shared_bytes(int stages) { return SharedLayout<Config>::bytes(stages); }

  CUTLASS_DEVICE static void run(const BackwardInputs& args, const TileOrder& order, int stages, char* shared,
                                 const DqAccumulatorPool& pool = {}) {
    if constexpr (Config::kFusesDq) {
      run_fused(args, order, stages, shared, pool);
    } else {
      run_separate(args, order, stages, shared, pool);
    }
  }

 private:
  CUTLASS_DEVICE static void run_separate(const BackwardInputs& args, const TileOrder& order, int stages, char* shared,
                                          const DqAccumulatorPool& pool) {
    if (Config::kExact && args.mask.range != nullptr) {
      int opaque = int(blockIdx.x);  // Position is computed again below: kept until then, it would spill 48 bytes
      ptx::keep(opaque);
      const Position hidden(args.p, order, uint32_t(opaque));
      if (hidden.is_hidden(args.mask)) return store_hidden(args, hidden, pool);
    }
    const Position at(args.p, order, blockIdx.x);
    if constexpr (!Config::kExact) {  // computed once here: twice would spill 104 bytes for keys at D = 32 on 8.0
      if (at.is_hidden(args.mask)) return store_hidden(args, at, pool);
    }
    const TileOperands<Config> operands(args.p, at);
    const int thread = int(threadIdx.x);
    const Streamed streamed(operands, args.mask, at.bn, at.num_streamed(args.p), shared, thread);
    const auto make_vectors = [&] { return typename Loop::Vectors(args, at); };
    const auto make_bias2 = [&] { return Loop::bias2_of(args, at, stages, shared, thread); };
    Loop loop(args, pool, at, streamed, make_vectors, make_bias2, stages, shared, thread);
    const int tile = loop.streamed.seek(0);
    bool hidden = false;  // all keys of this warp
    if constexpr (Loop::kSkipsWarps) {
      hidden = args.mask.units(at.bn, at.first + loop.warp.first, 32 / KeyMask::kUnit) == 0;
    }
    // Loads of vectors are issued before those of tiles, and their values used after them.
    const FirstVectors first = load_vectors(loop.vectors, args, at, tile);
    load_tiles(args, at, operands, loop.streamed, tile, stages, shared);
    begin(loop, first, hidden ? 0 : num_owned(args, at), tile);
    if constexpr (Config::kHasBias2) loop.bias2.load(tile * Config::kStreamed);
    run_loop(loop, tile);
    int again = int(blockIdx.x);  // the position is not kept in registers through the loop
    ptx::keep(again);
    end(loop, args, Position(args.p, order, uint32_t(again)));
  }
  CUTLASS_DEVICE static void run_fused(const BackwardInputs& args, const TileOrder& order, int stages, char* shared,
                                       const DqAccumulatorPool& pool) {
    uint32_t number;
    if constexpr (Config::kPairsRows) {
      number = RowPartner<Config>::draw(pool.ticket, Loop::partner_buffers(shared, stages));
      if (number >= order.num_blocks) return;
    } else {
      number = OrderedDqAdd<Config>::draw(pool, shared + Loop::Shared::ds(stages, 1));
    }
    const Position at(args.p, order, number);
    const VisibleUnits<Config> visible(args, at, pool.dbias2 != nullptr);
    const TileOperands<Config> operands(args.p, at);
    const int thread = int(threadIdx.x);
    // Loads come before all else, also those of hidden keys: beside other blocks' additions they take about 2 us.
    Streamed streamed(operands, args.mask, at.bn, at.num_streamed(args.p), shared, thread);
    load_tiles(args, at, operands, streamed, /*tile=*/0, stages, shared);
    // By warp 1, which has the least to store below.
    if (thread == 32) store_before(*Loop::outputs(shared, stages), pool, at.pair);
    auto bias2 = Loop::bias2_of(args, at, stages, shared, thread);
    CUTLASS_PRAGMA_UNROLL
    for (int stripe = 0; stripe < (Config::kTransposesBias2 ? Config::kStripes : 1); ++stripe) bias2.load(stripe);
    typename Loop::Vectors vectors(args, at);
    const FirstVectors first = load_vectors(vectors, args, at, /*tile=*/0);
    if (visible.of_block() == 0) {
      store_hidden(args, at, pool);
      return ptx::cp_async_wait<0>();
    }
    const auto make_vectors = [&] { return vectors; };
    const auto make_bias2 = [&] { return bias2; };
    Loop loop(args, pool, at, streamed, make_vectors, make_bias2, stages, shared, thread);
    const uint32_t units = visible.of_block(), partner_units = visible.with_partner();
    if constexpr (Config::kPairsRows) loop.partner.begin(partner_units != 0, loop.warp.first);
    if (loop.warp.lane == 0) {
      store_outputs(*loop.outputs(), *loop.position(), loop.warp.first / 32, args, pool, at, units, partner_units);
    }
    begin(loop, first, visible.of_warp(loop.warp.first) == 0 ? 0 : num_owned(args, at), /*tile=*/0);
    run_loop(loop, /*tile=*/0);
    end(loop, args, *loop.position());
  }
  // Starts the loads of the owned tiles and of a streamed one.
  CUTLASS_DEVICE static void load_tiles(const BackwardInputs& args, const Position& at,
                                        const TileOperands<Config>& operands, Streamed& streamed, int tile, int stages,
                                        char* shared) {
    const int thread = int(threadIdx.x), count = at.num_owned(args.p) - at.first;
    scalar_t* sQk = reinterpret_cast<scalar_t*>(shared + Loop::Shared::owned(stages));
    auto load = [&](const TileOperand<scalar_t>& operand, scalar_t* s) {
      OwnedLoader(operand.g, operand.stride, operand.channels, thread).load(s, count);
    };
    load(operands.owned_qk, sQk);
    if constexpr (Config::kWantsDs) load(operands.owned_dov, sQk + OwnedTile::kBytes / sizeof(scalar_t));
    streamed.load(tile, 0);
  }
  // Rows of the block from the warp's first one on.
  CUTLASS_DEVICE static int num_owned(const BackwardInputs& args, const Position& at) {
    return at.num_owned(args.p) - at.first - int(threadIdx.x) / 32 * 32;
  }
  // Vectors of the first streamed tile, and of a lane's owned rows.
  struct FirstVectors {
    typename Loop::Vectors::Loaded streamed;
    OwnedValue owned[Mma::kLaneRows] = {};
    QueryValue negative_delta[Mma::kLaneRows] = {};  // where queries are owned
  };
  // Starts their loads.
  CUTLASS_DEVICE static FirstVectors load_vectors(typename Loop::Vectors& vectors, const BackwardInputs& args,
                                                  const Position& at, int tile) {
    FirstVectors x{vectors.load(tile * Config::kStreamed)};
    const int thread = int(threadIdx.x), first = at.first + thread / 32 * 32, count = num_owned(args, at);
    auto for_each_row = [&](auto load) {
      CUTLASS_PRAGMA_UNROLL
      for (int lane_row = 0; lane_row < Mma::kLaneRows; ++lane_row) {
        const int mine = Mma::row_of_lane(thread & 31) + lane_row * Mma::kRowStep;
        if (mine < count) load(lane_row, first + mine);
      }
    };
    if constexpr (Config::kOwnsKeys) {
      for_each_row([&](int lane_row, int k) { x.owned[lane_row] = vectors.bias1.load(k); });
    } else {
      for_each_row([&](int lane_row, int q) { x.owned[lane_row] = vectors.negative_lse.load(q); });
      for_each_row([&](int lane_row, int q) { x.negative_delta[lane_row] = vectors.negative_delta[q]; });
    }
    return x;
  }
  // Converts vectors to the form that the loop reads. num_visible: of the warp's rows, those before this one take part.
  CUTLASS_DEVICE static void begin(Loop& loop, const FirstVectors& first, int num_visible, int tile) {
    loop.vectors.bias1.shift = uniform(loop.vectors.bias1.shift);
    set_exponents(loop, first.owned, num_visible);
    if constexpr (!Config::kOwnsKeys) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Mma::kLaneRows; ++i) loop.warp.negative_delta[i] = first.negative_delta[i];
      if constexpr (!Config::kExact) loop.warp.dp_begin.set(loop.warp.negative_delta);
    }
    loop.vectors.store(loop.streamed.vectors(0), first.streamed, tile * Config::kStreamed);
  }
  CUTLASS_DEVICE static void run_loop(Loop& loop, int tile) {
    const scalar_t* sQk = loop.owned_tile();
    loop.warp.left_qk.attach(sQk, loop.warp.first, loop.warp.lane);
    loop.warp.left_dov.attach(sQk + OwnedTile::kBytes / sizeof(scalar_t), loop.warp.first, loop.warp.lane);
    if constexpr (Config::kResident) {
      Loop::arrive();
      loop.warp.left_qk.fetch();
      if constexpr (Config::kWantsDs) loop.warp.left_dov.fetch();
    }
    loop.run(tile);
  }
  // num_visible: of the warp's rows, those before this one take part.
  CUTLASS_DEVICE static void set_exponents(Loop& loop, const OwnedValue (&owned)[Mma::kLaneRows], int num_visible) {
    CUTLASS_PRAGMA_UNROLL
    for (int lane_row = 0; lane_row < Mma::kLaneRows; ++lane_row) {
      typename Exponent::Row& exponent = loop.warp.exponent[lane_row];
      if constexpr (Config::kOwnsKeys) {
        exponent = loop.vectors.bias1.value(owned[lane_row]);
      } else {
        exponent = loop.vectors.negative_lse.value(owned[lane_row]);
      }
      if constexpr (!Config::kExact) exponent *= Exponent::row_unit;
      const int row = Mma::row_of_lane(loop.warp.lane) + lane_row * Mma::kRowStep;
      if (row >= num_visible) exponent = one_part<typename Exponent::Row>(-infinity());
    }
  }
  // Epilogue: stores the gradients.
  CUTLASS_DEVICE static void end(const Loop& loop, const BackwardInputs& args, const Position& at) {
    const BwdParams& p = args.p;
    const int first = at.first + loop.warp.first, owned_left = at.num_owned(p) - first;
    auto rows_of = [&](void* ptr, const int64_t (&stride)[4]) {
      return element<scalar_t>(ptr, stride, at.b, at.n, first, at.h) + at.part * Config::kPartChannels;
    };
    auto store = [&](void* ptr, const int64_t (&stride)[4], const auto& acc, float factor, int channels) {
      store_rows<Mma, Config::kAligned>(rows_of(ptr, stride), stride[2], acc, factor, owned_left,
                                        channels - at.part * Config::kPartChannels, loop.warp.lane);
    };
    if constexpr (!Config::kOwnsKeys) return store(p.dq, p.dq_stride, loop.warp.dqk, p.scale, int(p.D));
    if constexpr (Config::kFusesDq) {  // converted while the last additions are under way
      const auto dk = rows_of_transposed<scalar_t>(loop.warp.dqk, p.scale);
      const auto dv = Config::kTransposesDv ? rows_of_transposed<scalar_t>(loop.warp.dv, 1.f)
                                            : rows_of_tiles<Mma, scalar_t>(loop.warp.dv, 1.f);
      const Dbias1Sums sums(loop.warp.dbias1);
      const int num_others = loop.outputs()->num_others;
      loop.dq_add.count(num_others);
      loop.add_last_dbias2();
      loop.dq_add.wait_for_hosted(uint32_t(at.bn));
      dk.store(rows_of(p.dk, p.dk_stride), p.dk_stride[2], owned_left, int(p.D), loop.warp.lane);
      dv.store(rows_of(p.dv, p.dv_stride), p.dv_stride[2], owned_left, int(p.Dv), loop.warp.lane);
      if constexpr (Config::kWantsDbias1) sums.store(args, at, first, owned_left, loop.warp.lane);
      loop.dq_add.finish(p, element<scalar_t>(p.dq, p.dq_stride, at.b, at.n, 0, at.h), loop.outputs()->accumulator,
                         num_others);
    } else {
      if constexpr (Config::kWantsDs) {
        if (p.dk) store(p.dk, p.dk_stride, loop.warp.dqk, p.scale, int(p.D));
        if constexpr (Config::kWantsDbias1) {
          if (at.part == 0) Dbias1Sums(loop.warp.dbias1).store(args, at, first, owned_left, loop.warp.lane);
        }
      }
      if constexpr (Config::kWantsDv) {
        if (p.dv) store(p.dv, p.dv_stride, loop.warp.dv, 1.f, int(p.Dv));
      }
    }
  }
  // dbias1 of a warp's keys. It is also summed over heads: each head stores its part, or adds atomically.
  struct Dbias1Sums {
    float values[Mma::kLaneRows];

    CUTLASS_DEVICE explicit Dbias1Sums(const float (&of_lane)[Mma::kLaneRows]) {
      CUTLASS_PRAGMA_UNROLL
      for (int lane_row = 0; lane_row < Mma::kLaneRows; ++lane_row)
        values[lane_row] = Config::kWantsDbias1 ? Mma::reduce_sum(of_lane[lane_row]) : 0.f;
    }
    CUTLASS_DEVICE void store(const BackwardInputs& args, const Position& at, int first, int owned_left,
                              int lane) const {
      if (!Mma::leads_row(lane)) return;
      const bool has_parts = args.dbias1_parts != nullptr;
      float* dst =
          has_parts ? args.dbias1_parts + (at.bn * args.p.H + at.h) * args.p.Lk : args.p.dbias1 + at.bn * args.p.Lk;
      dst += first + Mma::row_of_lane(lane);
      CUTLASS_PRAGMA_UNROLL
      for (int lane_row = 0; lane_row < Mma::kLaneRows; ++lane_row) {
        const int below = lane_row * Mma::kRowStep;
        if (Mma::row_of_lane(lane) + below >= owned_left) continue;
        if (has_parts) {
          dst[below] = values[lane_row];
        } else {
          atomicAdd(dst + below, values[lane_row]);
        }
      }
    }
  };

  CUTLASS_DEVICE static void store_hidden(const BackwardInputs& args, const Position& at,
                                          const DqAccumulatorPool& pool) {
    const BwdParams& p = args.p;
    const int thread = int(threadIdx.x), num = min(Config::kOwned, at.num_owned(p) - at.first);
    auto store = [&](void* ptr, const int64_t (&stride)[4], int first, int count, int64_t channels) {
      if (ptr == nullptr) return;
      scalar_t* g = element<scalar_t>(ptr, stride, at.b, at.n, first, at.h);
      store_zeros<scalar_t, Config::kThreads, Config::kAligned>(g, stride[2], thread, count, int(channels));
    };
    if constexpr (!Config::kOwnsKeys) return store(p.dq, p.dq_stride, at.first, num, p.D);
    if constexpr (Config::kFusesDq) {
      OrderedDqAdd<Config> dq_add{pool, at.pair};
      if (args.mask.sees_nothing(at.bn)) {  // each block of the pair stores a part of dq
        if (at.first == 0) dq_add.announce_nothing();
        int part = (int(p.Lq) + at.num_tiles - 1) / at.num_tiles, first = at.first / Config::kOwned * part;
        store(p.dq, p.dq_stride, first, min(part, int(p.Lq) - first), p.D);
      }
      dq_add.wait_for_hosted(uint32_t(at.bn));
    }
    if constexpr (Config::kWantsDs) store(p.dk, p.dk_stride, at.first, num, p.D);
    if constexpr (Config::kWantsDv) store(p.dv, p.dv_stride, at.first, num, p.Dv);
    if constexpr (Config::kWantsDbias1) {
      float* parts = args.dbias1_parts + (at.bn * p.H + at.h) * p.Lk + at.first;
      if (args.dbias1_parts && thread < num) parts[thread] = 0.f;
    }
  }
};

}  // namespace ds4s
