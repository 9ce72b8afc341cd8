// The types of the kernels that plan.h names, for one tier of D, and the number of their blocks that are resident on
// the current device.
#pragma once

#include <atomic>

#include "common/device_query.h"
#include "sm90/backward/kernel_dbias2.h"
#include "sm90/backward/kernel_dq_dkdv.h"
#include "sm90/backward/plan.h"
#include "sm90/persistent_grid.h"

namespace ds4s::sm90 {

// A kernel in clusters of kCluster blocks.
template <auto kKernel, typename Config_, int kCluster_>
struct BackwardGrid : PersistentGrid<kKernel, Config_::kNumThreads, Config_::kSharedBytes, kCluster_> {
  using Config = Config_;
  static constexpr int kCluster = kCluster_;
};
template <typename Config, int kCluster = Config::kClusterBlocks>
using DqDkdvGrid = BackwardGrid<kernel_dq_dkdv<Config>, Config, kCluster>;
template <typename Config, int kCluster>
using Dbias2Grid = BackwardGrid<kernel_dbias2<Config>, Config, kCluster>;

template <typename scalar_t, int kHeadDim, bool kHasBias2>
struct BackwardKernels {
  using Tiles = BackwardTiles<kHeadDim>;
  template <typename Shape>
  using OfKeys = DqDkdvConfig<scalar_t, kHeadDim, /*kKeys=*/true, kHasBias2, Shape>;
  template <typename Shape>
  using OfQueries = DqDkdvConfig<scalar_t, kHeadDim, /*kKeys=*/false, kHasBias2, Shape>;
  template <typename Shape>
  using OfDbias2 = Dbias2Config<scalar_t, kHeadDim, Shape>;

  // Whether kernels for pairs of rows n exist. Their dS is rounded before the sum over n; float16 would lose small
  // ones.
  static constexpr bool kPairsRows = kHasBias2 && std::is_same_v<scalar_t, cutlass::bfloat16_t>;
  static constexpr bool kHasNarrowPaired = kPairsRows && Tiles::NarrowPaired::kPairsRows;
  static constexpr bool kHasDqGlobalPaired = kPairsRows && Tiles::kHasDqGlobalPaired;

  // Calls f(kernel, grid) for each kernel that this unit has: those that own keys, those that own queries, and those
  // for dbias2.
  template <typename F>
  static void for_each_of_keys(F&& f) {
    f(Kernel::kKeys, DqDkdvGrid<OfKeys<typename Tiles::Keys>>{});
    f(Kernel::kFewKeys, DqDkdvGrid<OfKeys<typename Tiles::FewKeys>>{});
    if constexpr (Tiles::kHasDqShared) {
      f(Kernel::kFused, DqDkdvGrid<OfKeys<typename Tiles::Fused>>{});
      f(Kernel::kNarrowFused, DqDkdvGrid<OfKeys<typename Tiles::NarrowFused>>{});
      f(Kernel::kLongFused, DqDkdvGrid<OfKeys<typename Tiles::LongFused>>{});
      f(Kernel::kSplitFused, DqDkdvGrid<OfKeys<typename Tiles::SplitFused>>{});
    }
    if constexpr (kHasNarrowPaired) {
      f(Kernel::kNarrowPaired, DqDkdvGrid<OfKeys<typename Tiles::NarrowPaired>, 2>{});
      f(Kernel::kLongPaired, DqDkdvGrid<OfKeys<typename Tiles::LongPaired>, 2>{});
      f(Kernel::kPartsPaired, DqDkdvGrid<OfKeys<typename Tiles::PartsPaired>, 2>{});
    }
    if constexpr (Tiles::kHasLargeClusters) {
      f(Kernel::kTripleFused, DqDkdvGrid<OfKeys<typename Tiles::SplitFused>, 3>{});
      f(Kernel::kQuadFused, DqDkdvGrid<OfKeys<typename Tiles::SplitFused>, 4>{});
      f(Kernel::kClusterFused, DqDkdvGrid<OfKeys<typename Tiles::ClusterFused>, kMostClusterBlocks>{});
    }
    if constexpr (Tiles::kHasDqGlobal && kHasBias2) {
      f(Kernel::kDqGlobal, DqDkdvGrid<OfKeys<typename Tiles::DqGlobal>>{});
    }
    if constexpr (kHasDqGlobalPaired) {
      f(Kernel::kDqGlobalPaired, DqDkdvGrid<OfKeys<typename Tiles::DqGlobalPaired>, 2>{});
    }
  }
  template <typename F>
  static void for_each_of_queries(F&& f) {
    f(Kernel::kQueries, DqDkdvGrid<OfQueries<typename Tiles::Queries>>{});
    f(Kernel::kFewQueries, DqDkdvGrid<OfQueries<typename Tiles::FewQueries>>{});
  }
  template <typename F>
  static void for_each_of_dbias2(F&& f) {
    if constexpr (kHasBias2) {
      f(Kernel::kPairedDbias2, Dbias2Grid<OfDbias2<typename Tiles::Dbias2>, 2>{});
      f(Kernel::kSingleDbias2, Dbias2Grid<OfDbias2<typename Tiles::Dbias2>, 1>{});
      f(Kernel::kSquareDbias2, Dbias2Grid<OfDbias2<typename Tiles::SquareDbias2>, 1>{});
    }
  }

  // Queries each device once per process.
  static cudaError_t query(BackwardFacts& facts) {
    static std::atomic<const BackwardFacts*> known[64];
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess) return error;
    const BackwardFacts* found = device < 64 ? known[device].load(std::memory_order_acquire) : nullptr;
    if (found != nullptr) {
      facts = *found;
      return cudaSuccess;
    }
    error = query_device(facts);
    if (error == cudaSuccess) error = count_blocks(facts);
    // Never freed: a few hundred bytes for each device, which every later call reads.
    if (error == cudaSuccess && device < 64) known[device].store(new BackwardFacts(facts), std::memory_order_release);
    return error;
  }

 private:
  static cudaError_t count_blocks(BackwardFacts& facts) {
    cudaError_t error = cudaSuccess;
    auto count = [&](Kernel kernel, auto grid) {
      int blocks = 0;
      const cudaError_t status = error == cudaSuccess ? decltype(grid)::resident_blocks(blocks) : error;
      // Where not one block fits on the device, the plan takes another kernel: this is no error.
      const bool no_room = status == cudaErrorInvalidConfiguration || status == cudaErrorInvalidValue ||
                           status == cudaErrorInvalidClusterSize;
      if (no_room) cudaGetLastError();
      if (!no_room) error = status;
      facts.resident_blocks[int(kernel)] = no_room ? 0 : blocks;
    };
    for_each_of_keys(count), for_each_of_queries(count), for_each_of_dbias2(count);
    return error;
  }
};

}  // namespace ds4s::sm90
