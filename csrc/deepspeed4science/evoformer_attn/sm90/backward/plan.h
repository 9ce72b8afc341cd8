// The plan of a Hopper backward: its kernels, the slices of kernel_dbias2 and the offsets in the workspace. A plan is a
// value, computed from the call, the device and the tier of D. This header includes no CUDA, so that a host test can
// make plans for any device.
//
//   choose_kernels   which kernels run
//   plan_dbias2      how kernel_dbias2 cuts the rows n into slices
#pragma once

#include "common/device_facts.h"
#include "common/key_mask_layout.h"
#include "common/plan_print.h"
#include "common/slices.h"
#include "sm90/backward/dq_global_plan.h"
#include "sm90/bias2_view.h"

namespace ds4s::sm90 {

// The instantiations of kernel_dq_dkdv and kernel_dbias2: kernels.h lists them, tile_sizes.h has their tiles.
enum class Kernel : int {
  kNone,
  kFused,           // dk, dv and dq; dq in shared memory
  kNarrowFused,     // as kFused, in rounds of two tiles of keys instead of three; a warpgroup of its own computes dq
  kNarrowPaired,    // as kNarrowFused, in clusters of two blocks for two rows n, which add to dbias2 together
  kLongFused,       // as kFused, for more queries
  kLongPaired,      // as kNarrowPaired, for more queries
  kPartsPaired,     // as kNarrowPaired, for any number of queries, in parts
  kSplitFused,      // as kFused, in clusters of two blocks, each with half of the queries
  kTripleFused,     // as kSplitFused, in clusters of three
  kQuadFused,       // as kSplitFused, in clusters of four
  kClusterFused,    // as kFused, for N = 1: each block of a cluster has all queries and a tile of keys
  kDqGlobal,        // dk, dv and dq; dq by additions to accumulators in L2
  kDqGlobalPaired,  // the same in clusters of two blocks for two rows n, which add to dbias2 together
  kKeys,            // dk and dv
  kFewKeys,         // as kKeys, for few rows n
  kQueries,         // dq
  kFewQueries,      // as kQueries, for few rows n
  kPairedDbias2,    // dbias2, in clusters of two blocks that share K and V
  kSingleDbias2,    // the same tiles without clusters
  kSquareDbias2,    // other tiles, which cover some lengths with less overhang
};
constexpr const char* kKernelNames[] = {
    "none",        "fused",        "narrow_fused", "narrow_paired", "long_fused",    "long_paired",      "parts_paired",
    "split_fused", "triple_fused", "quad_fused",   "cluster_fused", "dq_global",     "dq_global_paired", "keys",
    "few_keys",    "queries",      "few_queries",  "paired_dbias2", "single_dbias2", "square_dbias2"};
constexpr int kNumKernels = int(sizeof(kKernelNames) / sizeof(kKernelNames[0]));
static_assert(kNumKernels == int(Kernel::kSquareDbias2) + 1, "a name for each kernel");

struct BackwardFacts : DeviceFacts {
  int64_t resident_blocks[kNumKernels] = {};  // of each kernel; 0: not one block (or cluster) fits on the device

  int64_t blocks_of(Kernel kernel) const { return resident_blocks[int(kernel)]; }
};

constexpr int kMostClusterBlocks = 8;  // the largest cluster that every device of this architecture can run

// dbias2 or rounded_dbias2, or sums of dbias2 whose rows are further apart.
inline TensorView<5> dbias2_view(const BwdParams& p, const void* ptr, int64_t row_stride) {
  return {ptr, {p.Lk, p.Lq, p.H, 1, p.B}, {1, row_stride, p.Lq * row_stride, 0, p.H * p.Lq * row_stride}};
}

struct Sm90BackwardPlan {
  // The kernels run in this order; if dbias2_is_last, dbias2 runs last.
  Kernel dbias2 = Kernel::kNone, keys = Kernel::kNone, queries = Kernel::kNone;
  bool delta_with_dq = false;  // the kernel for keys computes delta; dbias2, which reads it, runs last
  bool stores_dbias2 = false;  // N = 1: dbias2 is dS, and the kernel for dq stores it
  bool dbias2_is_last = false;
  bool pairs_rows = false;     // the kernel for keys adds dbias2
  bool rounds_dbias2 = false;  // N = 1: the kernel for keys stores dbias2 in the type of q
  int64_t dbias2_stride = 0;   // from one row of the sums to the next
  // kernel_dbias2 cuts the rows n into so many slices. If the device chooses the number by the visible keys, this is
  // the upper bound.
  int64_t num_slices = 1;
  int cluster_blocks = 1;      // of the kernel for keys
  int64_t query_parts = 1;     // that kernel computes so many parts of the queries one after another,
  bool heads_outside = false;  // and all rows n of one head after those of another
  bool device_chooses_slices = false;
  bool adds_dbias2 = false;  // several slices add to one dbias2
  // Where all tiles have equally many rows n, clusters divide these by RowPartition, not in slices.
  bool partitions_rows = false;
  int64_t keys_per_list = 0;  // each tile of so many keys has a list of the rows n that see it; 0: no lists
  // Where keys are hidden, kernel_dbias2's tiles may have fewer keys than keys_per_list, so that all tiles with visible
  // keys have equally many. Keys past the last tile are hidden; their dbias2 is 0 because preprocess sets it to 0.
  bool cuts_evenly = false;
  // Preprocess finds the visible keys. It cannot where it makes the lists: these need the result of all its blocks, so
  // find_visible_keys runs before it.
  bool preprocess_finds_keys = false;
  // Where find_visible_keys runs before preprocess: so many blocks of preprocess, as many as are resident at once,
  // store zeros and, for delta, load O and dO while it runs. Later blocks ask first whether their row n sees anything,
  // and if not, load neither.
  int64_t early_blocks = 0;
  DqGlobalPlan dq_global;
  // Where dq is added up in float16: of so many (b, n, h), preprocess computes delta; of others, later_delta.h.
  int64_t first_pairs = 0, later_pairs = 0;

  // Offsets in the workspace.
  int64_t delta = kNotReserved, counters = kNotReserved, accumulators = kNotReserved, key_mask = kNotReserved;
  int64_t row_lists = kNotReserved, bias1 = kNotReserved, dbias1_parts = kNotReserved, bias2 = kNotReserved;
  int64_t padded_dbias2 = kNotReserved;   // sums whose rows begin at multiples of 16 bytes
  int64_t part_exponents = kNotReserved;  // of dk and dv between two parts of the queries (partial_sums.h)
  int64_t dq_range = kNotReserved;        // dq_range_args.h
  int64_t dbias2_parts = kNotReserved, postprocess_flag = kNotReserved, delta_progress = kNotReserved;
  int64_t workspace_bytes = 0;

  // Of dq_global.h and later_delta.h.
  int64_t num_counters() const { return dq_global.num_counters + later_pairs; }
  bool orders_dbias2() const { return dq_global.adds_dbias2 && !pairs_rows; }  // dbias2_global.h
  bool dbias2_waits_for_delta() const { return delta_with_dq && dbias2 != Kernel::kNone; }
  // Only kernels for pairs of rows n, and postprocess, take a distance of dbias2's rows other than Lk.
  bool takes_dbias2_rows(const BwdParams& p) const {
    return p.dbias2 == nullptr || p.dbias2_stride == p.Lk || (pairs_rows && p.dbias2_stride > p.Lk);
  }
  // Whether the caller's sums of dbias2 are not needed.
  bool has_own_dbias2() const { return rounds_dbias2 || padded_dbias2 >= 0; }

  void print(PlanText& text) const;
};

// The tile of dbias2 that a cluster computes at a time.
struct Dbias2ClusterTile {
  int64_t queries, keys;
  int cluster_blocks;

  int64_t num_tiles(const BwdParams& p) const { return ceil_div(p.Lq, queries) * ceil_div(p.Lk, keys) * p.H * p.B; }
  // Elements of all tiles, those past Lq and Lk included.
  int64_t num_covered(const BwdParams& p) const { return num_tiles(p) * queries * keys; }
};
template <int kHeadDim>
constexpr Dbias2ClusterTile dbias2_cluster_tile(Kernel kernel) {
  using Tiles = typename BackwardTiles<kHeadDim>::Dbias2;
  using Square = typename BackwardTiles<kHeadDim>::SquareDbias2;
  if (kernel == Kernel::kSquareDbias2) return {Square::kBlockQueries, Square::kBlockKeys, 1};
  const int blocks = kernel == Kernel::kPairedDbias2 ? 2 : 1;
  return {Tiles::kBlockQueries * blocks, Tiles::kBlockKeys, blocks};
}

template <int kHeadDim, bool kHasBias2>
class Sm90BackwardPlanner {
 public:
  Sm90BackwardPlanner(const BwdParams& p, const BackwardFacts& device, bool half_dq_sums)
      : p_(p), device_(device), half_dq_sums_(half_dq_sums) {}

  Sm90BackwardPlan plan() {
    choose_kernels();
    const KeyMaskLayout key_mask(p_);
    const int64_t rows = p_.B * p_.N, pairs = rows * p_.H;
    if (plan_.dbias2 != Kernel::kNone) plan_dbias2(key_mask.needed());
    plan_.preprocess_finds_keys = key_mask.needed() && plan_.keys_per_list == 0;
    if (plan_.keys_per_list > 0) plan_.early_blocks = int64_t(kPreprocessBlocks) * device_.num_multiprocessors;
    const DqGlobalPlan& dq = plan_.dq_global;
    const int64_t deltas = num_deltas();
    plan_.delta = layout_.reserve(deltas > 0, deltas * p_.Lq * 4);
    plan_later_delta();
    plan_.counters = layout_.reserve(bool(dq), plan_.num_counters() * 4);
    plan_.dq_range = layout_.reserve(dq && half_dq_sums_, dq.range_bytes);
    plan_.delta_progress = layout_.reserve(plan_.dbias2_waits_for_delta(), 4);
    plan_.accumulators = layout_.reserve(dq.adds_dbias2, dq.num_accumulators * dq.accumulator_size * 4);
    plan_.key_mask = layout_.reserve(key_mask.needed(), key_mask.bytes());
    if (plan_.keys_per_list > 0) {
      plan_.row_lists = layout_.reserve(true, (p_.B * ceil_div(p_.Lk, plan_.keys_per_list) * (p_.N + 1) + 1) * 4);
    }
    plan_.bias1 = layout_.reserve(p_.bias1 && p_.bias1_stride[2] != 1, rows * p_.Lk * 2);
    plan_.dbias1_parts = layout_.reserve(p_.dbias1 && p_.deterministic, pairs * p_.Lk * 4);
    const Bias2View bias2(p_);
    plan_.bias2 = layout_.reserve(bias2.copied, bias2.workspace_bytes());
    plan_.dbias2_parts =
        layout_.reserve(plan_.num_slices > 1 && p_.deterministic, plan_.num_slices * p_.B * p_.H * p_.Lq * p_.Lk * 4);
    const bool pads = plan_.pairs_rows && p_.dbias2 == nullptr;
    plan_.dbias2_stride = pads ? ceil_div(p_.Lk, 4) * 4 : p_.dbias2 ? p_.dbias2_stride : p_.Lk;
    plan_.padded_dbias2 = layout_.reserve(pads, p_.B * p_.H * p_.Lq * plan_.dbias2_stride * 4);
    const int64_t key_tiles = ceil_div(p_.Lk, Tiles::PartsPaired::kTiles * kOwned) * Tiles::PartsPaired::kTiles;
    plan_.part_exponents =
        layout_.reserve(plan_.query_parts > 1, device_.blocks_of(plan_.keys) * key_tiles * kTileExponents * 2);
    plan_.postprocess_flag = layout_.reserve(true, 4);
    plan_.workspace_bytes = layout_.bytes();
    return plan_;
  }

 private:
  using Tiles = BackwardTiles<kHeadDim>;

  // One kernel computes dk, dv and dq where that is less work than two kernels. dbias2 has a kernel of its own, unless
  // one of the other kernels stores its dS, or adds it to dbias2.
  void choose_kernels() {
    const bool of_keys = p_.dk || p_.dv || p_.dbias1;
    if (of_keys && p_.dq) plan_.keys = splits_keys() ? Kernel::kClusterFused : fused_kernel();
    // Above D = 32, kDqGlobal is faster than kSplitFused (times in tile_sizes.h).
    const bool fuses = plan_.keys != Kernel::kNone && (kHeadDim <= 32 || plan_.keys != Kernel::kSplitFused);
    if (!fuses) choose_dq_global();
    plan_.rounds_dbias2 = plan_.keys == Kernel::kClusterFused && p_.rounded_dbias2;
    plan_.cluster_blocks = int(cluster_blocks_of(plan_.keys));
    if (plan_.keys == Kernel::kNone) {
      if (of_keys)
        plan_.keys =
            fewer_rounds<typename Tiles::FewKeys, typename Tiles::Keys>(Kernel::kFewKeys, Kernel::kKeys, p_.Lk);
      if (p_.dq)
        plan_.queries = fewer_rounds<typename Tiles::FewQueries, typename Tiles::Queries>(Kernel::kFewQueries,
                                                                                          Kernel::kQueries, p_.Lq);
    }
    // kernel_dbias2 follows a kernel that computes its delta; kDqGlobal, whose accumulators of dq may lie in the memory
    // of dbias2; and clusters of more than two blocks, which leave multiprocessors idle: it begins there.
    plan_.delta_with_dq =
        Tiles::Fused::kComputesDelta && (plan_.keys == Kernel::kFused || plan_.keys == Kernel::kNarrowFused ||
                                         plan_.keys == Kernel::kNarrowPaired || plan_.keys == Kernel::kLongPaired);
    plan_.pairs_rows = plan_.keys == Kernel::kNarrowPaired || plan_.keys == Kernel::kLongPaired ||
                       plan_.keys == Kernel::kPartsPaired || plan_.keys == Kernel::kDqGlobalPaired;
    if (plan_.keys == Kernel::kPartsPaired) plan_.query_parts = ceil_div(p_.Lq, Tiles::PartsPaired::kQueries);
    // bias2 of the heads under way and its sums stay in L2.
    constexpr int64_t kMostOfL2 = int64_t(24) << 20;
    plan_.heads_outside =
        plan_.cluster_blocks > 2 || (plan_.query_parts > 1 && p_.H * p_.Lq * p_.Lk * (2 + 4) > kMostOfL2);
    plan_.dbias2_is_last = bool(plan_.dq_global) || plan_.cluster_blocks > 2 || plan_.delta_with_dq;
    plan_.stores_dbias2 = p_.dbias2 && p_.N == 1 && plan_.queries != Kernel::kNone;
    if (kHasBias2 && p_.dbias2 && !plan_.stores_dbias2 && !plan_.dq_global.adds_dbias2 && !plan_.pairs_rows) {
      plan_.dbias2 = dbias2_kernel();
    }
  }

  Kernel fused_kernel() const {
    if constexpr (Tiles::kHasDqShared) {
      const int64_t key_tiles = ceil_div(p_.Lk, kOwned);
      const bool narrow =
          Tiles::NarrowFused::kTiles < Tiles::Fused::kTiles &&
          2 * ceil_div(key_tiles, Tiles::NarrowFused::kTiles) < 3 * ceil_div(key_tiles, Tiles::Fused::kTiles);
      if (Tiles::NarrowPaired::kPairsRows && can_pair_rows()) {
        if (suits<typename Tiles::NarrowPaired>(Kernel::kNarrowPaired)) return Kernel::kNarrowPaired;
        if (suits<typename Tiles::LongPaired>(Kernel::kLongPaired)) return Kernel::kLongPaired;
        if (suits<typename Tiles::PartsPaired>(Kernel::kPartsPaired)) return Kernel::kPartsPaired;
      }
      if (narrow && suits<typename Tiles::NarrowFused>(Kernel::kNarrowFused)) return Kernel::kNarrowFused;
      if (suits<typename Tiles::Fused>(Kernel::kFused)) return Kernel::kFused;
      if (suits<typename Tiles::LongFused>(Kernel::kLongFused)) return Kernel::kLongFused;
      // Deterministic dbias1 has one part for each head: all blocks of a cluster would store the same part.
      const bool same_parts = p_.dbias1 && p_.deterministic;
      if (!same_parts && suits<typename Tiles::SplitFused>(Kernel::kSplitFused)) return Kernel::kSplitFused;
      for (Kernel kernel : {Kernel::kTripleFused, Kernel::kQuadFused}) {
        if (!same_parts && Tiles::kHasLargeClusters && suits<typename Tiles::SplitFused>(kernel)) return kernel;
      }
    }
    return Kernel::kNone;
  }
  // Four elements are added at a time, at multiples of 16 bytes: of dbias2, or of padded sums that are rounded later.
  bool can_pair_rows() const {
    const bool aligned = p_.dbias2 && p_.dbias2_stride % 4 == 0 && reinterpret_cast<uintptr_t>(p_.dbias2) % 16 == 0;
    const bool pads = p_.dbias2 == nullptr && p_.rounded_dbias2 && p_.Lk % 4 != 0;
    return kHasBias2 && (aligned || pads) && !p_.deterministic && p_.N > 1;
  }
  // N = 1: the blocks of a cluster divide the keys of a (b, n, h) among themselves, and the rounded dS is dbias2. A
  // dbias2 in float32, or one that TMA cannot store (rows that do not begin at 16 bytes), comes from other kernels.
  bool splits_keys() const {
    const int64_t blocks = cluster_blocks_of(Kernel::kClusterFused);
    const bool fits = p_.N == 1 && p_.Lq <= Tiles::ClusterFused::kQueries && blocks > 1 && blocks <= kMostClusterBlocks;
    return Tiles::kHasLargeClusters && fits && device_.blocks_of(Kernel::kClusterFused) > 0 && p_.dbias2 == nullptr &&
           (p_.rounded_dbias2 == nullptr || has_tensor_map(dbias2_view(p_, p_.rounded_dbias2, p_.Lk)));
  }
  // Blocks in a cluster of a kernel that computes dk and dv.
  int64_t cluster_blocks_of(Kernel kernel) const {
    if (kernel == Kernel::kClusterFused) return ceil_div(p_.Lk, Tiles::ClusterFused::kTiles * kOwned);
    return kernel == Kernel::kSplitFused    ? 2
           : kernel == Kernel::kTripleFused ? 3
           : kernel == Kernel::kQuadFused   ? 4
                                            : 1;
  }
  // A fused kernel takes about 0.7 of the time of two kernels where every warpgroup has keys and every cluster has a
  // (b, n, h). It is still faster where three eighths of its work is overhang in both.
  template <typename Fused>
  bool suits(Kernel kernel) const {
    const int64_t blocks = cluster_blocks_of(kernel), most = blocks * Fused::kQueries;
    if ((p_.Lq > most && !Fused::kHasQueryParts) || (blocks > 1 && p_.Lq <= most - Fused::kQueries)) return false;
    if (Fused::kDeltaInMemory && p_.Lq <= kDeltaRing * Fused::kColumns) return false;  // row_delta.h
    const int64_t clusters = device_.blocks_of(kernel) / blocks;
    if (clusters == 0) return false;
    const int64_t key_tiles = ceil_div(p_.Lk, kOwned), pairs = p_.B * p_.N * p_.H;
    const int64_t in_clusters = Fused::kPairsRows ? p_.B * ceil_div(p_.N, 2) * 2 * p_.H : pairs;
    const int64_t computed =
        ceil_div(key_tiles, Fused::kTiles) * Fused::kTiles * ceil_div(in_clusters, clusters) * clusters;
    return 5 * computed <= 8 * key_tiles * pairs;
  }

  // Where kernel_dq_dkdv takes a while, and its blocks need not all be resident, it does not wait for delta of all
  // (b, n, h): later_delta.h computes that of all but those of three waves of tiles, which are its lead.
  void plan_later_delta() {
    constexpr int64_t kLeastBytes = int64_t(32) << 20;  // of O and dO: 9 us on an H200
    const DqGlobalPlan& dq = plan_.dq_global;
    const int64_t pairs = p_.B * p_.N * p_.H;
    plan_.first_pairs = pairs;
    if (Tiles::kHasDqGlobalPaired || plan_.keys != Kernel::kDqGlobal || !half_dq_sums_ || !dq.adds_dbias2 ||
        dq.key_blocks > kTileQueueSize)
      return;
    const int64_t first = ceil_div(3 * device_.blocks_of(Kernel::kDqGlobal), dq.key_blocks);
    if ((pairs - first) * p_.Lq * kHeadDim * 4 < kLeastBytes) return;
    plan_.first_pairs = first, plan_.later_pairs = pairs - first;
  }

  void choose_dq_global() {
    if constexpr (Tiles::kHasDqGlobal && kHasBias2) {
      const bool wanted = p_.dbias2 && p_.dk && p_.dv && p_.dq && !p_.deterministic && p_.N > 1;
      auto choose = [&](Kernel kernel, DqGlobalPlan plan) {
        if (wanted && !plan_.dq_global && plan) plan_.dq_global = plan, plan_.keys = kernel;
      };
      const int64_t paired =
          Tiles::kHasDqGlobalPaired && can_pair_rows() ? device_.blocks_of(Kernel::kDqGlobalPaired) : 0;
      const int64_t blocks = device_.blocks_of(Kernel::kDqGlobal);
      choose(Kernel::kDqGlobalPaired,
             DqGlobalPlan::of<typename Tiles::DqGlobalPaired, kHeadDim>(p_, paired, half_dq_sums_));
      choose(Kernel::kDqGlobal, DqGlobalPlan::of<typename Tiles::DqGlobal, kHeadDim>(p_, blocks, half_dq_sums_));
    }
  }

  // The kernel with fewer tiles for each block.
  template <typename Few, typename Many>
  Kernel fewer_rounds(Kernel few, Kernel many, int64_t owned) const {
    return num_rounds<Few>(few, owned) < num_rounds<Many>(many, owned) ? few : many;
  }
  template <typename Shape>
  int64_t num_rounds(Kernel kernel, int64_t owned) const {
    const int64_t tiles = ceil_div(owned, Shape::kTiles * kOwned) * ceil_div(p_.N, Shape::kRows) * p_.H * p_.B;
    return ceil_div(tiles, std::max(device_.blocks_of(kernel), int64_t(1)));
  }

  // Clusters where their tiles cover at most a tenth more than those of single blocks; square tiles where the others
  // cover over a tenth more than these.
  Kernel dbias2_kernel() const {
    const int64_t paired = num_covered(Kernel::kPairedDbias2), single = num_covered(Kernel::kSingleDbias2);
    const bool pairs = 10 * paired <= 11 * single && device_.blocks_of(Kernel::kPairedDbias2) > 0;
    if (11 * num_covered(Kernel::kSquareDbias2) < 10 * (pairs ? paired : single)) return Kernel::kSquareDbias2;
    return pairs ? Kernel::kPairedDbias2 : Kernel::kSingleDbias2;
  }
  int64_t num_covered(Kernel kernel) const { return dbias2_cluster_tile<kHeadDim>(kernel).num_covered(p_); }

  // The (b, n, h) whose delta has memory at a time. Where the kernel for keys computes delta, only kernel_dbias2 reads
  // that of all. kLongPaired has delta of a block's (b, n, h) and of its next one in memory; the others keep it in
  // shared memory.
  int64_t num_deltas() const {
    if (plan_.dq_global.num_sections > 1) return 0;  // in dq
    if (!plan_.delta_with_dq || plan_.dbias2_waits_for_delta()) return p_.B * p_.N * p_.H;
    if (plan_.keys != Kernel::kLongPaired) return 0;
    return std::min(2 * device_.blocks_of(plan_.keys), p_.B * ceil_div(p_.N, 2) * 2 * p_.H);
  }

  void plan_dbias2(bool has_mask) {
    const Dbias2ClusterTile tile = dbias2_cluster_tile<kHeadDim>(plan_.dbias2);
    const int64_t tiles = tile.num_tiles(p_);
    const int64_t clusters = std::max(device_.blocks_of(plan_.dbias2) / tile.cluster_blocks, int64_t(1));
    plan_.keys_per_list = has_mask ? tile.keys : 0;
    // With hidden keys, tiles differ in cost, and only the device knows the visible keys. It chooses the number of
    // slices, but not for deterministic sums, where each slice takes memory. Without its choice, four tiles for each
    // cluster even out the costs.
    plan_.device_chooses_slices = has_mask && p_.N >= 16 && !p_.deterministic;
    const int64_t least = has_mask ? ceil_div(4 * clusters, tiles) : 1;
    plan_.num_slices = choose_slices(p_.N, tiles, clusters, least);
    // Where each cluster has four tiles or more, slices of 96 rows n are faster: (1,1536,1536,4,32) 22.4 ms, else 22.9.
    if (tiles >= 4 * clusters && !p_.deterministic) {
      plan_.num_slices = std::max(plan_.num_slices, std::min(ceil_div(p_.N, 96), kMostSlices));
    }
    if (plan_.device_chooses_slices) plan_.num_slices = std::min(p_.N / 8, kMostSlices);
    plan_.adds_dbias2 = plan_.num_slices > 1 && !p_.deterministic;
    // Where clusters are at more different rows n at a time, fewer of these are in L2. So not where clusters begin one
    // after another, nor where each has many tiles, nor without pairs: (1,448,448,4,32) 1.02 of the whole backward.
    plan_.partitions_rows =
        plan_.adds_dbias2 && plan_.dbias2 == Kernel::kPairedDbias2 && plan_.cluster_blocks <= 2 && tiles < 4 * clusters;
    plan_.cuts_evenly = plan_.device_chooses_slices && plan_.adds_dbias2 && plan_.dbias2 != Kernel::kSquareDbias2 &&
                        Tiles::Dbias2::kCutsEvenly;
  }

  const BwdParams& p_;
  const BackwardFacts& device_;
  const bool half_dq_sums_;  // dq_sums.h
  Sm90BackwardPlan plan_;
  WorkspaceLayout layout_;
};

template <int kHeadDim, bool kHasBias2>
Sm90BackwardPlan make_plan(const BwdParams& p, const BackwardFacts& device, bool half_dq_sums) {
  return Sm90BackwardPlanner<kHeadDim, kHasBias2>(p, device, half_dq_sums).plan();
}

inline void Sm90BackwardPlan::print(PlanText& text) const {
  auto kernel = [&](const char* name, Kernel which) {
    if (which != Kernel::kNone) text.add(name, kKernelNames[int(which)]);
  };
  kernel("dbias2", dbias2), kernel("dkdv", keys), kernel("dq", queries);
  if (stores_dbias2) text.add("dbias2", "stored_with_dq");
  if (delta_with_dq) text.add("computes_delta", "with_dq");
  if (rounds_dbias2) text.add("dbias2", "rounded_with_dkdv");
  if (query_parts > 1) text.add("query_parts", query_parts);
  if (heads_outside) text.add("heads", "outside");
  if (dq_global.adds_dbias2 || pairs_rows) text.add("dbias2", "added_with_dkdv");
  if (dbias2 != Kernel::kNone) {
    if (dbias2_is_last) text.add("dbias2_runs", "last");
    text.add(device_chooses_slices ? "most_slices" : "slices", num_slices);
  }
  if (partitions_rows) text.add("equal_tiles", "partitioned");
  if (preprocess_finds_keys) text.add("visible_keys", "found_in_preprocess");
  if (early_blocks > 0) text.add("early_preprocess_blocks", early_blocks);
  if (dq_global) text.add("dq_accumulators", dq_global.num_accumulators);
  if (dq_global.num_sections > 1) text.add("dq_sections", dq_global.num_sections);
  if (later_pairs > 0) text.add("later_delta", later_pairs);
  text.add_offset("delta", delta), text.add_offset("counters", counters);
  text.add_offset("dq_range", dq_range);
  text.add_offset("accumulators", accumulators), text.add_offset("key_mask", key_mask);
  text.add_offset("row_lists", row_lists), text.add_offset("bias1", bias1);
  text.add_offset("dbias1_parts", dbias1_parts), text.add_offset("bias2", bias2);
  text.add_offset("padded_dbias2", padded_dbias2), text.add_offset("part_exponents", part_exponents);
  text.add_offset("dbias2_parts", dbias2_parts), text.add_offset("postprocess_flag", postprocess_flag);
  text.add_offset("delta_progress", delta_progress);
  text.add("workspace_bytes", workspace_bytes);
}

}  // namespace ds4s::sm90
