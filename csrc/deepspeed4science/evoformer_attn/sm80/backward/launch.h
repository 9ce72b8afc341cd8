// Host side of the backward: makes the plan (plan.h) and starts its kernels.
#pragma once

#include "common/backward_host.h"
#include "common/device_query.h"
#include "kernel_backward.h"
#include "sm80/backward/plan.h"

namespace ds4s {

template <typename scalar_t>
inline bool backward_is_aligned(const BwdParams& p) {
  constexpr int64_t kVec = 16 / int64_t(sizeof(scalar_t));
  bool aligned = p.D % kVec == 0 && p.Dv % kVec == 0;
  auto check = [&](const void* ptr, const int64_t (&stride)[4]) {
    if (!ptr) return;
    aligned &= reinterpret_cast<uintptr_t>(ptr) % 16 == 0;
    for (int64_t s : stride) aligned &= s % kVec == 0;
  };
  check(p.q, p.q_stride), check(p.k, p.k_stride), check(p.v, p.v_stride);
  check(p.o, p.o_stride), check(p.do_, p.do_stride);
  check(p.dq, p.dq_stride), check(p.dk, p.dk_stride), check(p.dv, p.dv_stride);
  return aligned;
}

// Template arguments: AttentionBackwardKernel's.
template <typename scalar_t, typename ArchTag, bool kAligned, int kHeadDim, bool kHasBias2, bool kTf32>
class Sm80Backward : BackwardHost {
  using Kernel = AttentionBackwardKernel<scalar_t, ArchTag, kAligned, kHeadDim, kHasBias2, kTf32>;
  using Config = typename Kernel::Config;
  using Dbias2 = typename Kernel::Dbias2;
  template <bool kWantsDbias1>
  using Fused = typename Kernel::template Fused<kWantsDbias1>;

 public:
  static int64_t workspace_bytes(const BwdParams& p) {
    DeviceFacts device;
    query_device(device);
    return make_plan(p, device, kUnit).workspace_bytes;
  }
  static bool rounds_dbias2(const BwdParams&) { return false; }  // dbias2 is always summed in float32 first
  static void print_plan(const BwdParams& p, PlanText& text) {
    DeviceFacts device;
    query_device(device);
    make_plan(p, device, kUnit).print(text);
  }
  static int run(const BwdParams& p, cudaStream_t stream) {
    if (p.B * p.N * p.H == 0) return cudaSuccess;
    if ((p.bias2 != nullptr) != kHasBias2 || (p.dbias2 && !kHasBias2)) return cudaErrorInvalidValue;
    if (p.D > kHeadDim || p.Dv > kHeadDim) return cudaErrorInvalidValue;
    if (kAligned && !backward_is_aligned<scalar_t>(p)) return cudaErrorMisalignedAddress;
    DeviceFacts device;
    if (cudaError_t status = query_device(device)) return status;
    const Sm80BackwardPlan plan = make_plan(p, device, kUnit);
    if (!fits_in_grid(p, plan) || (plan.workspace_bytes > 0 && !p.workspace)) return cudaErrorInvalidValue;
    return Sm80Backward(p, plan, device, stream).run_kernels();
  }

 private:
  Sm80Backward(const BwdParams& p, const Sm80BackwardPlan& plan, const DeviceFacts& device, cudaStream_t stream)
      : BackwardHost(p),
        plan_(plan),
        device_(device),
        flag_(new_postprocess_flag(at<uint32_t>(plan.postprocess_flag))),
        args_(arguments()) {
    stream_ = stream;
  }

  static constexpr BackwardUnit unit() {
    BackwardUnit unit{};
    unit.element_bytes = int(sizeof(scalar_t)), unit.head_dim = kHeadDim;
    unit.has_bias2 = kHasBias2, unit.tiles_bias2 = Config::kTilesBias2, unit.is_exact = Config::kExact,
    unit.splits_dkdv = Config::kSplitsKeys;
    unit.max_stages = Config::kMaxStages, unit.tiles = Config::kTiles;
    unit.dq_shared_bytes = Kernel::template shared_bytes<Gradients::kDq>(2);
    unit.dk_shared_bytes = Kernel::template shared_bytes<Config::kSplitsKeys ? Gradients::kDk : Gradients::kDkDv>(2);
    unit.dv_shared_bytes = Kernel::template shared_bytes<Gradients::kDv>(2);
    unit.dbias2_shared_bytes = Kernel::dbias2_shared_bytes(2), unit.dbias2_blocks = Dbias2::kMinBlocks;
    unit.has_fused = Config::kCanFuse;
    if constexpr (Config::kCanFuse) {
      unit.fused_reads_bias2 = Fused<false>::kTransposesBias2;
      unit.fused_shared_bytes = Kernel::fused_shared_bytes();
      unit.fused_blocks = Fused<false>::kMinBlocks;
    }
    return unit;
  }
  static constexpr BackwardUnit kUnit = unit();

  static bool fits_in_grid(const BwdParams& p, const Sm80BackwardPlan& plan) {
    int64_t most = ceil_div(p.Lq > p.Lk ? p.Lq : p.Lk, 4) * p.H * p.B * p.N;
    int64_t tiles = ceil_div(p.Lq, 32) * ceil_div(p.Lk, 32) * p.B * p.H * plan.num_slices;
    return most < (int64_t(1) << 31) && tiles < (int64_t(1) << 31);
  }

  cudaError_t run_kernels() {
    prepare();
    if (plan_.runs_fused) fused();
    if constexpr (Config::kSplitsKeys) {
      if (plan_.runs_dk) of_keys<Gradients::kDk>(plan_.dk_stages);
      if (plan_.runs_dv) start_kernel<Gradients::kDv>(plan_.dv_stages);
    } else {
      if (plan_.runs_dkdv) of_keys<Gradients::kDkDv>(plan_.dk_stages);
    }
    if constexpr (kHasBias2) {
      if (plan_.runs_dbias2) dbias2();
    }
    if (plan_.runs_dq) start_kernel<Gradients::kDq>(plan_.dq_stages);
    if (needs_postprocess(p_)) finish();
    return status_;
  }

  // The arguments that all kernels have in common.
  BackwardInputs arguments() const {
    BackwardInputs args = BackwardHost::arguments(plan_.bias1, plan_.key_mask);
    args.softmax = at<float2>(plan_.softmax);
    args.negative_delta = at<const void>(plan_.delta);
    args.dbias1_parts = at<float>(plan_.dbias1_parts);
    args.dbias2_parts = at<float>(plan_.dbias2_parts);
    args.dbias2_slices = int32_t(plan_.num_slices);
    args.bias2 = {p_.bias2, p_.bias2_stride[0], p_.bias2_stride[1], p_.bias2_stride[2]};
    if (plan_.copies_bias2) args.bias2 = copy(at<void>(plan_.bias2), p_.Lq, plan_.bias2_pitch);
    args.bias2_t = copy(transpose(), plan_.bias2_t_rows, plan_.bias2_t_pitch);
    return args;
  }
  scalar_t* transpose() const {
    return plan_.transpose_is_in_dbias2 ? reinterpret_cast<scalar_t*>(p_.dbias2) : at<scalar_t>(plan_.bias2_t);
  }
  BiasMatrix copy(const void* ptr, int64_t rows, int64_t pitch) const {
    const int64_t step_h = plan_.bias2_copies_h == 1 ? 0 : rows * pitch;
    return {ptr, plan_.bias2_copies_b == 1 ? 0 : plan_.bias2_copies_h * rows * pitch, step_h, pitch};
  }

  // Starts the kernels before the gradients': copies of the biases, visible keys, delta or row_statistics.
  void prepare() {
    if (plan_.runs_fused && p_.dbias1) zero(p_.dbias1, p_.B * p_.N * p_.Lk);
    if constexpr (kHasBias2) {
      const int64_t queries = Config::kTilesBias2 ? plan_.bias2_t_pitch : p_.Lq;
      int64_t tiles = ceil_div(queries, 32) * ceil_div(p_.Lk, 32) * plan_.bias2_copies_b * plan_.bias2_copies_h;
      if (plan_.copies_bias2 || plan_.transposes_bias2) {
        start(copy_bias2<scalar_t, Config::kTilesBias2>, tiles, kPrepareThreads, 0, args_, plan_.bias2_copies_h,
              at<scalar_t>(plan_.bias2), plan_.bias2_pitch, transpose(), plan_.bias2_t_pitch);
      }
    }
    check(KeyMaskBuffers<BwdParams>(p_).template fill<scalar_t>(at<void>(plan_.key_mask), at<void>(plan_.bias1),
                                                                stream_, flag_));
    if constexpr (Config::kExact) {
      int64_t blocks = ceil_div(p_.Lq, Config::kOwned) * p_.H * p_.B * p_.N;
      start(row_statistics<Config>, blocks, Config::kThreads, RowStatistics<Config>::kSharedBytes, args_,
            at<float2>(plan_.softmax), at<float2>(plan_.delta), flag_);
    } else if (!plan_.runs_fused) {
      start(prepare_rows<Config>, num_delta_blocks(), kPrepareThreads, 0, args_, at<float>(plan_.delta), flag_);
    }
  }
  int64_t num_delta_blocks() const { return ceil_div(p_.Lq * p_.H, PrepareRows<Config>::kRowsPerBlock) * p_.B * p_.N; }

  // Repairs gradients, makes rows of dbias2 add up to 0, math.md (16a), and rounds bias gradients.
  void finish() {
    PostprocessArgs args = postprocess_args(p_, at<void>(plan_.key_mask), flag_);
    if (Config::kExact)
      args.softmax = at<const float2>(plan_.softmax), args.negative_delta = at<const float2>(plan_.delta);
    start(postprocess<scalar_t, kHeadDim>, num_postprocess_blocks(device_), kPostprocessThreads, 0, args);
  }

  // dk, dv or both, and dbias1 if it is wanted.
  template <Gradients kWhat>
  void of_keys(int num_stages) {
    if (!p_.dbias1) return start_kernel<kWhat>(num_stages);
    if (plan_.dbias1_parts < 0) zero(p_.dbias1, p_.B * p_.N * p_.Lk);
    start_kernel<kWhat, /*kWantsDbias1=*/true>(num_stages);
    if (plan_.dbias1_parts >= 0) sum(p_.dbias1, plan_.dbias1_parts, p_.B * p_.N, p_.H, p_.Lk);
  }
  template <Gradients kWhat, bool kWantsDbias1 = false>
  void start_kernel(int num_stages) {
    using Owned = typename Kernel::template Owned<kWhat, kWantsDbias1>;
    const int64_t blocks = num_tiles<Owned>() * p_.H * p_.B * p_.N * Config::kParts;
    start(backward_dq_dkdv<Owned>, blocks, Config::kThreads, Kernel::template shared_bytes<kWhat>(num_stages), args_,
          tile_order<Owned>(), num_stages);
  }
  // Tiles of the queries or keys that a block owns, of one (b, n, h).
  template <typename Tile>
  int64_t num_tiles() const {
    return ceil_div(Tile::kOwnsKeys ? p_.Lk : p_.Lq, Tile::kOwned);
  }
  template <typename Tile>
  TileOrder tile_order() const {
    constexpr int64_t kRows = TilePosition<Tile>::kRows;
    const int64_t rows = p_.B * p_.N, tiles = num_tiles<Tile>();
    TileOrder order{};
    order.by_group = cutlass::FastDivmod(int(std::min(rows, kRows) * tiles * p_.H));
    if (rows % kRows > 0) order.by_last_rows = cutlass::FastDivmod(int(rows % kRows));
    order.num_blocks = uint32_t(rows * tiles * p_.H);
    order.by_tiles = cutlass::FastDivmod(int(tiles)), order.by_N = cutlass::FastDivmod(int(p_.N));
    return order;
  }

  void dbias2() {
    const int64_t size = p_.B * p_.H * p_.Lq * p_.Lk;
    if (KernelDbias2<Dbias2>::adds(args_)) {
      args_.dbias2_parts ? zero(args_.dbias2_parts, plan_.num_slices * size) : zero(p_.dbias2, size);
    }
    int64_t tiles = ceil_div(p_.Lq, Dbias2::kQueries) * ceil_div(p_.Lk, Dbias2::kKeys) * p_.B * p_.H;
    start(backward_dbias2<Dbias2>, tiles * plan_.num_slices, Dbias2::kThreads,
          Kernel::dbias2_shared_bytes(plan_.dbias2_stages), args_, plan_.dbias2_stages);
    if (plan_.dbias2_parts >= 0) sum(p_.dbias2, plan_.dbias2_parts, 1, plan_.num_slices, size);
  }

  // dq, dk, dv, dbias1 and dbias2.
  void fused() {
    if constexpr (Config::kCanFuse) {
      const DqAccumulatorPool pool = accumulator_pool();
      prepare_fused_rows(pool);
      p_.dbias1 ? start_fused<Fused</*kWantsDbias1=*/true>>(pool) : start_fused<Fused<false>>(pool);
      if (plan_.padded_dbias2 < 0) return;
      int64_t queries = p_.B * p_.H * p_.Lq;
      start(crop_rows, queries < 4096 ? queries : 4096, kPrepareThreads, 0, p_.dbias2, pool.dbias2, p_.B * p_.H, p_.Lq,
            p_.Lk, plan_.padded_queries, plan_.padded_keys);
    }
  }
  // Stores delta in dq and clears the memory to which blocks add. It may overlap with find_visible_keys, which touches
  // neither. Without that kernel it does not overlap: the kernel before it is not ours.
  void prepare_fused_rows(const DqAccumulatorPool& pool) {
    const DqAccumulatorPlan& plan = plan_.accumulators;
    const int64_t first = plan.first_host_row(p_.B * p_.N), rows = p_.B * p_.N - first;
    const int64_t dbias2 = pool.dbias2 ? p_.B * p_.H * plan_.padded_queries * plan_.padded_keys : 0;
    auto pieces = [](float* ptr, int64_t count) { return ZeroPieces{reinterpret_cast<uint4*>(ptr), count / 4}; };
    const FusedZeros zeros{{pieces(at<float>(plan_.progress), (plan_.own_accumulators - plan_.progress) / 4 +
                                                                  plan.num_own * plan.accumulator_bytes / 4),
                            pieces(pool.in_dk + first * pool.dk_row, rows * pool.dk_row),
                            pieces(pool.in_dv + first * pool.dv_row, rows * pool.dv_row), pieces(pool.dbias2, dbias2)}};
    if (plan_.key_mask >= 0) {
      start_overlapping(prepare_fused<Config>, num_delta_blocks(), kPrepareThreads, 0, args_, zeros, flag_);
    } else {
      start(prepare_fused<Config>, num_delta_blocks(), kPrepareThreads, 0, args_, zeros, flag_);
    }
  }
  DqAccumulatorPool accumulator_pool() const {
    const DqAccumulatorPlan& plan = plan_.accumulators;
    DqAccumulatorPool pool{};
    pool.own = at<float>(plan_.own_accumulators);
    pool.in_dk = static_cast<float*>(p_.dk), pool.in_dv = static_cast<float*>(p_.dv);
    pool.dk_row = floats(p_.dk_stride[1]), pool.dv_row = floats(p_.dv_stride[1]);
    pool.size = plan.accumulator_bytes / 4;
    std::copy(plan.groups, plan.groups + plan.num_groups, pool.groups);
    pool.num_groups = plan.num_groups;
    pool.ticket = at<uint32_t>(plan_.progress), pool.progress = at<int32_t>(plan_.progress) + 1;
    pool.padded_queries = int32_t(plan_.padded_queries), pool.padded_keys = int32_t(plan_.padded_keys);
    pool.dbias2 = plan_.padded_dbias2 < 0 ? p_.dbias2 : at<float>(plan_.padded_dbias2);
    return pool;
  }
  static int64_t floats(int64_t elements) { return elements * int64_t(sizeof(scalar_t)) / 4; }
  template <typename FusedTile>
  void start_fused(const DqAccumulatorPool& pool) {
    const int64_t blocks = num_tiles<FusedTile>() * p_.H * p_.B * p_.N;
    const int shared = Kernel::fused_shared_bytes();
    const TileOrder order = tile_order<FusedTile>();
    if (FusedTile::kPairsRows) {
      start_pairs(backward_fused<FusedTile>, blocks, FusedTile::kThreads, shared, args_, order, pool);
    } else {
      start(backward_fused<FusedTile>, blocks, FusedTile::kThreads, shared, args_, order, pool);
    }
  }

  const Sm80BackwardPlan plan_;
  const DeviceFacts device_;
  const PostprocessFlag flag_;
  const BackwardInputs args_;
};

}  // namespace ds4s
