// The consumers of the forward: a warpgroup computes one tile of 64 queries of one row n, 16 queries a warp.
//
//   step:   s = f (bias1 - shift + bias2)      from shared memory; math.md (1), (1a)
//           s += Q' K^T                        wgmma, both from shared memory
//           p = 2^(c s - c m)                  in registers, rounded to 16 bits; math.md (7)
//           O += P V                           wgmma, P from registers
#pragma once

#include "sm90/forward/config.h"
#include "sm90/forward/softmax.h"
#include "sm90/forward/split_tile.h"

namespace ds4s::sm90 {

template <typename Config>
struct ForwardMainloop {
  using scalar_t = typename Config::scalar_t;
  using Shared = typename Config::Shared;
  using Stage = typename Config::Stage;
  using Coordinates = typename Config::Coordinates;
  using Visible = typename Config::Visible;
  using Pipe = typename Config::Pipe;
  using QPipe = typename Config::QPipe;
  using QTile = typename Config::QTile;
  using KTile = typename Config::KTile;
  using BiasTile = typename Config::BiasTile;
  static constexpr int kHeadDim = Config::kHeadDim, kQueryTiles = Config::kQueryTiles;
  static constexpr int kQueries = Config::kQueries, kKeys = Config::kKeys;
  static constexpr int kQSteps = Config::kQSteps;
  static constexpr bool kHasBias1 = Config::kHasBias1, kHasBias2 = Config::kHasBias2;
  static constexpr int kSplits = Config::kSplits;
  using Softmax = WarpgroupSoftmax<scalar_t>;
  using Split = SplitTile<Config>;
  using Keys = typename Split::Keys;

  // `shared` by an address that is kept in a register: nvcc would compute it again in each step.
  CUTLASS_DEVICE static Shared& known_address(Shared& shared) {
    uint32_t address = shared_address(&shared);
    ptx::keep(address);
    return *static_cast<Shared*>(__cvta_shared_to_generic(address));
  }

  // Multiplies Q by `factor` in place: Q'.
  CUTLASS_DEVICE static void scale_q(uint8_t* tile, float factor, const ConsumerCoord& at) {
    constexpr int kVectors = QTile::kBytes / 16 / 128;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      uint4& x = reinterpret_cast<uint4*>(tile)[128 * i + 32 * at.warp + at.lane];
      uint4 y = x;
      y.x = ptx::scale_word<scalar_t>(y.x, factor), y.y = ptx::scale_word<scalar_t>(y.y, factor);
      y.z = ptx::scale_word<scalar_t>(y.z, factor), y.w = ptx::scale_word<scalar_t>(y.w, factor);
      x = y;
    }
    cutlass::arch::fence_view_async_shared();
    at.sync();
  }

  // The low word of the descriptor of this warpgroup's K in stage 0, the offset of this lane's first values in a row of
  // bias1, in bytes, and the address in stage 0 that it passes to ldmatrix for bias2.
  struct Operands {
    uint32_t k;
    int bias1, bias2;
    static constexpr uint32_t kNextStage = sizeof(Stage) >> 4;
    static constexpr uint32_t kValues = (offsetof(Stage, v) - offsetof(Stage, k)) >> 4;  // from K to V

    CUTLASS_DEVICE Operands(const Shared& shared, const ConsumerCoord& at)
        : k(KTile::descriptor_low(shared_address(shared.stages[0].k[at.row]))),
          bias1(16 * (at.lane % 4)),
          bias2(shared_address(shared.stages[0].bias2[kHasBias2 ? at.tile : 0]) +
                BiasTile::offset(16 * at.warp + at.lane % 16, at.lane / 16)) {
      // Otherwise every step computes them again; up to D = 32, k takes fewer instructions that way.
      if (kHeadDim > 32) ptx::keep(k);
      if (kHasBias1) ptx::keep(bias1);
      if (kHasBias2) ptx::keep(bias2);
    }
    CUTLASS_DEVICE uint64_t keys(int stage, int step) const {
      return (KTile::kDescriptorHigh | (k + stage * kNextStage)) + KTile::columns_step(step);
    }
    CUTLASS_DEVICE uint64_t values(int stage, int step) const {
      return (KTile::kDescriptorHigh | (k + stage * kNextStage)) + KTile::rows_step(step) + kValues;
    }
  };

  // s = f (bias1 - shift + bias2). Without biases s stays undefined and the first product overwrites it.
  template <int kCount>
  CUTLASS_DEVICE static void begin_scores(float (&s)[kCount], const Shared& shared, const Operands& operands, int stage,
                                          float f, const ConsumerCoord& at) {
    const auto* bias1 = reinterpret_cast<const uint8_t*>(shared.stages[stage].bias1[at.row]) + operands.bias1;
    // offset(row, 2 g + x) is offset(row, x) ^ 32 g: the tile begins at 1024 bytes.
    const uint32_t bias2 = operands.bias2 + stage * uint32_t(sizeof(Stage));
    CUTLASS_PRAGMA_UNROLL
    for (int g = 0; g < kCount / 8; ++g) {
      uint32_t pairs[4];
      if constexpr (kHasBias2) ldmatrix(pairs, bias2 ^ (32 * g));
      float4 of_16_keys = make_float4(0.f, 0.f, 0.f, 0.f);
      if constexpr (kHasBias1) of_16_keys = *reinterpret_cast<const float4*>(bias1 + 16 * sizeof(float) * g);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4; ++i) {
        float2 b1 = i < 2 ? make_float2(of_16_keys.x, of_16_keys.y) : make_float2(of_16_keys.z, of_16_keys.w);
        if constexpr (kHasBias2) {
          float2 b2 = ptx::unpack<scalar_t>(pairs[i]);
          b1 = kHasBias1 ? make_float2(fmaf(b2.x, f, b1.x), fmaf(b2.y, f, b1.y)) : make_float2(b2.x * f, b2.y * f);
        }
        s[8 * g + 2 * i] = b1.x, s[8 * g + 2 * i + 1] = b1.y;
      }
    }
  }

  // Starts s += Q' K^T of a stage that has arrived.
  template <int kCount>
  CUTLASS_DEVICE static void start_scores(float (&s)[kCount], const Shared& shared, const Operands& operands, int stage,
                                          uint32_t q, float f, const ConsumerCoord& at) {
    begin_scores(s, shared, operands, stage, f, at);
    fence_registers(s);
    wgmma_begin();
    CUTLASS_PRAGMA_UNROLL
    for (int step = 0; step < kQSteps; ++step) {
      wgmma<scalar_t, 2 * kCount, Major::K>(s, QTile::kDescriptorHigh | (q + QTile::columns_step(step)),
                                            operands.keys(stage, step),
                                            kHasBias1 || kHasBias2 || step > 0 ? ScaleOut::One : ScaleOut::Zero);
    }
    wgmma_commit();
  }

  // Hides keys past the last one. Not needed with bias1, which is -inf there.
  template <int kCount>
  CUTLASS_DEVICE static void hide_tail(float (&s)[kCount], int keys_left, int lane) {
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < kCount; ++x) {
      int column = x / 8 * 16 + (x >> 2 & 1) * 8 + 2 * (lane % 4) + (x & 1);
      if (column >= keys_left) s[x] = -infinity();
    }
  }

  // Finds the first reference in a tile's first scores.
  template <int kCount>
  CUTLASS_DEVICE static void begin_softmax(float (&s)[kCount], Softmax& softmax, int keys_left,
                                           const ConsumerCoord& at) {
    if constexpr (Softmax::kWide) {
      if (!kHasBias1 && keys_left < 2 * kCount) hide_tail(s, keys_left, at.lane);
      softmax.begin(s);
    }
  }
  // Computes p from finished scores. Calls rescale(factor) where o must be multiplied by `factor`.
  template <int kCount, typename Rescale>
  CUTLASS_DEVICE static void exponentiate(uint32_t (&p)[kCount / 2], float (&s)[kCount], Softmax& softmax,
                                          int keys_left, const ConsumerCoord& at, const Rescale& rescale) {
    if (!kHasBias1 && keys_left < 2 * kCount) hide_tail(s, keys_left, at.lane);
    softmax.exponentiate(p, s, rescale);
  }
  CUTLASS_DEVICE static void rescale(float (&o)[kHeadDim / 2], const float (&factor)[2]) {
    CUTLASS_PRAGMA_UNROLL
    for (int x = 0; x < kHeadDim / 2; ++x) o[x] *= factor[row_of(x)];
  }

  // Starts O += P V.
  template <int kCount>
  CUTLASS_DEVICE static void start_output(float (&o)[kHeadDim / 2], const uint32_t (&p)[kCount],
                                          const Operands& operands, int stage) {
    fence_registers(o);
    wgmma_begin();
    CUTLASS_PRAGMA_UNROLL
    for (int step = 0; step < kCount / 4; ++step) {
      wgmma<scalar_t, kHeadDim, Major::MN>(o, p + 4 * step, operands.values(stage, step));
    }
    wgmma_commit();
  }

  // O += P V of a tile's last step, whose V has a barrier of its own.
  template <int kCount>
  CUTLASS_DEVICE static void finish_output(float (&o)[kHeadDim / 2], const uint32_t (&p)[kCount], Shared& shared,
                                           const Operands& operands, const Pipe& values) {
    Stage& stage = shared.stages[values.index];
    stage.v_full.wait(values.phase);
    start_output(o, p, operands, values.index);
    wgmma_wait<0>();
    fence_registers(o);
    stage.v_empty.arrive();
  }

  // Attends to all visible keys, one step after another; of a narrow last step only to its first 16 tail_units keys.
  // While this warpgroup computes exponentials, the tensor cores work for the other warpgroups; O += P V runs while it
  // reads the biases of the next step. The loop begins with finished scores: a loop that begins with a step's products
  // has 17 instructions more (docs/history/sm90-forward.md).
  CUTLASS_DEVICE static void attend(Shared& shared_, const ForwardArgs& args, Pipe& pipe, uint32_t q, const Keys& keys,
                                    const Visible& seen, PendingStore& pending, float (&o)[kHeadDim / 2],
                                    Softmax& softmax, const ConsumerCoord& at) {
    int key = 0;
    Shared& shared = known_address(shared_);
    Operands operands(shared, at);
    Pipe values = pipe;                  // the stage of the last step that has P
    auto finish_scores = [&](auto& s) {  // of a stage that has arrived
      start_scores(s, shared, operands, pipe.index, q, args.f, at);
      wgmma_wait<0>();
      fence_registers(s);
      fence_registers(o);
      shared.stages[pipe.index].k_empty.arrive();
    };
    // Advances to the next stage, and returns whether it has arrived. Its barrier is asked before the exponentials,
    // because the answer takes a while.
    auto finish_exponentials = [&](auto& s, auto& p) {
      values = pipe;
      pipe.advance();
      const bool arrived = shared.stages[pipe.index].k_full.test_wait(pipe.phase);
      exponentiate(p, s, softmax, args.Lk - key, at, [&](const float (&factor)[2]) { rescale(o, factor); });
      key += kKeys;
      return arrived;
    };
    float s[kKeys / 2];
    uint32_t p[kKeys / 4];
    auto finish_next_scores = [&](auto& s, bool arrived) {
      if (!arrived) shared.stages[pipe.index].k_full.wait(pipe.phase);
      start_output(o, p, operands, values.index);
      finish_scores(s);
      shared.stages[values.index].v_empty.arrive();
    };
    auto last_step = [&](auto& s, auto& p_last, bool arrived) {
      finish_next_scores(s, arrived);
      finish_exponentials(s, p_last);
      finish_output(o, p_last, shared, operands, values);
    };
    shared.stages[pipe.index].k_full.wait(pipe.phase);
    finish_scores(s);
    pending.finish(shared.q_empty, at);
    begin_softmax(s, softmax, args.Lk, at);
    bool arrived;
    while (true) {
      arrived = finish_exponentials(s, p);
      if (key >= keys.end) break;
      finish_next_scores(s, arrived);
    }
    const int tail_units = Split::tail_units(seen);
    if (tail_units == 0) {
      finish_output(o, p, shared, operands, values);
    } else if (tail_units == 1) {
      float s[8];
      uint32_t p_last[4];
      last_step(s, p_last, arrived);
    } else {
      float s[16];
      uint32_t p_last[8];
      last_step(s, p_last, arrived);
    }
  }

  // As attend(), but O += P V of a step runs beside the exponentials of the next step, which is kSplits steps later.
  CUTLASS_DEVICE static void attend_pipelined(Shared& shared, const ForwardArgs& args, Pipe& pipe, uint32_t q,
                                              const Keys& keys, const Visible& seen, PendingStore& pending,
                                              float (&o)[kHeadDim / 2], Softmax& softmax, const ConsumerCoord& at) {
    float factor[2];
    float s[kKeys / 2];
    uint32_t even[kKeys / 4], odd[kKeys / 4];
    Operands operands(shared, at);
    shared.stages[pipe.index].k_full.wait(pipe.phase);
    start_scores(s, shared, operands, pipe.index, q, args.f, at);
    wgmma_wait<0>();
    fence_registers(s);
    shared.stages[pipe.index].k_empty.arrive();
    pending.finish(shared.q_empty, at);
    begin_softmax(s, softmax, args.Lk - keys.begin, at);
    exponentiate(even, s, softmax, args.Lk - keys.begin, at, [](const float (&)[2]) {});  // o is still 0

    int key = keys.begin + kSplits * kKeys;
    auto step = [&](auto& s, uint32_t (&p)[kKeys / 4], auto& p_next) {
      const Pipe values = pipe;
      bool arrived = true;  // V; tested early, because the answer takes a while
      if (!Config::kLoadsValuesLater) arrived = shared.stages[values.index].v_full.test_wait(values.phase);
      Split::advance_to_next(pipe);
      shared.stages[pipe.index].k_full.wait(pipe.phase);
      start_scores(s, shared, operands, pipe.index, q, args.f, at);
      if (!arrived) shared.stages[values.index].v_full.wait(values.phase);
      start_output(o, p, operands, values.index);
      wgmma_wait<1>();
      fence_registers(s);
      shared.stages[pipe.index].k_empty.arrive();
      bool moves = false;  // m of this warp; rescale(o, factor) follows the product, for which all warps wait together
      exponentiate(p_next, s, softmax, args.Lk - key, at,
                   [&](const float (&of_move)[2]) { moves = true, factor[0] = of_move[0], factor[1] = of_move[1]; });
      wgmma_wait<0>();
      fence_registers(o);
      if (moves) rescale(o, factor);
      shared.stages[values.index].v_empty.arrive();
      key += kSplits * kKeys;
    };
    auto last_product = [&](auto& p) {
      finish_output(o, p, shared, operands, pipe);
      pipe.advance();
    };
    auto finish = [&](uint32_t (&p)[kKeys / 4]) {
      const int tail_units = Split::tail_units(seen);
      if (tail_units == 0) {
        last_product(p);
      } else if (tail_units == 1) {
        float s[8];
        uint32_t p_last[4];
        step(s, p, p_last), last_product(p_last);
      } else {
        float s[16];
        uint32_t p_last[8];
        step(s, p, p_last), last_product(p_last);
      }
    };
    while (true) {
      if (key >= keys.end) return finish(even);
      step(s, even, odd);
      if (key >= keys.end) return finish(odd);
      step(s, odd, even);
    }
  }

  // Stores O / l, math.md (5), through shared memory, and lse, (6).
  CUTLASS_DEVICE static void finish(uint8_t* tile, const ForwardArgs& args, const CUtensorMap& map_o,
                                    const Coordinates& block, float (&o)[kHeadDim / 2], Softmax& softmax,
                                    const ConsumerCoord& at) {
    int query = block.query + at.tile * kQueries, n = block.row + at.row;
    softmax.finish_sums();
    float inverse[2];
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2; ++r) {
      inverse[r] = ptx::reciprocal(softmax.l[r]);
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
    at.sync();  // the products of all warps have read Q
    store_tile<scalar_t, QTile>(map_o, tile, o, inverse, at, query, block.head, n, block.batch);
  }

  // Releases the stages of steps that nobody computes, each by the warpgroups that would.
  CUTLASS_DEVICE static void release(Shared& shared, Pipe& pipe, int num_steps, const ConsumerCoord& at) {
    CUTLASS_PRAGMA_NO_UNROLL
    for (int step = 0; step < num_steps; ++step, pipe.advance()) {
      if (step % kSplits != Split::index(at)) continue;
      Stage& stage = shared.stages[pipe.index];
      stage.k_full.wait(pipe.phase), stage.k_empty.arrive();
      stage.v_full.wait(pipe.phase), stage.v_empty.arrive();
    }
  }

  CUTLASS_DEVICE static void run(Shared& shared, const ForwardArgs& args, const CUtensorMap& map_o) {
    ConsumerCoord at = Split::coordinates();
    Pipe pipe;
    QPipe q_pipe;
    PendingStore pending;
    for (int tile = blockIdx.x; tile < args.num_tiles; tile += gridDim.x, q_pipe.advance()) {
      Coordinates block = Config::locate(args, tile);
      uint8_t* q = shared.q[q_pipe.index][at.warpgroup / kSplits];
      shared.q_full[q_pipe.index].wait(q_pipe.phase);
      const Visible& seen = shared.visible[q_pipe.index];
      const int num_hidden = uniform(seen.num_hidden);
      const int num_steps = uniform(seen.num_steps) - num_hidden;
      const Keys keys = Split::keys(num_steps, uniform(seen.tail_units), at);
      const uint32_t rows = seen.rows, visible_rows = seen.visible_rows;
      release(shared, pipe, num_hidden, at);
      const bool exists = (rows >> at.row & 1) != 0 && block.query + at.tile * kQueries < args.Lq;
      if (exists && (visible_rows >> at.row & 1) != 0) {
        if (Config::kScalesQ && Split::is_first(at)) scale_q(q, args.q_factor, at);
        Split::sync(at);  // and the previous tile's partial results have been read
        const uint32_t q_low = QTile::descriptor_low(shared_address(q));
        float o[kHeadDim / 2] = {};
        Softmax softmax(args.c);
        if constexpr (kSplits > 1) {
          if (keys.begin < keys.end) {
            Pipe mine = pipe;
            Split::advance(mine, Split::index(at));
            attend_pipelined(shared, args, mine, q_low, keys, seen, pending, o, softmax, at);
          } else {
            pending.finish(shared.q_empty, at);
          }
          for (int step = 0; step < num_steps; ++step) pipe.advance();
        } else if constexpr (Config::kPipelined) {
          attend_pipelined(shared, args, pipe, q_low, keys, seen, pending, o, softmax, at);
        } else {
          attend(shared, args, pipe, q_low, keys, seen, pending, o, softmax, at);
        }
        Split::join(shared, o, softmax, at);
        if (Split::is_first(at)) finish(q, args, map_o, block, o, softmax, at);
      } else {  // nothing to compute, but the stages must be released
        pending.finish(shared.q_empty, at);
        release(shared, pipe, num_steps, at);
        if (exists && Split::is_first(at)) {  // a row n that sees no key
          float o[kHeadDim / 2] = {};
          Softmax softmax(args.c);
          finish(q, args, map_o, block, o, softmax, at);
        }
      }
      pending.buffer = q_pipe.index;
    }
    if (at.issues()) cute::tma_store_wait<0>();  // the block's shared memory must outlive the reads of the stores
  }
};

}  // namespace ds4s::sm90
