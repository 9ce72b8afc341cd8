// Host side: the arguments of each launch of a backward, filled once from the caller's parameters and the plan.
#pragma once

#include "common/postprocess_host.h"
#include "sm90/backward/kernels.h"
#include "sm90/backward/preprocess.h"

namespace ds4s::sm90 {

class BackwardFill {
 public:
  BackwardFill(const BwdParams& p, const Sm90BackwardPlan& plan)
      : p_(p), plan_(plan), bias2_(p), key_mask_(p), flag_(new_postprocess_flag(at<uint32_t>(plan.postprocess_flag))) {}

  template <typename T>
  T* at(int64_t offset) const {
    return ds4s::at<T>(p_.workspace, offset);
  }
  const Bias2View& bias2() const { return bias2_; }
  const KeyMaskBuffers<BwdParams>& key_mask() const { return key_mask_; }
  KeyMaskArgs find_visible_keys() const {
    return key_mask_.arguments(at<void>(plan_.key_mask), at<void>(plan_.bias1), flag_);
  }
  PostprocessArgs postprocess() const {
    PostprocessArgs args = postprocess_args(p_, at<void>(plan_.key_mask), flag_);
    args.p.dbias2 = dbias2_sums(), args.dbias2_stride = plan_.dbias2_stride;
    args.dbias2_adds_up = plan_.orders_dbias2();
    return args;
  }
  // To which kernels add or store dbias2, in float32; or null.
  float* dbias2_sums() const { return plan_.padded_dbias2 >= 0 ? at<float>(plan_.padded_dbias2) : p_.dbias2; }

  PreprocessArgs preprocess() const {
    PreprocessArgs args{};
    args.rows.p = p_, args.rows.mask = mask();
    args.negative_delta = at<float>(plan_.delta), args.flag = flag_;
    args.row_lists = row_lists();
    args.num_lists = plan_.keys_per_list > 0 ? int32_t(p_.B) * args.row_lists.tiles : 0;
    args.num_early = int32_t(plan_.early_blocks);
    if (plan_.preprocess_finds_keys) args.key_mask = find_visible_keys(), args.num_masked = int32_t(p_.B * p_.N);
    args.computes_delta = !plan_.delta_with_dq;
    if (plan_.dbias2_waits_for_delta()) args.counters = {at<float>(plan_.delta_progress), 1};
    if (p_.dbias1 && plan_.dbias1_parts < 0) args.dbias1 = {p_.dbias1, p_.B * p_.N * p_.Lk};
    if (plan_.adds_dbias2 || plan_.dq_global.adds_dbias2 || plan_.pairs_rows) {
      args.dbias2 = {dbias2_sums(), p_.B * p_.H * p_.Lq * plan_.dbias2_stride};
    }
    if (plan_.dq_global) {
      const bool are_zero = plan_.adds_dbias2;  // the accumulators lie in dbias2, which is zeroed above
      if (!are_zero)
        args.accumulators = {dq_accumulators(), plan_.dq_global.num_accumulators * plan_.dq_global.accumulator_size};
      args.counters = {at<float>(plan_.counters), plan_.num_counters()};
    }
    return args;
  }

  // Null where no tile of keys is left out.
  int2* seen_tiles() const {
    return plan_.keys == Kernel::kDqGlobal && plan_.key_mask >= 0
               ? at<int2>(plan_.counters) + plan_.dq_global.num_counted_sections
               : nullptr;
  }

  // Where dq is added up in float16.
  DqRangeArgs dq_range(int head_dim) const {
    DqRangeArgs args = DqRangeArgs::of(p_, head_dim, plan_.dq_global.key_blocks);
    args.lie_at(at<void>(plan_.dq_range), at<uint32_t>(plan_.counters) + plan_.dq_global.num_counters - 1);
    args.num_writers = reinterpret_cast<const uint32_t*>(seen_tiles());
    return args;
  }

  FindSeenTilesArgs find_seen_tiles(int tile_keys) const {
    return {mask(), int32_t(p_.B * p_.N), int32_t(p_.Lk), tile_keys, seen_tiles()};
  }

  // Counters of later_delta.h.
  int32_t* later_delta() const { return at<int32_t>(plan_.counters) + plan_.dq_global.num_counters; }

  // Of kernel_dq_dkdv with Config's tiles.
  template <typename Config>
  BackwardArgs dq_dkdv(bool waits) const {
    BackwardArgs args = common(waits);
    const int64_t num_owned = Config::kKeys ? p_.Lk : p_.Lq;
    args.by_blocks = cutlass::FastDivmod(int(ceil_div(num_owned, Config::kTiles * Config::kOwned)));
    args.heads_outside = plan_.heads_outside;
    const int64_t parts = Config::kHasQueryParts ? plan_.query_parts : Config::kSplitsKeys ? 1 : plan_.cluster_blocks;
    const int64_t of_part = ceil_div(p_.Lq, parts * Config::kColumns) * Config::kColumns;
    // Of very many parts, rounding up to whole steps may leave the last one without a query: it is left out.
    args.queries_of_part = int32_t(of_part), args.num_query_parts = int32_t(ceil_div(p_.Lq, of_part));
    args.part_exponents = at<uint16_t>(plan_.part_exponents);
    constexpr int kClusterRows = Config::kPairsRows ? 2 : 1;
    args.by_row_groups = cutlass::FastDivmod(int(ceil_div(p_.N, Config::kRows * kClusterRows)));
    args.num_tiles = int32_t(args.by_blocks.divisor * p_.H * args.by_row_groups.divisor * p_.B) * kClusterRows;
    args.stores_second = p_.dv != nullptr;
    if constexpr (Config::kKeys) {
      args.stores_first = p_.dk != nullptr;
      args.stores_dbias1 = plan_.dbias1_parts >= 0, args.stores_dbias2 = plan_.rounds_dbias2;
      args.dbias1 = args.stores_dbias1 ? at<float>(plan_.dbias1_parts) : p_.dbias1;
    } else {
      args.stores_first = true;
      args.stores_dbias2 = plan_.stores_dbias2, args.dbias2 = p_.dbias2;
    }
    if constexpr (Config::kPairsRows) {
      args.dbias2_global = dbias2_sums(), args.dbias2_stride = int32_t(plan_.dbias2_stride);
    } else if constexpr (Config::kDqInGlobal) {
      args.dbias2_global = plan_.dq_global.adds_dbias2 ? p_.dbias2 : nullptr;
    }
    if constexpr (Config::kDqInGlobal) {
      const int64_t sections = plan_.dq_global.num_counted_sections;
      args.section_steps = int32_t(plan_.dq_global.section_steps);
      args.num_sections = int32_t(plan_.dq_global.num_sections);
      args.dq_accumulators = reinterpret_cast<uint4*>(dq_accumulators());
      args.num_dq_accumulators = int32_t(plan_.dq_global.num_accumulators);
      args.dq_progress = at<int32_t>(plan_.counters), args.dq_released = args.dq_progress + sections;
      args.seen_tiles = seen_tiles();  // four words after dq_released
      args.dq_num_released = args.dq_released + sections + 4, args.next_tile = args.dq_num_released + 1;
      if (Config::kHalfDqSums) {
        const DqRangeArgs range = dq_range(Config::kHeadDim);
        args.dq_exponents = range.exponents, args.dq_largest = range.largest;
        args.later_delta = later_delta(), args.num_first_pairs = int32_t(plan_.first_pairs);
      }
    }
    return args;
  }

  BackwardArgs dbias2(const Dbias2ClusterTile& tile, bool waits) const {
    BackwardArgs args = common(waits);
    args.dbias2 = plan_.dbias2_parts < 0 ? p_.dbias2 : at<float>(plan_.dbias2_parts);
    args.adds_dbias2 = plan_.adds_dbias2, args.partitions_rows = plan_.partitions_rows;
    args.waits_before_stores = bool(plan_.dq_global);
    args.row_lists = row_lists();
    args.next_dbias2_tile = key_mask_.counter(at<void>(plan_.key_mask));
    args.by_key_blocks = cutlass::FastDivmod(int(ceil_div(p_.Lk, tile.keys)));
    args.by_query_blocks = cutlass::FastDivmod(int(ceil_div(p_.Lq, tile.queries)));
    args.by_batches = cutlass::FastDivmod(int(p_.B));
    args.num_tiles = int32_t(tile.num_tiles(p_));
    args.num_slices = plan_.device_chooses_slices ? 0 : int32_t(plan_.num_slices);
    return args;
  }

 private:
  // The fields that both kernels read.
  BackwardArgs common(bool waits) const {
    BackwardArgs args{};
    const bool copied = plan_.bias1 >= 0;
    args.bias1 = copied ? at<void>(plan_.bias1) : p_.bias1;
    args.bias1_stride[0] = copied ? p_.N * p_.Lk : p_.bias1_stride[0];
    args.bias1_stride[1] = copied ? p_.Lk : p_.bias1_stride[1];
    const TensorView<5> bias2 = bias2_.read(at<void>(plan_.bias2));
    args.bias2_H = bias2.size[2] > 1, args.bias2_B = bias2.size[4] > 1;
    args.bias2 = bias2.ptr;
    args.bias2_stride[0] = args.bias2_B ? bias2.stride[4] : 0;
    args.bias2_stride[1] = args.bias2_H ? bias2.stride[2] : 0;
    args.bias2_stride[2] = bias2.stride[1];
    args.mask = mask();
    args.lse = p_.lse;
    args.negative_delta = at<float>(plan_.delta);
    args.flag = flag_;
    args.delta_progress = at<int32_t>(plan_.delta_progress), args.waits_for_delta = plan_.dbias2_waits_for_delta();
    args.B = int32_t(p_.B), args.N = int32_t(p_.N), args.H = int32_t(p_.H);
    args.Lq = int32_t(p_.Lq), args.Lk = int32_t(p_.Lk);
    args.by_heads = cutlass::FastDivmod(int(p_.H));
    args.waits = waits;
    args.scale = p_.scale, args.unit = 1.f / p_.scale, args.c = p_.scale * kLog2e;
    return args;
  }
  KeyMask mask() const { return key_mask_.at(at<void>(plan_.key_mask)); }
  RowLists row_lists() const {
    RowLists lists{};
    lists.N = int32_t(p_.N);
    if (plan_.keys_per_list == 0) return lists;
    lists.tiles = int32_t(ceil_div(p_.Lk, plan_.keys_per_list));
    lists.keys = int32_t(plan_.keys_per_list), lists.cuts_evenly = plan_.cuts_evenly;
    lists.counts = at<int32_t>(plan_.row_lists), lists.tile_keys = lists.counts + p_.B * lists.tiles;
    lists.rows = lists.tile_keys + 1;
    return lists;
  }
  float* dq_accumulators() const { return plan_.dq_global.adds_dbias2 ? at<float>(plan_.accumulators) : p_.dbias2; }

  const BwdParams& p_;
  const Sm90BackwardPlan& plan_;
  Bias2View bias2_;
  KeyMaskBuffers<BwdParams> key_mask_;
  PostprocessFlag flag_;
};

}  // namespace ds4s::sm90
