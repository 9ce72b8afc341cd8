// What computes: a warpgroup for each tile of 64 queries of one row n, 16 queries a warp.
//
//   step:   s = f (bias1 - shift + bias2)      from shared memory
//           s += Q' K^T                wgmma, both from shared memory
//           p = 2^(c s - c m)          in registers, rounded to 16 bits
//           O += P V                   wgmma, P from registers
#pragma once

#include "sm90/forward/config.h"
#include "sm90/forward/softmax.h"

namespace ds4s::sm90 {

template <typename Config>
struct ForwardMainloop {
  using Element = typename Config::Element;
  using Shared = typename Config::Shared;
  using Coordinates = typename Config::Coordinates;
  using Pipe = typename Config::Pipe;
  using QPipe = typename Config::QPipe;
  using QTile = typename Config::QTile;
  using KTile = typename Config::KTile;
  using BiasTile = typename Config::BiasTile;
  static constexpr int kHeadDim = Config::kHeadDim, kQueryTiles = Config::kQueryTiles;
  static constexpr int kQueries = Config::kQueries, kKeys = Config::kKeys;
  static constexpr int kQSteps = Config::kQSteps, kKeySteps = Config::kKeySteps;
  static constexpr bool kBias1 = Config::kBias1, kBias2 = Config::kBias2;

  // Q' = factor Q, in place.
  CUTLASS_DEVICE static void scale_q(uint8_t* tile, float factor, const ConsumerCoord& at) {
    constexpr int kVectors = QTile::kBytes / 16 / 128;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      uint4& x = reinterpret_cast<uint4*>(tile)[128 * i + 32 * at.warp + at.lane];
      uint4 y = x;
      y.x = scale_pair(y.x, factor), y.y = scale_pair(y.y, factor);
      y.z = scale_pair(y.z, factor), y.w = scale_pair(y.w, factor);
      x = y;
    }
    cutlass::arch::fence_view_async_shared();
    at.sync();
  }
  CUTLASS_DEVICE static uint32_t scale_pair(uint32_t x, float factor) {
    float2 pair = ptx::unpack<Element>(x);
    return ptx::pack<Element>(pair.x * factor, pair.y * factor);
  }

  // Low words of the descriptors of this warpgroup's operands in stage 0.
  // And the address of this lane's row of bias2, as ldmatrix wants it.
  struct Operands {
    uint32_t k, v;
    int bias2;
    static constexpr uint32_t kNextKeys = sizeof(typename Config::KeyStage) >> 4;
    static constexpr uint32_t kNextValues = sizeof(typename Config::ValueStage) >> 4;

    CUTLASS_DEVICE Operands(const Shared& shared, const ConsumerCoord& at)
        : k(KTile::descriptor_low(shared_address(shared.keys[0].k[at.row]))),
          v(KTile::descriptor_low(shared_address(shared.values[0].v[at.row]))),
          bias2(shared_address(shared.keys[0].bias2[kBias2 ? at.tile : 0]) +
                BiasTile::offset(16 * at.warp + at.lane % 16, at.lane / 16)) {
      if (kBias2) ptx::keep(bias2);  // or it is computed again in every step
    }
    CUTLASS_DEVICE uint64_t keys(int stage, int step) const {
      return KTile::kDescriptorHigh | (k + stage * kNextKeys + KTile::columns_step(step));
    }
    CUTLASS_DEVICE uint64_t values(int stage, int step) const {
      return KTile::kDescriptorHigh | (v + stage * kNextValues + KTile::rows_step(step));
    }
  };

  // s = f (bias1 - shift + bias2); nothing without them.
  CUTLASS_DEVICE static void begin_scores(float (&s)[kKeys / 2], const Shared& shared, const Operands& operands,
                                          int stage, float f, const ConsumerCoord& at) {
    const float* bias1 = shared.bias1[stage][at.row] + 2 * (at.lane % 4);
    // offset(row, 2 g + x) is offset(row, x) ^ 32 g: the tile begins at 1024 bytes.
    const uint32_t bias2 = operands.bias2 + stage * uint32_t(sizeof(typename Config::KeyStage));
    CUTLASS_PRAGMA_UNROLL
    for (int g = 0; g < kKeySteps; ++g) {
      uint32_t pairs[4];
      if constexpr (kBias2) ldmatrix(pairs, (bias2 ^ (32 * (g % 4))) + g / 4 * BiasTile::kBoxBytes);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4; ++i) {
        float2 b1 = make_float2(0.f, 0.f);
        if constexpr (kBias1) b1 = *reinterpret_cast<const float2*>(bias1 + 16 * g + 8 * (i >> 1));
        if constexpr (kBias2) {
          float2 b2 = ptx::unpack<Element>(pairs[i]);
          b1 = kBias1 ? make_float2(fmaf(b2.x, f, b1.x), fmaf(b2.y, f, b1.y)) : make_float2(b2.x * f, b2.y * f);
        }
        s[8 * g + 2 * i] = b1.x, s[8 * g + 2 * i + 1] = b1.y;
      }
    }
  }

  // Starts s += Q' K^T of a stage that has arrived.
  CUTLASS_DEVICE static void start_scores(float (&s)[kKeys / 2], const Shared& shared, const Operands& operands,
                                          int stage, uint32_t q, float f, const ConsumerCoord& at) {
    begin_scores(s, shared, operands, stage, f, at);
    fence_registers(s);
    wgmma_begin();
    CUTLASS_PRAGMA_UNROLL
    for (int step = 0; step < kQSteps; ++step) {
      wgmma<Element, kKeys, Major::K>(s, QTile::kDescriptorHigh | (q + QTile::columns_step(step)),
                                      operands.keys(stage, step),
                                      kBias1 || kBias2 || step > 0 ? ScaleOut::One : ScaleOut::Zero);
    }
    wgmma_commit();
  }

  // Without bias1, which brings its own -inf, keys past the last are hidden here.
  CUTLASS_DEVICE static void hide_tail(float (&s)[kKeys / 2], int keys_left, int lane) {
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < kKeys / 2; ++x) {
      int column = x / 8 * 16 + (x >> 2 & 1) * 8 + 2 * (lane % 4) + (x & 1);
      if (column >= keys_left) s[x] = -infinity();
    }
  }

  // p of finished scores. True when o is to be multiplied by `factor`.
  CUTLASS_DEVICE static bool exponentiate(uint32_t (&p)[kKeys / 4], float (&factor)[2], float (&s)[kKeys / 2],
                                          RowSoftmax& softmax, int keys_left, const ConsumerCoord& at) {
    if (!kBias1 && keys_left < kKeys) hide_tail(s, keys_left, at.lane);
    return softmax.template exponentiate<Element>(p, factor, s);
  }
  CUTLASS_DEVICE static void rescale(float (&o)[kHeadDim / 2], const float (&factor)[2]) {
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < kHeadDim / 2; ++x) o[x] *= factor[row_of(x)];
  }

  // Starts O += P V.
  CUTLASS_DEVICE static void start_output(float (&o)[kHeadDim / 2], const uint32_t (&p)[kKeys / 4],
                                          const Operands& operands, int stage) {
    fence_registers(o);
    wgmma_begin();
    CUTLASS_PRAGMA_UNROLL
    for (int step = 0; step < kKeySteps; ++step) {
      wgmma<Element, kHeadDim, Major::MN>(o, p + 4 * step, operands.values(stage, step));
    }
    wgmma_commit();
  }

  // All visible keys, one step after another. While a step's exponentials are computed the tensor cores work for
  // others.
  CUTLASS_DEVICE static void attend(Shared& shared, const ForwardArgs& args, Pipe& pipe, uint32_t q, int end,
                                    PendingStore& pending, float (&o)[kHeadDim / 2], RowSoftmax& softmax,
                                    const ConsumerCoord& at) {
    float s[kKeys / 2];
    uint32_t p[kKeys / 4];
    int last_stage = -1;
    Operands operands(shared, at);
    for (int key = 0; key < end; key += kKeys, pipe.advance()) {
      shared.k_full[pipe.index].wait(pipe.phase);
      start_scores(s, shared, operands, pipe.index, q, args.f, at);
      wgmma_wait<0>();
      fence_registers(s);
      fence_registers(o);
      shared.k_empty[pipe.index].arrive();
      if (last_stage >= 0) {
        shared.v_empty[last_stage].arrive();
      } else {
        pending.finish(shared.q_empty, at);
      }
      last_stage = pipe.index;
      float factor[2];
      if (exponentiate(p, factor, s, softmax, args.Lk - key, at)) rescale(o, factor);
      shared.v_full[pipe.index].wait(pipe.phase);
      start_output(o, p, operands, pipe.index);
    }
    wgmma_wait<0>();
    fence_registers(o);
    shared.v_empty[last_stage].arrive();
  }

  // The same with O += P V of a step beside the exponentials of the next.
  CUTLASS_DEVICE static void attend_pipelined(Shared& shared, const ForwardArgs& args, Pipe& pipe, uint32_t q, int end,
                                              PendingStore& pending, float (&o)[kHeadDim / 2], RowSoftmax& softmax,
                                              const ConsumerCoord& at) {
    float s[kKeys / 2], factor[2];
    uint32_t even[kKeys / 4], odd[kKeys / 4];
    Operands operands(shared, at);
    shared.k_full[pipe.index].wait(pipe.phase);
    start_scores(s, shared, operands, pipe.index, q, args.f, at);
    wgmma_wait<0>();
    fence_registers(s);
    shared.k_empty[pipe.index].arrive();
    pending.finish(shared.q_empty, at);
    exponentiate(even, factor, s, softmax, args.Lk, at);  // o is still 0

    int key = kKeys;
    auto step = [&](uint32_t (&p)[kKeys / 4], uint32_t (&p_next)[kKeys / 4]) {
      Pipe values = pipe;
      pipe.advance();
      bool more = key < end;
      if (more) {
        shared.k_full[pipe.index].wait(pipe.phase);
        start_scores(s, shared, operands, pipe.index, q, args.f, at);
        shared.v_full[values.index].wait(values.phase);
        start_output(o, p, operands, values.index);
        wgmma_wait<1>();
        fence_registers(s);
        shared.k_empty[pipe.index].arrive();
        bool moves = exponentiate(p_next, factor, s, softmax, args.Lk - key, at);
        wgmma_wait<0>();
        fence_registers(o);
        if (moves) rescale(o, factor);
      } else {
        shared.v_full[values.index].wait(values.phase);
        start_output(o, p, operands, values.index);
        wgmma_wait<0>();
        fence_registers(o);
      }
      shared.v_empty[values.index].arrive();
      key += kKeys;
      return more;
    };
    while (step(even, odd) && step(odd, even)) {
    }
  }

  // O = O / l through shared memory; lse.
  CUTLASS_DEVICE static void finish(uint8_t* tile, const ForwardArgs& args, const CUtensorMap& map_o,
                                    const Coordinates& block, float (&o)[kHeadDim / 2], RowSoftmax& softmax,
                                    const ConsumerCoord& at) {
    softmax.finish_sums();
    int query = block.query + at.tile * kQueries, n = block.row + at.row;
    float inverse[2];
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2; ++r) {
      inverse[r] = 1.f / softmax.l[r];
      int i = query + 16 * at.warp + at.lane / 4 + 8 * r;
      if (args.lse != nullptr && at.lane % 4 == 0 && i < args.Lq) {
        args.lse[((int64_t(block.batch) * args.N + n) * args.H + block.head) * args.Lq + i] = softmax.logsumexp(r);
      }
    }
    if (ptx::any(softmax.l[0] == 0.f || softmax.l[1] == 0.f)) {  // a query that sees no key, whatever V holds
      CUTLASS_PRAGMA_UNROLL
      for (int x = 0; x < kHeadDim / 2; ++x) o[x] = softmax.l[row_of(x)] == 0.f ? 0.f : o[x];
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2; ++r) inverse[r] = softmax.l[r] == 0.f ? 0.f : inverse[r];
    }
    at.sync();  // no warp's products read Q any more
    store_tile<Element, QTile>(map_o, tile, o, inverse, at, query, block.head, n, block.batch);
  }

  CUTLASS_DEVICE static void run(Shared& shared, const ForwardArgs& args, const CUtensorMap& map_o) {
    ConsumerCoord at = ConsumerCoord::of_thread<kQueryTiles>();
    Pipe pipe;
    QPipe q_pipe;
    PendingStore pending;
    for (int tile = blockIdx.x; tile < args.num_tiles; tile += gridDim.x, q_pipe.advance()) {
      Coordinates block = Config::locate(args, tile);
      uint8_t* q = shared.q[q_pipe.index][at.warpgroup];
      shared.q_full[q_pipe.index].wait(q_pipe.phase);
      const int num_steps = uniform(shared.visible[q_pipe.index].num_steps);
      const uint32_t rows = shared.visible[q_pipe.index].rows;
      const bool exists = block.row + at.row < args.N && block.query + at.tile * kQueries < args.Lq;
      if (exists && (rows >> at.row & 1) != 0) {
        if constexpr (Config::kScalesQ) scale_q(q, args.q_factor, at);
        const uint32_t q_low = QTile::descriptor_low(shared_address(q));
        float o[kHeadDim / 2] = {};
        RowSoftmax softmax(args.c);
        if constexpr (Config::kPipelined) {
          attend_pipelined(shared, args, pipe, q_low, num_steps * kKeys, pending, o, softmax, at);
        } else {
          attend(shared, args, pipe, q_low, num_steps * kKeys, pending, o, softmax, at);
        }
        finish(q, args, map_o, block, o, softmax, at);
      } else {  // nothing to compute, but stages go round
        pending.finish(shared.q_empty, at);
        for (int step = 0; step < num_steps; ++step, pipe.advance()) {
          shared.k_full[pipe.index].wait(pipe.phase);
          shared.k_empty[pipe.index].arrive();
          shared.v_full[pipe.index].wait(pipe.phase);
          shared.v_empty[pipe.index].arrive();
        }
        if (exists) {  // a row n that sees no key
          float o[kHeadDim / 2] = {};
          RowSoftmax softmax(args.c);
          finish(q, args, map_o, block, o, softmax, at);
        }
      }
      pending.buffer = q_pipe.index;
    }
    if (at.issues()) cute::tma_store_wait<0>();  // shared memory must outlive the reads of it
  }
};

}  // namespace ds4s::sm90
