// The plan of a backward: its kernels, their parameters, and the offsets in the workspace. A plan is a value, computed
// from the call, the device and the unit. This header includes no CUDA, so that a host test can make plans for any
// device.
//
// choose_kernels() decides between one kernel for dq, dk, dv and both bias gradients, here called fused, and up to four
// separate ones.
#pragma once

#include "common/device_facts.h"
#include "common/key_mask_layout.h"
#include "common/plan_print.h"
#include "common/slices.h"
#include "sm80/backward/dq_accumulator_plan.h"
#include "sm80/backward/tile_sizes.h"

namespace ds4s {

// The properties of a unit's kernels that a plan reads. Bytes of shared memory are those with two pipeline stages.
struct BackwardUnit {
  int element_bytes, head_dim;
  bool has_bias2;
  bool tiles_bias2;  // the transposed copy of bias2 consists of tiles of 32 x 32
  bool is_exact;     // float in full precision: statistics.h
  bool splits_dkdv;  // dk and dv have a kernel each
  int max_stages;
  BackwardTileSizes tiles;
  // dk: of the kernel for dk and dv, unless splits_dkdv.
  int dq_shared_bytes, dk_shared_bytes, dv_shared_bytes, dbias2_shared_bytes;
  int dbias2_blocks;  // resident on a multiprocessor
  // The fused kernel.
  bool has_fused;
  bool fused_reads_bias2;  // it reads bias2; else a transposed copy of it
  int fused_shared_bytes, fused_blocks;

  int64_t vector() const { return 16 / element_bytes; }
};

struct Sm80BackwardPlan {
  // The kernels, in the order in which they run.
  bool runs_fused = false, runs_dkdv = false, runs_dk = false, runs_dv = false, runs_dbias2 = false, runs_dq = false;
  int dq_stages = 1, dk_stages = 1, dv_stages = 1, dbias2_stages = 1;
  int64_t num_slices = 1;  // kernel_dbias2 cuts the rows n into so many slices
  DqAccumulatorPlan accumulators;
  int64_t padded_queries = 0, padded_keys = 0;  // whole tiles of the fused kernel

  // Copies of bias2. Where it is the same for all b or all heads, the copies have one slice of that dimension.
  bool copies_bias2 = false;            // a copy whose rows are aligned to 16 bytes
  bool transposes_bias2 = false;        // a copy whose rows are keys
  bool transpose_is_in_dbias2 = false;  // the transpose lies in the memory of dbias2 until dbias2 is written
  int64_t bias2_copies_b = 1, bias2_copies_h = 1, bias2_pitch = 0, bias2_t_pitch = 0, bias2_t_rows = 0;

  // Offsets in the workspace.
  int64_t key_mask = kNotReserved, softmax = kNotReserved, delta = kNotReserved, bias1 = kNotReserved;
  int64_t progress = kNotReserved, own_accumulators = kNotReserved, padded_dbias2 = kNotReserved;
  int64_t dbias1_parts = kNotReserved, bias2 = kNotReserved, bias2_t = kNotReserved, dbias2_parts = kNotReserved;
  int64_t postprocess_flag = kNotReserved;
  int64_t workspace_bytes = 0;

  void print(PlanText& text) const;
};

class Sm80BackwardPlanner {
 public:
  Sm80BackwardPlanner(const BwdParams& p, const DeviceFacts& device, const BackwardUnit& unit)
      : p_(p), device_(device), unit_(unit) {}

  Sm80BackwardPlan plan() {
    choose_kernels();
    choose_stages();
    const int64_t queries = p_.B * p_.N * p_.H * p_.Lq, keys = p_.B * p_.N * p_.H * p_.Lk;
    const KeyMaskLayout key_mask(p_);
    plan_.key_mask = layout_.reserve(key_mask.needed(), key_mask.bytes());
    plan_.softmax = layout_.reserve(unit_.is_exact, queries * 8);
    plan_.delta = layout_.reserve(!plan_.runs_fused, queries * (unit_.is_exact ? 8 : 4));
    plan_.bias1 = layout_.reserve(p_.bias1 && p_.bias1_stride[2] != 1, p_.B * p_.N * p_.Lk * unit_.element_bytes);
    if (plan_.runs_fused) plan_fused();
    plan_.dbias1_parts = layout_.reserve(p_.dbias1 && p_.deterministic, keys * 4);
    if (unit_.has_bias2) plan_bias2();
    plan_.postprocess_flag = layout_.reserve(true, 4);
    plan_.workspace_bytes = layout_.bytes();
    return plan_;
  }

 private:
  void choose_kernels() {
    plan_.runs_fused = can_fuse();
    if (plan_.runs_fused) return;
    const bool wants_dk = p_.dk || p_.dbias1;
    plan_.runs_dkdv = !unit_.splits_dkdv && (wants_dk || p_.dv);
    plan_.runs_dk = unit_.splits_dkdv && wants_dk;
    plan_.runs_dv = unit_.splits_dkdv && p_.dv;
    plan_.runs_dbias2 = p_.dbias2 != nullptr;
    plan_.runs_dq = p_.dq != nullptr;
  }

  // Whether the fused kernel runs: the order of additions is free, dq, dk and dv are all wanted, and as many warps are
  // resident on a multiprocessor as with the separate kernels.
  bool can_fuse() const {
    if (!unit_.has_fused || p_.deterministic || !p_.dq || !p_.dk || !p_.dv) return false;
    if (p_.dq_stride[2] >= int64_t(1) << 31) return false;  // DeltaInDq's stride is an int
    // Offsets within an accumulator and in a row of dbias2 are ints.
    if (std::max(p_.Lq, p_.Lk) >= int64_t(1) << 24) return false;
    const int shared = unit_.fused_shared_bytes;
    return shared <= device_.shared_bytes_per_block &&
           unit_.fused_blocks * (shared + kReservedSharedBytes) <= device_.shared_bytes_per_multiprocessor;
  }

  // Two stages where the device's shared memory suffices.
  void choose_stages() {
    auto stages = [&](int shared) { return unit_.max_stages == 2 && shared <= device_.shared_bytes_per_block ? 2 : 1; };
    plan_.dq_stages = stages(unit_.dq_shared_bytes), plan_.dk_stages = stages(unit_.dk_shared_bytes);
    plan_.dv_stages = stages(unit_.dv_shared_bytes), plan_.dbias2_stages = stages(unit_.dbias2_shared_bytes);
  }

  // Plans accumulators of dq, and memory for dbias2 in whole tiles.
  void plan_fused() {
    const int64_t key_blocks = ceil_div(p_.Lk, unit_.tiles.owned);
    plan_.padded_queries = ceil_div(p_.Lq, unit_.tiles.fused_streamed) * unit_.tiles.fused_streamed;
    plan_.padded_keys = key_blocks * unit_.tiles.owned;
    plan_.progress = layout_.reserve(true, (p_.B * p_.N * p_.H + 1) * 4);
    const int64_t resident_blocks = fused_resident_blocks(unit_.head_dim);
    plan_.accumulators = DqAccumulatorPlan::of(p_, unit_.element_bytes, plan_.padded_queries * unit_.head_dim * 4,
                                               key_blocks, device_.num_multiprocessors * resident_blocks,
                                               fused_side_by_side(unit_.head_dim), spare_accumulators(unit_.head_dim));
    plan_.own_accumulators = layout_.reserve(true, plan_.accumulators.num_own * plan_.accumulators.accumulator_bytes);
    const bool is_whole = plan_.padded_queries == p_.Lq && plan_.padded_keys == p_.Lk && is_on_16_bytes(p_.dbias2);
    plan_.padded_dbias2 =
        layout_.reserve(p_.dbias2 && !is_whole, p_.B * p_.H * plan_.padded_queries * plan_.padded_keys * 4);
  }

  void plan_bias2() {
    plan_.bias2_copies_b = p_.bias2_stride[0] == 0 ? 1 : p_.B;
    plan_.bias2_copies_h = p_.bias2_stride[1] == 0 ? 1 : p_.H;
    plan_.bias2_pitch = ceil_div(p_.Lk, unit_.vector()) * unit_.vector();
    // Tiles: whole ones of the fused kernel, and kTilesPastEnd.
    const int64_t whole = unit_.tiles_bias2 ? unit_.tiles.fused_streamed : unit_.vector();
    plan_.bias2_t_pitch = ceil_div(p_.Lq, whole) * whole;
    plan_.bias2_t_rows = unit_.tiles_bias2 ? ceil_div(p_.Lk, 32) * 32 : p_.Lk;
    const int64_t size = plan_.bias2_copies_b * plan_.bias2_copies_h * unit_.element_bytes;
    const int64_t transpose_bytes = size * plan_.bias2_t_rows * plan_.bias2_t_pitch +
                                    (unit_.tiles_bias2 ? kTilesPastEnd * 32 * 32 * unit_.element_bytes : 0);
    plan_.copies_bias2 = !bias2_is_aligned() && (p_.dq || p_.dbias2 || unit_.is_exact);
    plan_.bias2 = layout_.reserve(plan_.copies_bias2, size * p_.Lq * plan_.bias2_pitch);

    plan_.transposes_bias2 = (p_.dk || p_.dv || p_.dbias1) && !(plan_.runs_fused && unit_.fused_reads_bias2);
    // All kernels but the fused one write dbias2 after the transpose has been read.
    const bool is_free = p_.dbias2 && (!plan_.runs_fused || plan_.padded_dbias2 >= 0);
    plan_.transpose_is_in_dbias2 = plan_.transposes_bias2 && is_free && is_on_16_bytes(p_.dbias2) &&
                                   transpose_bytes <= p_.B * p_.H * p_.Lq * p_.Lk * 4;
    plan_.bias2_t = layout_.reserve(plan_.transposes_bias2 && !plan_.transpose_is_in_dbias2, transpose_bytes);

    if (plan_.runs_dbias2) {
      const BackwardTileSizes& tiles = unit_.tiles;
      const int64_t num_tiles =
          ceil_div(p_.Lq, tiles.dbias2_queries) * ceil_div(p_.Lk, tiles.dbias2_keys) * p_.B * p_.H;
      plan_.num_slices = choose_slices(p_.N, num_tiles, int64_t(device_.num_multiprocessors) * unit_.dbias2_blocks);
    }
    plan_.dbias2_parts =
        layout_.reserve(plan_.num_slices > 1 && p_.deterministic, plan_.num_slices * p_.B * p_.H * p_.Lq * p_.Lk * 4);
  }
  bool bias2_is_aligned() const {
    const int64_t vector = unit_.vector(), (&stride)[4] = p_.bias2_stride;
    return is_on_16_bytes(p_.bias2) && stride[3] == 1 && p_.Lk % vector == 0 && stride[0] % vector == 0 &&
           stride[1] % vector == 0 && stride[2] % vector == 0 &&
           stride[2] < int64_t(1) << 29;  // Bias2Stripe's offsets have 32 bits
  }
  static bool is_on_16_bytes(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

  const BwdParams& p_;
  const DeviceFacts& device_;
  const BackwardUnit& unit_;
  Sm80BackwardPlan plan_;
  WorkspaceLayout layout_;
};

inline Sm80BackwardPlan make_plan(const BwdParams& p, const DeviceFacts& device, const BackwardUnit& unit) {
  return Sm80BackwardPlanner(p, device, unit).plan();
}

inline void Sm80BackwardPlan::print(PlanText& text) const {
  auto kernel = [&](bool runs, const char* name, int num_stages) {
    if (runs) text.add(name, num_stages);
  };
  if (runs_fused) {
    text.add("fused", padded_queries, padded_keys);
    text.add("accumulators", accumulators.count());
    text.add("in_dkdv", accumulators.count() - accumulators.num_own);
    if (accumulators.num_groups > 1) {
      text.add("hosts", accumulators.num_groups - 1, accumulators.groups[1].first_row);
    }
  }
  kernel(runs_dkdv, "dkdv_stages", dk_stages), kernel(runs_dk, "dk_stages", dk_stages);
  kernel(runs_dv, "dv_stages", dv_stages), kernel(runs_dbias2, "dbias2_stages", dbias2_stages);
  if (runs_dbias2) text.add("slices", num_slices);
  kernel(runs_dq, "dq_stages", dq_stages);
  if (transpose_is_in_dbias2) text.add("bias2_t", "in_dbias2");
  text.add_offset("key_mask", key_mask), text.add_offset("softmax", softmax), text.add_offset("delta", delta);
  text.add_offset("bias1", bias1), text.add_offset("progress", progress);
  text.add_offset("own_accumulators", own_accumulators), text.add_offset("padded_dbias2", padded_dbias2);
  text.add_offset("dbias1_parts", dbias1_parts), text.add_offset("bias2", bias2), text.add_offset("bias2_t", bias2_t);
  text.add_offset("dbias2_parts", dbias2_parts), text.add_offset("postprocess_flag", postprocess_flag);
  text.add("workspace_bytes", workspace_bytes);
}

}  // namespace ds4s
