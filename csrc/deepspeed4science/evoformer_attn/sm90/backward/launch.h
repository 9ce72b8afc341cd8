// Host side of the Hopper backward: BwdParams -> plan -> launches. A generated unit instantiates one Sm90Backward<...>
// and exports its functions.
#pragma once

#include "sm90/backward/fill_args.h"
#include "sm90/backward/later_delta.h"
#include "sm90/balanced_blocks.h"
#include "sm90/bias2_rows.h"
#include "sm90/launch_sequence.h"

namespace ds4s::sm90 {

template <typename scalar_t, int kHeadDim, bool kHasBias2>
class Sm90Backward {
 public:
  static int64_t workspace_bytes(const BwdParams& p) {
    BackwardFacts device;
    const bool known = fits(p) && Kernels::query(device) == cudaSuccess;
    if (!known) return 0;
    const Sm90BackwardPlan plan = plan_of(p, device);
    return plan.takes_dbias2_rows(p) ? plan.workspace_bytes : -1;
  }
  // Whether rounded_dbias2 needs no float32 sums besides what the plan reserves.
  static bool rounds_dbias2(const BwdParams& p) {
    BackwardFacts device;
    return fits(p) && Kernels::query(device) == cudaSuccess && plan_of(p, device).has_own_dbias2();
  }
  static int run(const BwdParams& p, cudaStream_t stream) {
    if (p.B * p.N * p.H == 0) return cudaSuccess;
    if (!fits(p)) return cudaErrorInvalidValue;
    BackwardFacts device;
    if (cudaError_t error = Kernels::query(device); error != cudaSuccess) return error;
    const Sm90BackwardPlan plan = plan_of(p, device);
    if (!plan.takes_dbias2_rows(p)) return cudaErrorInvalidValue;
    if (plan.workspace_bytes > 0 && p.workspace == nullptr) return cudaErrorInvalidValue;
    return Sm90Backward(p, plan, device, stream).launch_all();
  }
  static void print_plan(const BwdParams& p, PlanText& text) {
    BackwardFacts device;
    if (fits(p) && Kernels::query(device) == cudaSuccess) plan_of(p, device).print(text);
  }

 private:
  using Kernels = BackwardKernels<scalar_t, kHeadDim, kHasBias2>;
  using Tiles = BackwardTiles<kHeadDim>;
  static constexpr bool kHalfDqSums = Kernels::template OfKeys<typename Tiles::Keys>::kHalfDqSums;
  static constexpr bool kMayRepairDq = Tiles::kHasDqGlobal && kHasBias2 && kHalfDqSums;  // dq_range.h

  Sm90Backward(const BwdParams& p, const Sm90BackwardPlan& plan, const BackwardFacts& device, cudaStream_t stream)
      : p_(p), plan_(plan), device_(device), fill_(p, plan), launches_(stream) {}

  static Sm90BackwardPlan plan_of(const BwdParams& p, const BackwardFacts& device) {
    return make_plan<kHeadDim, kHasBias2>(p, device, kHalfDqSums);
  }
  static bool fits(const BwdParams& p) {
    constexpr int64_t kLimit = int64_t(1) << 31;
    const int64_t longest = p.Lq > p.Lk ? p.Lq : p.Lk;
    return p.D <= kHeadDim && p.Dv <= kHeadDim && p.N < kLimit - 256 && longest < kLimit - 256 &&
           p.B * p.N * p.H * ceil_div(longest, 4) < kLimit && p.B * p.N * p.H * p.Lq < 2 * kLimit &&
           (p.bias2 != nullptr) == kHasBias2 && (kHasBias2 || p.dbias2 == nullptr);
  }

  // The first of kernel_dbias2, the kernel for keys and the kernel for queries waits for preprocess at its beginning.
  // The other two need not: they start after every block of that first kernel has passed its wait. Where that one
  // computes delta, kernel_dbias2 waits for delta_progress.
  int launch_all() {
    launches_.check(copy_bias2_rows<scalar_t>(fill_.bias2(), fill_.template at<void>(plan_.bias2), launches_.stream()));
    preprocess();
    const bool dbias2_is_first = plan_.dbias2 != Kernel::kNone && !plan_.dbias2_is_last;
    if (dbias2_is_first) launch_dbias2(/*waits=*/true);
    // later_delta.h waits for preprocess, and kernel_dq_dkdv does not wait for the end of later_delta.h.
    if (plan_.keys != Kernel::kNone) launch_keys(/*waits=*/!dbias2_is_first && plan_.later_pairs == 0);
    if (plan_.dbias2 != Kernel::kNone && !dbias2_is_first) launch_dbias2(/*waits=*/false);
    if (plan_.queries != Kernel::kNone) {
      launch_queries(/*waits=*/!dbias2_is_first && plan_.keys == Kernel::kNone);
    }
    if (plan_.dq_global) repair_dq();
    if (needs_postprocess(p_)) {  // repairs gradients, makes rows of dbias2 add up to 0 unless they do, and rounds
      const int64_t blocks = num_postprocess_blocks(device_);
      launches_.start_overlapping(postprocess<scalar_t, kHeadDim>, blocks, kPostprocessThreads, 0, /*cluster=*/1,
                                  fill_.postprocess());
    }
    return launches_.status();
  }

  // Finds the keys that bias1 and row_mask leave visible, computes delta of each query (unless delta_with_dq), and sets
  // sums to zero.
  void preprocess() {
    if (plan_.preprocess_finds_keys) return launch_preprocess</*kFindsVisibleKeys=*/true>();
    if (plan_.key_mask >= 0) {
      launches_.start_overlapping(find_visible_keys<scalar_t>, fill_.key_mask().num_blocks(), kKeyMaskThreads, 0,
                                  /*cluster=*/1, fill_.find_visible_keys());
    }
    launch_preprocess</*kFindsVisibleKeys=*/false>();
  }
  template <bool kFindsVisibleKeys>
  void launch_preprocess() {
    using Prepare = PrepareConfig<scalar_t, kHeadDim, kMayRepairDq>;
    PreprocessArgs args = fill_.preprocess();
    const bool in_pieces = Prepare::kFindsDqMaxima && plan_.dq_global;
    const int64_t rows = p_.B * p_.N, of_queries = ceil_div(p_.Lq * p_.H, PrepareRows<Prepare>::kRowsPerBlock) * rows;
    const int64_t resident = int64_t(kPreprocessBlocks) * device_.num_multiprocessors;
    int64_t of_others = plan_.delta_with_dq ? std::min(of_queries, resident) : of_queries;  // zeros alone
    int shared_bytes = 0;
    if constexpr (Prepare::kFindsDqMaxima) {
      if (in_pieces) {
        args.dq_range = fill_.dq_range(kHeadDim);
        args.delta.negative_delta = args.negative_delta, args.delta.flag = args.flag;
        using Tile = typename DeltaPiece<Prepare>::Tile;
        make_map<Tile>(args.delta.o, o()), make_map<Tile>(args.delta.do_, do_());
        args.num_later_pairs = int32_t(plan_.later_pairs);
        of_others = num_piece_blocks(args, plan_.first_pairs);
        shared_bytes = PieceStages<Prepare, kPieceWarps>::kBytes;
      }
    }
    launches_.start_overlapping(sm90::preprocess<Prepare, kFindsVisibleKeys>,
                                args.num_lists + args.num_masked + of_others, kPrepareThreads, shared_bytes,
                                /*cluster=*/1, args);
    const int64_t pairs = in_pieces ? plan_.first_pairs : 0;
    const FindSeenTilesArgs tiles = fill_.find_seen_tiles(Tiles::DqGlobal::kTiles * kOwned);
    const int64_t blocks = ceil_div(pairs, kPrepareThreads / 32) + (tiles.tiles != nullptr);
    if (blocks > 0) {
      launches_.start_overlapping(find_exponents_and_tiles, blocks, kPrepareThreads, 0, /*cluster=*/1, args.dq_range,
                                  int(p_.N), int(pairs), tiles);
    }
    if (plan_.later_pairs > 0) launch_later_delta(args);
  }

  void launch_later_delta(const PreprocessArgs& of_first) {
    if constexpr (kMayRepairDq && !Tiles::kHasDqGlobalPaired) {
      using Prepare = PrepareConfig<scalar_t, kHeadDim, kMayRepairDq>;
      constexpr int kThreads = 32 * kLaterDeltaWarps, kSharedBytes = PieceStages<Prepare, kLaterDeltaWarps>::kBytes;
      const LaterDeltaArgs args{
          of_first.rows,      of_first.delta, of_first.dq_range, int32_t(plan_.first_pairs), int32_t(plan_.later_pairs),
          fill_.later_delta()};
      int blocks = 0;
      launches_.check(PersistentGrid<later_delta<Prepare>, kThreads, kSharedBytes>::resident_blocks(blocks));
      launches_.start_overlapping(later_delta<Prepare>, blocks, kThreads, kSharedBytes, /*cluster=*/1, args);
    }
  }

  // dk and dv, together with dq (and dbias2) where the plan's kernel computes these too.
  void launch_keys(bool waits) {
    Kernels::for_each_of_keys([&](Kernel kernel, auto grid) {
      if (kernel == plan_.keys) launch_dq_dkdv<typename decltype(grid)::Config>(waits);
    });
    if (plan_.dbias1_parts >= 0) {
      launches_.sum(p_.dbias1, fill_.template at<const float>(plan_.dbias1_parts), p_.B * p_.N, p_.H, p_.Lk);
    }
    if (plan_.orders_dbias2()) launch_order_dbias2();
  }
  void launch_queries(bool waits) {
    Kernels::for_each_of_queries([&](Kernel kernel, auto grid) {
      if (kernel == plan_.queries) launch_dq_dkdv<typename decltype(grid)::Config>(waits);
    });
  }
  void launch_dbias2(bool waits) {
    Kernels::for_each_of_dbias2([&](Kernel kernel, auto grid) {
      using Grid = decltype(grid);
      if (kernel == plan_.dbias2) launch_dbias2<typename Grid::Config, Grid::kCluster>(waits);
    });
    if (plan_.dbias2_parts >= 0) {
      launches_.sum(p_.dbias2, fill_.template at<const float>(plan_.dbias2_parts), 1, plan_.num_slices,
                    p_.B * p_.H * p_.Lq * p_.Lk);
    }
  }

  template <typename Config>
  void launch_dq_dkdv(bool waits) {
    const BackwardArgs args = fill_.template dq_dkdv<Config>(waits);
    const DqDkdvMaps maps = dq_dkdv_maps<Config>();
    const Kernel kernel = Config::kKeys ? plan_.keys : plan_.queries;
    // More blocks than this would have no tile.
    int64_t most =
        Config::kDqInShared ? args.num_tiles / args.by_blocks.divisor * plan_.cluster_blocks : args.num_tiles;
    if constexpr (!Config::kDqInShared && !Config::kDqInGlobal) {
      const int64_t owned_tiles = ceil_div(Config::kKeys ? p_.Lk : p_.Lq, Config::kOwned);
      most = balanced_blocks(std::min(device_.blocks_of(kernel), most), args.num_tiles, owned_tiles, Config::kTiles);
    }
    start<kernel_dq_dkdv<Config>, Config>(kernel, Config::kPairsRows ? 2 : plan_.cluster_blocks, most, args, maps);
  }
  template <typename Config, int kCluster>
  void launch_dbias2(bool waits) {
    const BackwardArgs args = fill_.dbias2(dbias2_cluster_tile<kHeadDim>(plan_.dbias2), waits);
    const Dbias2Maps maps = dbias2_maps<Config>();
    start<kernel_dbias2<Config>, Config>(plan_.dbias2, kCluster, args.num_tiles * plan_.num_slices * kCluster, args,
                                         maps);
  }
  void launch_order_dbias2() {
    if constexpr (Tiles::kHasDqGlobal && kHasBias2) {
      const int64_t blocks = ceil_div(p_.Lq, Dbias2Unit::kQueries) * p_.B * p_.H;
      using Config = typename Kernels::template OfKeys<typename Tiles::DqGlobal>;
      const BackwardArgs args = fill_.template dq_dkdv<Config>(/*waits=*/false);
      launches_.start_overlapping(order_dbias2, blocks, kOrderThreads, 0, /*cluster=*/1, args, p_.partial_keys == 0);
    }
  }

  // Computes dq again where its sums did not fit into float16.
  void repair_dq() {
    if constexpr (kMayRepairDq) {
      const DqRangeArgs range = fill_.dq_range(kHeadDim);
      launches_.start_overlapping(find_wrong_dq, ceil_div(range.num_heads(), kPrepareThreads), kPrepareThreads, 0,
                                  /*cluster=*/1, range);
      launches_.start_overlapping(recompute_dq<scalar_t, kHeadDim>, num_postprocess_blocks(device_),
                                  kPostprocessThreads, 0, /*cluster=*/1, fill_.postprocess(), range);
    }
  }

  // Starts a persistent kernel with one wave of blocks, at most `most`.
  template <auto kKernel, typename Config, typename Maps>
  void start(Kernel kernel, int cluster, int64_t most, const BackwardArgs& args, const Maps& maps) {
    const int64_t blocks = device_.blocks_of(kernel);
    if (blocks == 0) return launches_.check(cudaErrorInvalidConfiguration);
    // docs/kernels/dq-accumulators.md, H4 and H6
    const bool has_long_pairs = kernel == Kernel::kDqGlobal && args.by_blocks.divisor > kTileQueueSize;
    if (kernel == Kernel::kDqGlobalPaired || has_long_pairs) {
      return launches_.start_cooperative(kKernel, std::min(blocks, most), Config::kNumThreads, Config::kSharedBytes,
                                         cluster, args, maps);
    }
    // kClusterFused is not persistent: each of its blocks has one tile.
    launches_.start_overlapping(kKernel, kernel == Kernel::kClusterFused ? most : std::min(blocks, most),
                                Config::kNumThreads, Config::kSharedBytes, cluster, args, maps);
  }

  template <typename Config>
  DqDkdvMaps dq_dkdv_maps() {
    using Owned = typename Config::OwnedTile;
    using Streamed = typename Config::StreamedTile;
    DqDkdvMaps maps{};
    if constexpr (Config::kKeys) {
      make_map<Owned>(maps.owned_first, k()), make_map<Owned>(maps.owned_second, v());
      make_map<Streamed>(maps.streamed_first, q()), make_map<Streamed>(maps.streamed_second, do_());
      maps.first_rows = dk(), maps.second_rows = dv(), maps.dq_rows = dq();
      if (p_.dk) make_map<Owned>(maps.result_first, dk());
      if (p_.dv) make_map<Owned>(maps.result_second, dv());
      if (Config::kDqInShared) make_map<Owned>(maps.dq, dq());
      if constexpr (Config::kComputesDelta) {
        using Tile = typename Config::DeltaTiles::Tile;
        make_map<Tile>(maps.delta_o, o()), make_map<Tile>(maps.delta_do, do_());
      }
      if (plan_.rounds_dbias2)
        make_map<typename Config::BiasTile>(maps.dbias2, dbias2_view(p_, p_.rounded_dbias2, p_.Lk));
    } else {
      make_map<Owned>(maps.owned_first, q()), make_map<Owned>(maps.owned_second, do_());
      make_map<Streamed>(maps.streamed_first, k()), make_map<Streamed>(maps.streamed_second, v());
      maps.first_rows = dq(), maps.second_rows = dv();
      make_map<Owned>(maps.result_first, dq());
    }
    if (kHasBias2)
      make_map<typename Config::BiasTile>(maps.bias2, fill_.bias2().read(fill_.template at<void>(plan_.bias2)));
    return maps;
  }
  template <typename Config>
  Dbias2Maps dbias2_maps() {
    Dbias2Maps maps{};
    make_map<typename Config::QueryTile>(maps.q, q()), make_map<typename Config::QueryTile>(maps.do_, do_());
    make_map<typename Config::KeyTile>(maps.k, k()), make_map<typename Config::KeyTile>(maps.v, v());
    return maps;
  }
  template <typename Tile>
  void make_map(CUtensorMap& map, const TensorView<5>& tensor) {
    launches_.check(has_tensor_map(tensor) ? make_tile_map<scalar_t, Tile>(map, tensor) : cudaErrorMisalignedAddress);
  }
  TensorView<5> q() const { return tensor_view(p_, p_.q, p_.q_stride, p_.Lq, p_.D); }
  TensorView<5> k() const { return tensor_view(p_, p_.k, p_.k_stride, p_.Lk, p_.D); }
  TensorView<5> v() const { return tensor_view(p_, p_.v, p_.v_stride, p_.Lk, p_.Dv); }
  TensorView<5> do_() const { return tensor_view(p_, p_.do_, p_.do_stride, p_.Lq, p_.Dv); }
  TensorView<5> o() const { return tensor_view(p_, p_.o, p_.o_stride, p_.Lq, p_.Dv); }
  TensorView<5> dq() const { return tensor_view(p_, p_.dq, p_.dq_stride, p_.Lq, p_.D); }
  TensorView<5> dk() const { return tensor_view(p_, p_.dk, p_.dk_stride, p_.Lk, p_.D); }
  TensorView<5> dv() const { return tensor_view(p_, p_.dv, p_.dv_stride, p_.Lk, p_.Dv); }

  const BwdParams& p_;
  const Sm90BackwardPlan& plan_;
  const BackwardFacts& device_;
  const BackwardFill fill_;
  LaunchSequence launches_;
};

}  // namespace ds4s::sm90
