// Host side of the Hopper backward: BwdParams -> workspace, tensor maps, passes. A generated unit names one
// Backward<...> and exports its two functions.
#pragma once

#include <algorithm>

#include "common/backward_host.h"
#include "common/key_mask_buffers.h"
#include "params.h"
#include "sm90/backward/dq_global_plan.h"
#include "sm90/backward/kernel_dbias2.h"
#include "sm90/backward/kernel_dq_dkdv.h"
#include "sm90/backward/preprocess.h"
#include "sm90/backward/tile_sizes.h"
#include "sm90/bias2_rows.h"
#include "sm90/launch.h"
#include "sm90/persistent_grid.h"

namespace ds4s::sm90 {

// A bias pass whose blocks, in clusters of so many, share keys.
template <typename Config_, int kCluster_>
struct Dbias2InClusters {
  using Config = Config_;
  static constexpr int kCluster = kCluster_;
  using Grid = PersistentGrid<kernel_dbias2<Config>, Config::kNumThreads, Config::kSharedBytes, kCluster>;
  static constexpr int64_t kQueries = Config::kBlockQueries * kCluster, kKeys = Config::kBlockKeys;  // of a cluster
};

template <typename Element, int kHeadDim, bool kBias2>
class Backward : BackwardHost {
 public:
  static int64_t workspace_bytes(const BwdParams& p) { return Backward(p).bytes_; }
  static int run(const BwdParams& p, cudaStream_t stream) {
    if (p.B * p.N * p.H == 0) return cudaSuccess;
    Backward backward(p);
    if (!backward.fits()) return cudaErrorInvalidValue;
    backward.run_passes(stream);
    return backward.status_;
  }

 private:
  using Prepare = PrepareConfig<Element, kHeadDim>;
  using Choice = BackwardChoice<kHeadDim>;
  using KeyPass = DqDkdvConfig<Element, kHeadDim, /*kKeys=*/true, kBias2, typename Choice::Keys>;
  using QueryPass = DqDkdvConfig<Element, kHeadDim, /*kKeys=*/false, kBias2, typename Choice::Queries>;
  using FewKeyPass = DqDkdvConfig<Element, kHeadDim, /*kKeys=*/true, kBias2, typename Choice::FewKeys>;
  using FewQueryPass = DqDkdvConfig<Element, kHeadDim, /*kKeys=*/false, kBias2, typename Choice::FewQueries>;
  using FusedPass = DqDkdvConfig<Element, kHeadDim, /*kKeys=*/true, kBias2, typename Choice::Fused>;
  using LongFusedPass = DqDkdvConfig<Element, kHeadDim, /*kKeys=*/true, kBias2, typename Choice::LongFused>;
  using SplitFusedPass = DqDkdvConfig<Element, kHeadDim, /*kKeys=*/true, kBias2, typename Choice::SplitFused>;
  using DqGlobalPass = DqDkdvConfig<Element, kHeadDim, /*kKeys=*/true, kBias2, typename Choice::DqGlobal>;
  template <typename Tiles, int kCluster>
  using Dbias2PassOf = Dbias2InClusters<Dbias2Config<Element, kHeadDim, Tiles>, kCluster>;
  using PairedDbias2Pass = Dbias2PassOf<typename Choice::Bias, 2>;
  using SingleDbias2Pass = Dbias2PassOf<typename Choice::Bias, 1>;
  using SquareDbias2Pass = Dbias2PassOf<typename Choice::SquareBias, 1>;

  explicit Backward(const BwdParams& p) : BackwardHost(p), bias2_(p), key_mask_(p_) {
    int64_t rows = p.B * p.N * p.H * p.Lq;
    delta_ = reserve(true, rows * 4);
    dq_global_ = plan_dq_global();
    counters_ = reserve(bool(dq_global_), dq_global_.num_counters * 4);
    accumulators_ = reserve(dq_global_.adds_dbias2, dq_global_.num_accumulators * dq_global_.accumulator_size * 4);
    mask_ = reserve(key_mask_.needed(), key_mask_.bytes());
    if constexpr (kBias2) {
      if (p.dbias2 && key_mask_.needed()) with_dbias2_pass([this](auto pass) { reserve_row_lists<decltype(pass)>(); });
    }
    bias1_ = reserve(p.bias1 && p.bias1_stride[2] != 1, p.B * p.N * p.Lk * int64_t(sizeof(Element)));
    dbias1_parts_ = reserve(p.dbias1 && p.deterministic, p.B * p.N * p.H * p.Lk * 4);
    bias2_rows_ = reserve(bias2_.copied, bias2_.workspace_bytes());
    if constexpr (kBias2) {
      if (p.dbias2) with_dbias2_pass([this](auto pass) { slices_ = choose_slices_of<decltype(pass)>(); });
    }
    dbias2_parts_ = reserve(slices_ > 1 && p.deterministic, slices_ * p.B * p.H * p.Lq * p.Lk * 4);
  }

  template <typename Pass>
  void reserve_row_lists() {
    row_lists_ = reserve(true, p_.B * ceil_div(p_.Lk, Pass::kKeys) * (p_.N + 1) * 4);
  }
  template <typename Pass>
  void list_rows() {
    RowLists& lists = args_.row_lists;
    lists.N = int32_t(p_.N), lists.tiles = int32_t(ceil_div(p_.Lk, Pass::kKeys));
    if (row_lists_ < 0) return;
    int32_t *counts = at<int32_t>(row_lists_), *rows = counts + p_.B * lists.tiles;
    lists.counts = counts, lists.rows = rows;
    start_overlapping(list_visible_rows<Pass::kKeys>, p_.B * lists.tiles, kListThreads, 0, /*cluster=*/1, args_.mask,
                      lists, rows, counts);
  }

  bool fits() const {
    constexpr int64_t kLimit = int64_t(1) << 31;
    int64_t longest = p_.Lq > p_.Lk ? p_.Lq : p_.Lk;
    return p_.D <= kHeadDim && p_.Dv <= kHeadDim && p_.N < kLimit - 256 && longest < kLimit - 256 &&
           p_.B * p_.N * p_.H * ceil_div(longest, 4) < kLimit && (p_.bias2 != nullptr) == kBias2 &&
           (kBias2 || p_.dbias2 == nullptr);
  }

  template <typename Pass>
  int64_t choose_slices_of() {
    int blocks = 0;
    check(Pass::Grid::resident_blocks(blocks));
    int64_t clusters = blocks / Pass::kCluster, tiles = num_bias_tiles<Pass>();
    // With hidden keys tiles cost different amounts: at least four for each cluster.
    int64_t least = key_mask_.needed() ? ceil_div(4 * clusters, tiles) : 1;
    int64_t slices = choose_slices(tiles, clusters, least);
    // Where blocks come to many tiles, slices of 96 n are faster: (1,1536,1536,4,32) 22.4 instead of 22.9. In
    // deterministic mode each slice takes memory.
    if (tiles < 4 * clusters || p_.deterministic) return slices;
    return std::max(slices, std::min(ceil_div(p_.N, 96), int64_t(16)));
  }
  template <typename Pass>
  int64_t num_bias_tiles() const {
    return ceil_div(p_.Lq, Pass::kQueries) * ceil_div(p_.Lk, Pass::kKeys) * p_.H * p_.B;
  }
  // Elements of all tiles: what a pass computes, needed or not.
  template <typename Pass>
  int64_t num_covered() const {
    return num_bias_tiles<Pass>() * Pass::kQueries * Pass::kKeys;
  }
  template <typename Function>
  void with_dbias2_pass(Function function) {
    int64_t single = num_covered<SingleDbias2Pass>(), paired = num_covered<PairedDbias2Pass>();
    bool pairs = paired <= 1.1 * single && has_clusters<PairedDbias2Pass>();
    if (num_covered<SquareDbias2Pass>() * 1.1 < (pairs ? paired : single)) {
      function(SquareDbias2Pass{});
    } else if (pairs) {
      function(PairedDbias2Pass{});
    } else {
      function(SingleDbias2Pass{});
    }
  }
  template <typename Pass>
  static bool has_clusters() {
    int blocks = 0;
    if (Pass::Grid::resident_blocks(blocks) == cudaSuccess) return true;
    cudaGetLastError();  // not ours: single blocks do
    return false;
  }

  DqGlobalPlan plan_dq_global() {
    if constexpr (Choice::kHasDqGlobal) {
      if (!kBias2 || !p_.dbias2 || !p_.dk || !p_.dv || !p_.dq || p_.deterministic) return {};
      if (p_.N == 1 || fused_suits()) return {};
      using Grid = PersistentGrid<kernel_dq_dkdv<DqGlobalPass>, DqGlobalPass::kNumThreads, DqGlobalPass::kSharedBytes>;
      int blocks = 0;
      if (Grid::resident_blocks(blocks) == cudaSuccess) return DqGlobalPlan::of<DqGlobalPass>(p_, blocks);
      cudaGetLastError();  // not ours: two passes ask for less
    }
    return {};
  }
  // Zeros, of which the pass leaves as many in lent accumulators.
  void clear_dq_global() {
    zero(at<float>(counters_), dq_global_.num_counters);
    if (dq_global_.adds_dbias2)
      zero(at<float>(accumulators_), dq_global_.num_accumulators * dq_global_.accumulator_size);
    bool adds = dq_global_.adds_dbias2 || args_.adds_dbias2;
    zero(p_.dbias2, adds ? p_.B * p_.H * p_.Lq * p_.Lk : dq_global_.num_accumulators * dq_global_.accumulator_size);
  }
  void dq_global_pass() {
    if constexpr (Choice::kHasDqGlobal) {
      int64_t pairs = p_.B * p_.N * p_.H;
      args_.dq_accumulators = dq_global_.adds_dbias2 ? at<float>(accumulators_) : p_.dbias2;
      args_.num_dq_accumulators = int32_t(dq_global_.num_accumulators);
      args_.dq_progress = at<int32_t>(counters_), args_.dq_accumulators_back = args_.dq_progress + pairs;
      args_.dq_num_back = args_.dq_accumulators_back + pairs, args_.next_tile = args_.dq_num_back + 1;
      args_.dbias2_global = dq_global_.adds_dbias2 ? p_.dbias2 : nullptr;
      key_pass<DqGlobalPass>();
      args_.dbias2_is_lent = !dq_global_.adds_dbias2;
      int64_t blocks = ceil_div(p_.Lq / Dbias2Unit::kQueries, kOrderUnits) * (p_.Lk / Dbias2Unit::kKeys) * p_.B * p_.H;
      if (dq_global_.adds_dbias2 && blocks > 0) start_overlapping(order_dbias2, blocks, 128, 0, /*cluster=*/1, args_);
    }
  }

  void run_passes(cudaStream_t stream) {
    stream_ = stream;
    if (bytes_ > 0 && p_.workspace == nullptr) return check(cudaErrorInvalidValue);
    check(bias2_.prepare(at<void>(bias2_rows_), stream));
    clear();
    prepare();
    if (dq_global_) dq_global_pass();
    const bool of_keys = p_.dk || p_.dv || p_.dbias1, fuses = of_keys && p_.dq && fused_suits();
    if constexpr (kBias2) {
      args_.stores_dbias2 = p_.dbias2 && p_.N == 1 && p_.dq && !p_.row_mask && !fuses && !dq_global_;
      args_.dbias2 = p_.dbias2;
      if (p_.dbias2 && !args_.stores_dbias2 && !dq_global_.adds_dbias2) {
        with_dbias2_pass([this](auto pass) { launch_dbias2<decltype(pass)>(); });
      }
    }
    if (dq_global_) return;
    if (fuses) return fused_pass();
    if (of_keys) takes_fewer_turns<FewKeyPass, KeyPass>(p_.Lk) ? key_pass<FewKeyPass>() : key_pass<KeyPass>();
    // dbias2 of hidden keys is stored too.
    if (args_.stores_dbias2) args_.mask.visible = nullptr, args_.mask.range = nullptr;
    if (p_.dq)
      takes_fewer_turns<FewQueryPass, QueryPass>(p_.Lq) ? launch_dq_dkdv<FewQueryPass>() : launch_dq_dkdv<QueryPass>();
  }
  // Whether blocks come to fewer tiles each.
  template <typename Few, typename Pass>
  bool takes_fewer_turns(int64_t owned) {
    return turns<Few>(owned) < turns<Pass>(owned);
  }
  template <typename Config>
  int64_t turns(int64_t owned) {
    int blocks = 0;
    check(PersistentGrid<kernel_dq_dkdv<Config>, Config::kNumThreads, Config::kSharedBytes>::resident_blocks(blocks));
    int64_t tiles = ceil_div(owned, Config::kTiles * Config::kOwned) * ceil_div(p_.N, Config::kRows) * p_.H * p_.B;
    return blocks > 0 ? ceil_div(tiles, blocks) : tiles;
  }

  // dk, dv and dq in one pass, where that is less work than two.
  void fused_pass() {
    if constexpr (Choice::kHasDqShared) {
      if (suits<FusedPass>()) return key_pass<FusedPass>();
      if (suits<LongFusedPass>()) return key_pass<LongFusedPass>();
      key_pass<SplitFusedPass>();
    }
  }
  bool fused_suits() {
    if constexpr (Choice::kHasDqShared) {
      if (suits<FusedPass>() || suits<LongFusedPass>()) return true;
      // Both blocks of a cluster would store the same parts of dbias1.
      return !(p_.dbias1 && p_.deterministic) && suits<SplitFusedPass>();
    }
    return false;
  }
  // It takes about 0.7 of their time where all its warpgroups have keys and all blocks a row and head, and is still
  // faster where a third of those places is empty.
  template <typename Fused>
  bool suits() {
    using Grid = PersistentGrid<kernel_dq_dkdv<Fused>, Fused::kNumThreads, Fused::kSharedBytes, Fused::kClusterBlocks>;
    int64_t most = Fused::kClusterBlocks * Fused::kQueries, too_few = most - Fused::kQueries;
    if (p_.Lq <= too_few || p_.Lq > most) return false;  // each block of a cluster has queries
    int blocks = 0;
    if (Grid::resident_blocks(blocks) != cudaSuccess) {
      cudaGetLastError();  // not ours: two passes ask for less
      return false;
    }
    int64_t keys = ceil_div(p_.Lk, Fused::kOwned), walks = p_.B * p_.N * p_.H, teams = blocks / Fused::kClusterBlocks;
    int64_t places = ceil_div(keys, Fused::kTiles) * Fused::kTiles * ceil_div(walks, teams) * teams;
    return 5 * places <= 8 * keys * walks;
  }

  // What passes add to; first of all, so that nothing lies between them.
  void clear() {
    args_.adds_dbias2 = slices_ > 1 && dbias2_parts_ < 0;
    if (dq_global_) {
      clear_dq_global();
    } else if (args_.adds_dbias2) {
      zero(p_.dbias2, p_.B * p_.H * p_.Lq * p_.Lk);
    }
    if (p_.dbias1 && dbias1_parts_ < 0) zero(p_.dbias1, p_.B * p_.N * p_.Lk);
  }

  // What bias1 and row_mask leave visible, and delta of each query.
  void prepare() {
    check(key_mask_.template fill<Element>(at<void>(mask_), at<void>(bias1_), stream_));
    args_.mask = key_mask_.at(at<void>(mask_)), args_.next_bias_tile = key_mask_.counter(at<void>(mask_));
    if constexpr (kBias2) {
      if (p_.dbias2) with_dbias2_pass([this](auto pass) { list_rows<decltype(pass)>(); });
    }
    ds4s::BackwardArgs args{};
    args.p = p_, args.mask = args_.mask;
    int64_t blocks = ceil_div(p_.Lq * p_.H, PrepareRows<Prepare>::kRowsPerBlock) * p_.B * p_.N;
    start_overlapping(prepare_rows<Prepare>, blocks, kPrepareThreads, 0, /*cluster=*/1, args, at<float>(delta_));
    args_.waits = true;

    const bool copied = bias1_ >= 0;
    args_.bias1 = copied ? at<void>(bias1_) : p_.bias1;
    args_.bias1_stride[0] = copied ? p_.N * p_.Lk : p_.bias1_stride[0];
    args_.bias1_stride[1] = copied ? p_.Lk : p_.bias1_stride[1];
    args_.bias2 = bias2_.view.ptr;
    args_.bias2_stride[0] = bias2_.view.size[4] > 1 ? bias2_.view.stride[4] : 0;
    args_.bias2_stride[1] = bias2_.view.size[2] > 1 ? bias2_.view.stride[2] : 0;
    args_.bias2_stride[2] = bias2_.view.stride[1];
    args_.lse = p_.lse;
    args_.negative_delta = at<const float>(delta_);
    args_.B = int32_t(p_.B), args_.N = int32_t(p_.N), args_.H = int32_t(p_.H);
    args_.Lq = int32_t(p_.Lq), args_.Lk = int32_t(p_.Lk);
    args_.bias2_H = bias2_.view.size[2] > 1, args_.bias2_B = bias2_.view.size[4] > 1;
    args_.scale = p_.scale, args_.unit = 1.f / p_.scale, args_.c = p_.scale * kLog2e;
  }

  // dk, dv and dbias1; fused, dq.
  template <typename Pass>
  void key_pass() {
    args_.dbias1 = dbias1_parts_ < 0 ? p_.dbias1 : at<float>(dbias1_parts_);
    args_.stores_dbias1 = dbias1_parts_ >= 0;
    launch_dq_dkdv<Pass>();
    if (dbias1_parts_ >= 0) sum(p_.dbias1, dbias1_parts_, p_.B * p_.N, p_.H, p_.Lk);
  }

  template <typename Config>
  void launch_dq_dkdv() {
    constexpr bool kKeys = Config::kKeys;
    using Owned = typename Config::OwnedTile;
    using Walked = typename Config::WalkedTile;
    TensorView<5> q = tensor_view(p_, p_.q, p_.q_stride, p_.Lq, p_.D),
                  k = tensor_view(p_, p_.k, p_.k_stride, p_.Lk, p_.D);
    TensorView<5> do_ = tensor_view(p_, p_.do_, p_.do_stride, p_.Lq, p_.Dv);
    TensorView<5> v = tensor_view(p_, p_.v, p_.v_stride, p_.Lk, p_.Dv);
    DqDkdvMaps maps{};
    make_map<Owned>(maps.owned_first, kKeys ? k : q), make_map<Owned>(maps.owned_second, kKeys ? v : do_);
    make_map<Walked>(maps.walked_first, kKeys ? q : k), make_map<Walked>(maps.walked_second, kKeys ? do_ : v);
    if (kBias2) make_map<typename Config::BiasTile>(maps.bias2, bias2_.view);
    maps.first_rows =
        kKeys ? tensor_view(p_, p_.dk, p_.dk_stride, p_.Lk, p_.D) : tensor_view(p_, p_.dq, p_.dq_stride, p_.Lq, p_.D);
    maps.second_rows = tensor_view(p_, p_.dv, p_.dv_stride, p_.Lk, p_.Dv);
    args_.stores_first = kKeys ? p_.dk != nullptr : true, args_.stores_second = p_.dv != nullptr;
    if (!kKeys) make_map<Owned>(maps.result_first, tensor_view(p_, p_.dq, p_.dq_stride, p_.Lq, p_.D));
    if (Config::kDqInShared) make_map<Owned>(maps.dq, tensor_view(p_, p_.dq, p_.dq_stride, p_.Lq, p_.D));
    if (kKeys && p_.dk) make_map<Owned>(maps.result_first, tensor_view(p_, p_.dk, p_.dk_stride, p_.Lk, p_.D));
    if (kKeys && p_.dv) make_map<Owned>(maps.result_second, tensor_view(p_, p_.dv, p_.dv_stride, p_.Lk, p_.Dv));

    args_.num_blocks = int32_t(ceil_div(kKeys ? p_.Lk : p_.Lq, Config::kTiles * Config::kOwned));
    args_.num_row_groups = int32_t(ceil_div(p_.N, Config::kRows));
    args_.num_tiles = int32_t(args_.num_blocks * p_.H * args_.num_row_groups * p_.B);
    if constexpr (Config::kDqInGlobal) maps.dq_rows = tensor_view(p_, p_.dq, p_.dq_stride, p_.Lq, p_.D);
    start_persistent<kernel_dq_dkdv<Config>, Config, Config::kClusterBlocks>(
        maps, Config::kDqInShared ? args_.num_tiles / args_.num_blocks * Config::kClusterBlocks : args_.num_tiles);
  }

  template <typename Pass>
  void launch_dbias2() {
    using Config = typename Pass::Config;
    using QueryTile = typename Config::QueryTile;
    using KeyTile = typename Config::KeyTile;
    Dbias2Maps maps{};
    make_map<QueryTile>(maps.q, tensor_view(p_, p_.q, p_.q_stride, p_.Lq, p_.D));
    make_map<KeyTile>(maps.k, tensor_view(p_, p_.k, p_.k_stride, p_.Lk, p_.D));
    make_map<KeyTile>(maps.v, tensor_view(p_, p_.v, p_.v_stride, p_.Lk, p_.Dv));
    make_map<QueryTile>(maps.do_, tensor_view(p_, p_.do_, p_.do_stride, p_.Lq, p_.Dv));
    args_.dbias2 = dbias2_parts_ < 0 ? p_.dbias2 : at<float>(dbias2_parts_);
    args_.by_key_blocks = cutlass::FastDivmod(int(ceil_div(p_.Lk, Config::kBlockKeys)));
    args_.by_query_blocks = cutlass::FastDivmod(int(ceil_div(p_.Lq, Config::kBlockQueries * Pass::kCluster)));
    args_.by_heads = cutlass::FastDivmod(int(p_.H)), args_.by_batches = cutlass::FastDivmod(int(p_.B));
    args_.by_slices = cutlass::FastDivmod(int(slices_)), args_.num_tiles = int32_t(num_bias_tiles<Pass>() * slices_);
    start_persistent<kernel_dbias2<Config>, Config, Pass::kCluster>(maps, args_.num_tiles * Pass::kCluster);
    if (dbias2_parts_ >= 0) sum(p_.dbias2, dbias2_parts_, 1, slices_, p_.B * p_.H * p_.Lq * p_.Lk);
  }

  template <typename Tile>
  void make_map(CUtensorMap& map, const TensorView<5>& tensor) {
    check(has_tensor_map(tensor) ? make_tile_map<Element, Tile>(map, tensor) : cudaErrorMisalignedAddress);
  }
  template <typename Kernel, typename... Args>
  void start_overlapping(Kernel* kernel, int64_t blocks, int threads, int shared, int cluster, const Args&... args) {
    if (status_ != cudaSuccess) return;
    Launch launch(blocks, threads, shared, cluster, stream_);
    launch.overlap();
    check(cudaLaunchKernelEx(launch.config(), kernel, args...));
  }
  // `most`: blocks that find something to do.
  template <auto kKernel, typename Config, int kCluster = 1, typename Maps>
  void start_persistent(const Maps& maps, int32_t most) {
    int blocks = 0;
    check(PersistentGrid<kKernel, Config::kNumThreads, Config::kSharedBytes, kCluster>::resident_blocks(blocks));
    if (status_ != cudaSuccess) return;
    if (most < blocks) blocks = most;
    start_overlapping(kKernel, blocks, Config::kNumThreads, Config::kSharedBytes, kCluster, args_, maps);
    args_.waits = false;  // what this one waited for is there for the next ones too
  }

  Bias2Rows<Element> bias2_;
  KeyMaskBuffers<BwdParams> key_mask_;
  BackwardArgs args_{};
  DqGlobalPlan dq_global_;
  int64_t slices_ = 1;
  int64_t delta_ = -1, mask_ = -1, row_lists_ = -1, bias1_ = -1, bias2_rows_ = -1, dbias1_parts_ = -1,
          dbias2_parts_ = -1, counters_ = -1, accumulators_ = -1;
};

}  // namespace ds4s::sm90
