// What a block of the fused kernel finds before its loop: the keys that are visible, and the memory to which it adds.
// Beside other blocks' additions a load takes about 2 us. So loads are started early, and warps share the rest: 0.976
// of the time at (1,384,384,4,32).
#pragma once

#include "sm80/backward/dq_product.h"
#include "sm80/backward/row_partner.h"

namespace ds4s {

// The visible keys of a block, as KeyMask::units, and of the other block of its cluster. The constructor only starts
// the loads.
template <typename Config>
class VisibleUnits {
 public:
  CUTLASS_DEVICE VisibleUnits(const BackwardInputs& args, const TilePosition<Config>& at, bool wants_dbias2)
      : first_(at.first) {
    mine_ = load(args.mask, true, at.bn);
    if constexpr (Config::kPairsRows) {
      is_neighbour_ = wants_dbias2 && RowPartner<Config>::is_neighbour(args.p, at);
      theirs_ = load(args.mask, is_neighbour_, at.bn ^ 1);
    }
  }
  CUTLASS_DEVICE uint32_t of_block() const { return units_in<Config::kOwned>(mine_, first_); }
  // first: the warp's first key in the block.
  CUTLASS_DEVICE uint32_t of_warp(int first) const { return units_in<32>(mine_, first_ + first); }
  // Those that one of the two blocks sees; 0: the block has no partner.
  CUTLASS_DEVICE uint32_t with_partner() const {
    if constexpr (!Config::kPairsRows) return 0;
    const uint32_t theirs = units_in<Config::kOwned>(theirs_, first_);
    return is_neighbour_ ? RowPartner<Config>::units(of_block(), theirs) : 0;
  }

 private:
  CUTLASS_DEVICE uint32_t load(const KeyMask& mask, bool wanted, int64_t bn) const {
    return mask.template load_word<Config::kOwned>(wanted, bn, first_);
  }
  template <int kKeys>
  CUTLASS_DEVICE static uint32_t units_in(uint32_t word, int key) {
    return uniform(KeyMask::units_in<kKeys>(word, key));
  }

  const int first_;
  uint32_t mine_, theirs_ = 0;  // words of the mask
  bool is_neighbour_ = false;
};

// Stores the pair for which the block has to wait before it adds to dq. Called by one thread; its load is under way
// together with those of the block's tiles.
CUTLASS_DEVICE void store_before(DqOutputs& outputs, const DqAccumulatorPool& pool, uint32_t pair) {
  const int32_t before = pool.before(pair);
  const bool is_done = before < 0 || ptx::load_acquire(pool.progress + before) == DqAccumulatorPool::kDone;
  outputs.before = is_done ? -1 : before;
}

// Stores, for the loop and what follows, the block's position and the memory to which it adds. Called by one lane of
// each warp: the warps find different parts at the same time. partner_units: VisibleUnits::with_partner.
template <typename Config>
CUTLASS_DEVICE void store_outputs(DqOutputs& outputs, TilePosition<Config>& position, int warp,
                                  const BackwardInputs& args, const DqAccumulatorPool& pool,
                                  const TilePosition<Config>& at, uint32_t units, uint32_t partner_units) {
  static_assert(Config::kWarps == 4, "four parts");
  if (warp == 0) {
    outputs.accumulator = pool.accumulator(at.pair);
  } else if (warp == 1) {
    position = at;
  } else if (warp == 2) {
    const KeyMask::Tiles tiles = args.mask.template visible_tiles<Config::kOwned>(at.bn, int(args.p.Lk));
    outputs.num_others = at.first / Config::kOwned == tiles.last ? tiles.count - 1 : -1;
  } else {
    constexpr int kUnits = Config::kOwned / KeyMask::kUnit;
    const int hidden_units = __clz(int((units | partner_units) << (32 - kUnits)));
    const int64_t queries = (at.b * args.p.H + at.h) * pool.padded_queries;
    outputs.dbias2 = pool.dbias2 + queries * pool.padded_keys + at.first;
    outputs.dbias2_row_bytes = pool.padded_keys * int(sizeof(float));
    outputs.has_partner = partner_units != 0;
    outputs.dbias2_begin = partner_units != 0 ? int(ptx::rank_in_cluster()) * PartnerBuffers<Config>::kKeys : 0;
    outputs.dbias2_end = pool.dbias2 ? Config::kOwned - hidden_units * KeyMask::kUnit : 0;
  }
}

}  // namespace ds4s
