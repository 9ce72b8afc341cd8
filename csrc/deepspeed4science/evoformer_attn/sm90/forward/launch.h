// Host side of the Hopper forward: FwdParams -> tensor maps and ForwardArgs -> launch. A generated unit instantiates
// one Sm90Forward<...> and exports its functions.
#pragma once

#include <algorithm>
#include <cmath>

#include "params.h"
#include "sm90/balanced_blocks.h"
#include "sm90/bias2_rows.h"
#include "sm90/forward/kernel.h"
#include "sm90/forward/plan.h"
#include "sm90/half_tiles.h"
#include "sm90/persistent_grid.h"

namespace ds4s::sm90 {

// The launch of one kernel: its tensor maps, arguments and grid.
template <typename Config>
struct ForwardLaunch {
  using scalar_t = typename Config::scalar_t;
  using QTile = typename Config::QTile;
  using QBox = typename Config::QBox;
  using KTile = typename Config::KTile;
  using BiasBox = typename Config::BiasBox;
  static constexpr int kBoxRows = Config::kBoxRows;

  static int64_t num_query_blocks(const FwdParams& p) {
    return (p.Lq + Config::kBlockQueries - 1) / Config::kBlockQueries;
  }
  static int64_t num_row_groups(const FwdParams& p) { return (p.N + Config::kRows - 1) / Config::kRows; }
  static int64_t num_tiles(const FwdParams& p) { return num_query_blocks(p) * p.H * num_row_groups(p) * p.B; }

  static cudaError_t run(const FwdParams& p, const Sm90ForwardPlan& plan, const TensorView<5>& bias2,
                         cudaStream_t stream) {
    int blocks = 0;
    cudaError_t error = resident_blocks(blocks);
    ForwardMaps maps{};
    if (error == cudaSuccess)
      error = make_tile_map<scalar_t, QBox>(maps.q, tensor_view(p, p.q, p.q_stride, p.Lq, p.D), kBoxRows);
    if (error == cudaSuccess)
      error = make_tile_map<scalar_t, KTile>(maps.k, tensor_view(p, p.k, p.k_stride, p.Lk, p.D), kBoxRows);
    if (error == cudaSuccess)
      error = make_tile_map<scalar_t, KTile>(maps.v, tensor_view(p, p.v, p.v_stride, p.Lk, p.Dv), kBoxRows);
    if (error == cudaSuccess)
      error = make_tile_map<scalar_t, QTile>(maps.o, tensor_view(p, p.o, p.o_stride, p.Lq, p.Dv));
    if (Config::kHasBias2 && error == cudaSuccess) error = make_tile_map<scalar_t, BiasBox>(maps.bias2, bias2);
    if (error != cudaSuccess) return error;
    ForwardArgs args = make_args(p, plan, bias2);
    // In bands, blocks get every query block of a row n anyway.
    if (plan.groups_of_band == 1 && args.num_tiles >= blocks) {
      blocks = int(balanced_blocks(blocks, args.num_tiles, ceil_div(p.Lq, Config::kQueries), Config::kQueryTiles));
    }
    if (Config::kRows == 2) {
      const HalfTiles tiles = HalfTiles::of(args.num_tiles, blocks);
      args.first_half = int32_t(tiles.first_half), args.num_tiles = int32_t(tiles.num_tiles);
    }
    blocks = std::min(blocks, args.num_tiles);
    Launch launch(blocks, Config::kNumThreads, Config::kSharedBytes, /*cluster=*/1, stream);
    launch.overlap();
    return cudaLaunchKernelEx(launch.config(), forward<Config>, args, maps);
  }

  static cudaError_t resident_blocks(int& blocks) {
    return PersistentGrid<forward<Config>, Config::kNumThreads, Config::kSharedBytes>::resident_blocks(blocks);
  }

 private:
  static ForwardArgs make_args(const FwdParams& p, const Sm90ForwardPlan& plan, const TensorView<5>& bias2) {
    ForwardArgs args{};
    args.bias1 = p.bias1, args.row_mask = p.row_mask, args.lse = p.lse;
    for (int d = 0; d < 3; ++d) args.bias1_stride[d] = p.bias1_stride[d];
    constexpr int kVector = 16 / sizeof(scalar_t);
    args.bias1_in_vectors = p.bias1_stride[2] == 1 && p.bias1_stride[0] % kVector == 0 &&
                            p.bias1_stride[1] % kVector == 0 && p.Lk % kVector == 0 &&
                            reinterpret_cast<uintptr_t>(p.bias1) % 16 == 0;
    for (int d = 0; d < 2; ++d) args.row_mask_stride[d] = p.row_mask_stride[d];
    args.N = int32_t(p.N), args.H = int32_t(p.H), args.Lq = int32_t(p.Lq), args.Lk = int32_t(p.Lk);
    const int64_t groups = num_row_groups(p) * p.B, bands = ceil_div(groups, plan.groups_of_band);
    const int64_t of_band = ceil_div(groups, bands);  // row groups are divided evenly among bands
    args.by_groups = cutlass::FastDivmod(int(of_band));
    args.num_bands = int32_t(ceil_div(groups, of_band));
    args.by_last_groups = cutlass::FastDivmod(int(groups - (args.num_bands - 1) * of_band));
    args.by_query_blocks = cutlass::FastDivmod(int(num_query_blocks(p)));
    args.by_row_groups = cutlass::FastDivmod(int(num_row_groups(p)));
    args.parts_begun = at<int32_t>(p.workspace, plan.parts_begun);
    args.by_band_tiles = cutlass::FastDivmod(int(num_query_blocks(p) * p.H * of_band));
    args.num_tiles = int32_t(num_tiles(p));
    args.bias2_H = bias2.size[2] > 1, args.bias2_B = bias2.size[4] > 1;
    args.q_factor = Config::kScalesQ ? std::exp2(std::floor(std::log2(p.scale))) : 1.f;
    args.f = args.q_factor / p.scale;
    args.c = kLog2e / args.f;
    return args;
  }
};

template <typename scalar_t, int kHeadDim, bool kHasBias1, bool kHasBias2>
struct Sm90Forward {
  static int64_t workspace_bytes(const FwdParams& p) {
    Sm90ForwardPlan plan;
    plan_workspace(plan, p);
    return plan.workspace_bytes;
  }

  static int run(const FwdParams& p, cudaStream_t stream) {
    constexpr int64_t kLimit = int64_t(1) << 31;
    bool fits = p.D <= kHeadDim && p.Dv <= kHeadDim && p.Lq < kLimit - 256 && p.Lk < kLimit - 256 &&
                p.N < kLimit - 256 && p.B * p.N * p.H * ((p.Lq + 63) / 64) < kLimit / 2 &&
                (p.bias1 != nullptr) == kHasBias1 && (p.bias2 != nullptr) == kHasBias2;
    if (!fits) return cudaErrorInvalidValue;
    if (p.B * p.N * p.H == 0) return cudaSuccess;

    ForwardFacts device;
    if (cudaError_t error = query(p, device); error != cudaSuccess) return error;
    const Sm90ForwardPlan plan = make_plan<kHeadDim>(p, device);
    const Bias2View view(p);
    if (cudaError_t error = copy_bias2_rows<scalar_t>(view, p.workspace, stream); error != cudaSuccess) return error;
    const TensorView<5> bias2 = view.read(p.workspace);
    if (plan.parts_begun >= 0) {
      const cudaError_t error = cudaMemsetAsync(at<int32_t>(p.workspace, plan.parts_begun), 0, 4, stream);
      if (error != cudaSuccess) return error;
    }
    switch (plan.kernel) {
      case ForwardKernel::kManyRows:
        return Launch<typename Choice::ManyRows>::run(p, plan, bias2, stream);
      case ForwardKernel::kOneRow:
        return Launch<typename Choice::OneRow>::run(p, plan, bias2, stream);
      case ForwardKernel::kFewTiles:
        return Launch<typename Choice::FewTiles>::run(p, plan, bias2, stream);
      default:
        return Launch<typename Choice::FewestTiles>::run(p, plan, bias2, stream);
    }
  }

  static void print_plan(const FwdParams& p, PlanText& text) {
    ForwardFacts device;
    if (query(p, device) == cudaSuccess) make_plan<kHeadDim>(p, device).print(text);
  }

 private:
  using Choice = ForwardChoice<kHeadDim>;
  template <typename Tiles>
  using Launch = ForwardLaunch<ForwardConfig<scalar_t, kHeadDim, kHasBias1, kHasBias2, Tiles>>;

  // Queries only what make_plan reads for this call: CUDA loads a kernel when it is first queried.
  static cudaError_t query(const FwdParams& p, ForwardFacts& device) {
    if (p.N != 1) return cudaSuccess;
    int blocks = 0;
    const cudaError_t error = Launch<typename Choice::OneRow>::resident_blocks(blocks);
    device.one_row_blocks = blocks;
    return error;
  }
};

}  // namespace ds4s::sm90
