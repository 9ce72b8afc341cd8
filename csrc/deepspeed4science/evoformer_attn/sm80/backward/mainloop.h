// The mainloop of kernel_dq_dkdv.h over the tiles that a block streams: its state, and one tile's part of the
// gradients.
//
// Pipeline stages: while tile i is computed from one, tile i + 1 is loaded into the other. There is one barrier a tile.
// After it tile i has arrived, the other stage is free, and (kFusesDq) dS of tile i - 1 is complete, so that it can be
// added to dq and dbias2.
#pragma once

#include "sm80/backward/dq_accumulator.h"
#include "sm80/backward/warp_gradients.h"

namespace ds4s {

// Shared memory, in bytes from its beginning.
template <typename Config>
struct SharedLayout {
  using OwnedTile = Tile<typename Config::scalar_t, Config::kOwned, Config::kHeadDim>;
  static constexpr int kStageBytes = StreamedTiles<Config>::kStageBytes;
  static constexpr int kOwnedBytes = (1 + Config::kWantsDs) * OwnedTile::kBytes;

  // The offset of the owned tiles. If the loop reads them from registers, they lie in the second stage's memory, except
  // in the fused kernel, whose product dS K reads K again.
  CUTLASS_HOST_DEVICE static constexpr int owned(int stages) {
    return (Config::kResident && !Config::kFusesDq ? 1 : stages) * kStageBytes;
  }
  // The offset of the first or second tile of dS. If the loop reads V from registers, V is loaded to the first one's
  // memory before.
  CUTLASS_HOST_DEVICE static constexpr int ds(int stages, int index) {
    static_assert(!Config::kFusesDq || !Config::kResident || OwnedTile::kBytes <= DsTile<Config>::kBytes,
                  "V does not reach the second one");
    return owned(stages) + (Config::kResident ? 1 : 2) * OwnedTile::kBytes + index * DsTile<Config>::kBytes;
  }
  CUTLASS_HOST_DEVICE static constexpr int bias2(int stages) { return ds(stages, 2); }
  CUTLASS_HOST_DEVICE static constexpr int partner(int stages) {
    return bias2(stages) + (Config::kTransposesBias2 ? TransposedBias2<Config>::kBytes : 0);
  }
  CUTLASS_HOST_DEVICE static constexpr int outputs(int stages) {
    return partner(stages) + (Config::kPairsRows ? int(sizeof(PartnerBuffers<Config>)) : 0);
  }
  CUTLASS_HOST_DEVICE static constexpr int position(int stages) {
    static_assert(sizeof(DqOutputs) % alignof(TilePosition<Config>) == 0, "the position is aligned");
    return outputs(stages) + int(sizeof(DqOutputs));
  }
  static constexpr int bytes(int stages) {
    if constexpr (Config::kFusesDq) return position(stages) + int(sizeof(TilePosition<Config>));
    const bool in_second_stage = stages == 2 && Config::kResident && kStageBytes > kOwnedBytes;
    return owned(stages) + (in_second_stage ? kStageBytes : kOwnedBytes);
  }
};

template <typename Config>
struct Mainloop {
  using scalar_t = typename Config::scalar_t;
  using Shared = SharedLayout<Config>;
  using Streamed = StreamedTiles<Config>;
  using StreamedTile = typename Streamed::TileT;
  using Vectors =
      typename cutlass::platform::conditional<Config::kFusesDq, QueryVectors<Config>, StreamedVectors<Config>>::type;
  using Warp = WarpGradients<Config>;
  using Bias2 = typename Warp::Bias2;
  static constexpr int kStreamed = Config::kStreamed;
  // Whether a warp whose keys are all hidden leaves the computation out. At D = 64 the fused kernel has no registers
  // for an addition of its own there, and the others would spill: 24 to 80 bytes more.
  static constexpr bool kSkipsWarps = Config::kOwnsKeys && (Config::kChannelBytes <= 64 || Config::kStaggers);

  const int stages;
  char* shared;
  const int thread;
  OrderedDqAdd<Config> dq_add;
  RowPartner<Config> partner;
  Streamed streamed;
  Warp warp;
  Vectors vectors;
  Bias2 bias2;

  // make_vectors, make_bias2: return them; their first loads may have been started. They are called after `warp` is
  // made: the kernel for dq at D = 128 would spill an address on 9.0 otherwise.
  template <typename MakeVectors, typename MakeBias2>
  CUTLASS_DEVICE Mainloop(const BackwardInputs& args, const DqAccumulatorPool& pool, const TilePosition<Config>& at,
                          const Streamed& streamed_, const MakeVectors& make_vectors, const MakeBias2& make_bias2,
                          int stages_, char* shared_, int thread_)
      : stages(stages_),
        shared(shared_),
        thread(thread_),
        dq_add{pool, at.pair},
        partner{partner_buffers(shared_, stages_)},
        streamed(streamed_),
        warp(args.p.scale, thread_, at.part),
        vectors(make_vectors()),
        bias2(make_bias2()) {
    vectors.unit = warp.probabilities.column_unit();
  }
  CUTLASS_DEVICE static Bias2 bias2_of(const BackwardInputs& args, const TilePosition<Config>& at, int stages,
                                       char* shared, int thread) {
    const BiasMatrix& matrix = Config::kOwnsKeys && !Config::kTransposesBias2 ? args.bias2_t : args.bias2;
    const scalar_t* g = static_cast<const scalar_t*>(matrix.ptr) + at.b * matrix.stride_b + at.h * matrix.stride_h;
    return Bias2(g, matrix.stride_row, at.first, at.num_owned(args.p), at.num_streamed(args.p),
                 shared + Shared::bias2(stages), thread / 32 * 32, thread & 31);
  }

  CUTLASS_DEVICE scalar_t* owned_tile() const { return reinterpret_cast<scalar_t*>(shared + Shared::owned(stages)); }
  CUTLASS_DEVICE static DqOutputs* outputs(char* shared, int stages) {
    return reinterpret_cast<DqOutputs*>(shared + Shared::outputs(stages));
  }
  CUTLASS_DEVICE DqOutputs* outputs() const { return outputs(shared, stages); }
  CUTLASS_DEVICE TilePosition<Config>* position() const {
    return reinterpret_cast<TilePosition<Config>*>(shared + Shared::position(stages));
  }

  CUTLASS_DEVICE static PartnerBuffers<Config>* partner_buffers(char* shared, int stages) {
    return reinterpret_cast<PartnerBuffers<Config>*>(shared + Shared::partner(stages));
  }

  // tile: the first one.
  CUTLASS_DEVICE void run(int tile) {
    const int num_tiles = (streamed.num + kStreamed - 1) / kStreamed;
    int stage = 0;
    CUTLASS_PRAGMA_NO_UNROLL
    while (tile < num_tiles) {
      // Waits for this tile and starts the loads of the next one.
      const int next_tile = streamed.seek(tile + 1);
      if (Config::kFusesDq && tile == 1) wait_for_accumulator();
      arrive();
      const bool more = next_tile < num_tiles;
      const int next_stage = stages == 2 ? stage ^ 1 : 0;
      typename Vectors::Loaded next;
      if (Config::kMaxStages == 2 && stages == 2 && more) streamed.load(next_tile, next_stage);
      if (more) next = vectors.load(next_tile * kStreamed);
      add_tile(tile, next_tile, stage, more);
      if (stages == 1 && more) {
        __syncthreads();
        streamed.load(next_tile, 0);
      }
      if (more) vectors.store(streamed.vectors(next_stage), next, next_tile * kStreamed);
      tile = next_tile, stage = next_stage;
    }
    if constexpr (Config::kFusesDq) {
      if (num_tiles == 1) wait_for_accumulator();
      __syncthreads();
      add_ds<Additions::kDq>(num_tiles - 1, false);
    }
  }
  // To be called after run(): dbias2 of the last tile. No other block waits for it, unlike for dq.
  CUTLASS_DEVICE void add_last_dbias2() const { add_ds<Additions::kDbias2>((streamed.num - 1) / kStreamed, false); }

  CUTLASS_DEVICE static void arrive() {
    if constexpr (Config::kAsync) ptx::cp_async_wait<0>();
    __syncthreads();
  }

 private:
  CUTLASS_DEVICE void add_tile(int tile, int next_tile, int stage, bool more) {
    // A single stripe is not written as a loop: ptxas would keep the accumulators of D = 128 twice (456 bytes spilled
    // instead of 16).
    int stripes = Config::kStripes;
    if (Config::kStripes > 1 && !Config::kFusesDq) {
      stripes = min(stripes, (streamed.num - tile * kStreamed + 31) / 32);
    }
    if (Config::kStripes > 1 && Streamed::Keys::kSkips) {
      stripes = min(stripes, Streamed::Keys::groups_in_use(streamed.keys.units_of(tile)));
    }
    constexpr int kUnrolledStripes = Config::kUnrolledStripes;
    bool skips = false;
    if constexpr (kSkipsWarps) skips = warp.sees_nothing();
#pragma unroll(kUnrolledStripes)
    for (int stripe = skips && !Config::kStaggers ? stripes : 0; stripe < stripes; ++stripe) {
      if constexpr (Config::kFusesDq) {
        if (tile > 0) add_ds_before(stripe, tile - 1, more);
        if (Config::kStaggers && skips) continue;
      }
      int next_first = tile * kStreamed + 32 * (stripe + 1);
      if (Streamed::Keys::kSkips && stripe + 1 == stripes) next_first = next_tile * kStreamed;
      warp.add_stripe(streamed.qk(stage) + StreamedTile::offset(32) * stripe,
                      streamed.dov(stage) + StreamedTile::offset(32) * stripe, streamed.vectors(stage) + 64 * stripe,
                      bias2, stripe, next_first, more, ds_tile(tile), partner, tile);
    }
    if constexpr (Config::kFusesDq) {
      if (tile > 0) add_ds_at_end(tile - 1, more);
    }
    if constexpr (Config::kFusesDq && kSkipsWarps) {
      if (skips && tile < 2) DsTile<Config>::clear(ds_tile(tile), warp.first, warp.lane);
      if constexpr (Config::kPairsRows) {
        if (skips) partner.send_zeros(tile, warp.lane_ds);
      }
    }
  }

  // The three times at which dS of the tile before is added: before the first stripe, before the second, and at the
  // end. kStaggers: each warp adds all of it at one of them.
  CUTLASS_DEVICE void add_ds_before(int stripe, int tile, bool more) const {
    static_assert(Config::kStripes == 2 && Config::kWarps == 4, "three times, two warps at the last one");
    if constexpr (Config::kStaggers) {
      const int before = vectors.is_delta ? 1 : 0;  // warps 2 and 3 load delta
      if (stripe == before && !adds_at_end()) add_ds<Additions::kDqAndDbias2>(tile, more);
    } else if (stripe == 0) {
      add_ds<Additions::kDq>(tile, more);
    } else {
      add_ds<Additions::kDbias2FirstHalf>(tile, more);
    }
  }
  CUTLASS_DEVICE void add_ds_at_end(int tile, bool more) const {
    if constexpr (!Config::kStaggers) {
      add_ds<Additions::kDbias2SecondHalf>(tile, more);
    } else if (adds_at_end()) {
      add_ds<Additions::kDqAndDbias2>(tile, more);
    }
  }
  CUTLASS_DEVICE bool adds_at_end() const { return uniform(thread / 32) % 2 == 1; }
  CUTLASS_DEVICE void wait_for_accumulator() const {
    if (warp.is_thread_0()) dq_add.wait_for(outputs()->before);
  }
  // Adds dq and dbias2 of a tile whose dS is complete. Their addresses are in shared memory: in registers they would be
  // kept through the whole loop. more: add_ds is called again two tiles later.
  template <Additions kWhat>
  CUTLASS_DEVICE void add_ds(int tile, bool more) const {
    if constexpr (Config::kFusesDq) {
      DqProduct<Config>::template run<kWhat>(ds_tile(tile), owned_tile(), *outputs(), tile, partner.buffers, more);
    }
  }
  CUTLASS_DEVICE scalar_t* ds_tile(int tile) const {
    return reinterpret_cast<scalar_t*>(shared + Shared::ds(stages, tile & 1));
  }
};

}  // namespace ds4s
