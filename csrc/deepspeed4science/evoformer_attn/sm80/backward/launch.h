// Host side of the backward: plans the workspace, picks stages and slices, starts the kernels of kernel_backward.h.
//
//   launch_backward<scalar_t, ArchTag, kHeadDim, kIsAligned, kTf32, kHasBias2>(params, stream)
//   backward_workspace_bytes<the same>(params)
//   backward_is_aligned<scalar_t>(params)      may kIsAligned be true?
#pragma once

#include <algorithm>

#include "common/backward_host.h"
#include "kernel_backward.h"

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

template <typename scalar_t, typename ArchTag, int kHeadDim, bool kIsAligned, bool kTf32, bool kHasBias2>
class Backward : BackwardHost {
  using Config = BackwardConfig<scalar_t, ArchTag, kHeadDim, kIsAligned, kTf32, kHasBias2>;
  using Bias = BiasPassConfig<Config>;
  using QueryValue = typename Config::QueryValue;
  static constexpr int64_t kVec = 16 / int64_t(sizeof(scalar_t));
  using Fused = FusedPassConfig<Config, /*kWantsDbias1=*/false>;

 public:
  explicit Backward(const BwdParams& params) : BackwardHost(params) { plan(); }

  int64_t workspace_bytes() const { return bytes_; }

  cudaError_t run(cudaStream_t stream) {
    if (p_.B * p_.N * p_.H == 0) return cudaSuccess;
    if ((p_.bias2 != nullptr) != kHasBias2 || (p_.dbias2 && !kHasBias2)) return cudaErrorInvalidValue;
    if (p_.D > kHeadDim || p_.Dv > kHeadDim || !fits_in_grid()) return cudaErrorInvalidValue;
    if (kIsAligned && !backward_is_aligned<scalar_t>(p_)) return cudaErrorMisalignedAddress;
    stream_ = stream;
    prepare();
    if (fuses_) {
      fused_pass();
    } else if (p_.dk || p_.dv || p_.dbias1) {
      if constexpr (Config::kSplitsKeys) {
        if (p_.dk || p_.dbias1) key_pass<Gradients::kDk>();
        if (p_.dv) row_pass<Gradients::kDv>();
      } else {
        key_pass<Gradients::kDkDv>();
      }
    }
    if constexpr (kHasBias2) {
      if (p_.dbias2 && !fuses_) bias_pass();
    }
    if (p_.dq && !fuses_) row_pass<Gradients::kDq>();
    return status_;
  }

 private:
  // dbias2 lends its memory, until the pass that writes it, to the transpose of bias2, which the keys' pass needs
  // before.
  void plan() {
    int64_t rows = p_.B * p_.N * p_.H * p_.Lq;
    KeyMaskBuffers<BwdParams> key_mask(p_);
    key_mask_ = reserve(key_mask.needed(), key_mask.bytes());
    softmax_ = reserve(Config::kExact, rows * int64_t(sizeof(float2)));
    if constexpr (Config::kCanFuse) fuses_ = can_fuse();
    delta_ = reserve(!fuses_, rows * int64_t(sizeof(QueryValue)));
    bias1_ = reserve(p_.bias1 && p_.bias1_stride[2] != 1, p_.B * p_.N * p_.Lk * int64_t(sizeof(scalar_t)));
    if (fuses_) plan_fused();
    dbias1_parts_ = reserve(p_.dbias1 && p_.deterministic, p_.B * p_.N * p_.H * p_.Lk * 4);
    if constexpr (kHasBias2) {
      // A dimension along which bias2 repeats is copied once.
      copies_b_ = p_.bias2_stride[0] == 0 ? 1 : p_.B;
      copies_h_ = p_.bias2_stride[1] == 0 ? 1 : p_.H;
      pitch_ = ceil_div(p_.Lk, kVec) * kVec, pitch_t_ = ceil_div(p_.Lq, kVec) * kVec;
      bool in_place = reinterpret_cast<uintptr_t>(p_.bias2) % 16 == 0 && p_.bias2_stride[3] == 1 && p_.Lk % kVec == 0 &&
                      p_.bias2_stride[0] % kVec == 0 && p_.bias2_stride[1] % kVec == 0 &&
                      p_.bias2_stride[2] % kVec == 0;
      int64_t size = copies_b_ * copies_h_ * int64_t(sizeof(scalar_t));
      bias2_ = reserve(!in_place && (p_.dq || p_.dbias2 || Config::kExact), size * p_.Lq * pitch_);
      bool transposes = (p_.dk || p_.dv || p_.dbias1) && !(fuses_ && Fused::kTransposesBias2);
      bool lends = !fuses_ || padded_dbias2_ >= 0;
      dbias2_holds_bias2_t_ = transposes && lends && p_.dbias2 && reinterpret_cast<uintptr_t>(p_.dbias2) % 16 == 0 &&
                              size * p_.Lk * pitch_t_ <= p_.B * p_.H * p_.Lq * p_.Lk * 4;
      bias2_t_ = reserve(transposes && !dbias2_holds_bias2_t_, size * p_.Lk * pitch_t_);
      if (p_.dbias2) {
        int64_t resident = int64_t(device_attribute(cudaDevAttrMultiProcessorCount)) * Bias::kMinBlocks;
        slices_ = choose_slices(ceil_div(p_.Lq, Bias::kRows) * ceil_div(p_.Lk, Bias::kCols) * p_.B * p_.H, resident);
      }
      dbias2_parts_ = reserve(slices_ > 1 && p_.deterministic, slices_ * p_.B * p_.H * p_.Lq * p_.Lk * 4);
    }
  }

  // Whether one pass may give all gradients: the order of additions is free, nothing is left out, and as many warps as
  // the passes have find room on a multiprocessor.
  bool can_fuse() const {
    if (p_.deterministic || !p_.dq || !p_.dk || !p_.dv) return false;
    if (p_.dq_stride[2] >= int64_t(1) << 31) return false;  // DeltaInDq
    int shared = RowPass<Fused>::shared_bytes(2);
    return shared <= device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) &&
           Fused::kMinBlocks * (shared + 1024) <= device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  }

  // Accumulators of dq for the pairs that are under way at a time, and kSideBySide more, twice that at D = 64, which is
  // not timed with fewer; dbias2 in whole tiles.
  void plan_fused() {
    int64_t key_blocks = ceil_div(p_.Lk, Fused::kRows);
    int64_t blocks = int64_t(device_attribute(cudaDevAttrMultiProcessorCount)) * Fused::kMinBlocks;
    int64_t pairs = p_.B * p_.N * p_.H;
    padded_queries_ = ceil_div(p_.Lq, Fused::kCols) * Fused::kCols, padded_keys_ = key_blocks * Fused::kRows;
    progress_ = reserve(true, (pairs + 1) * 4);
    int64_t more = (Fused::kTransposesBias2 ? 1 : 2) * kSideBySide;
    int64_t least = std::min(ceil_div(blocks, key_blocks) + more, pairs);
    // Where half of the keys are hidden twice as many pairs are under way.
    bool has_mask = p_.bias1 || p_.row_mask;
    int64_t wanted = has_mask ? std::min(ceil_div(blocks, ceil_div(key_blocks, 2)) + more, pairs) : least;
    plan_lending(pairs, least, wanted, (pairs * p_.Lq - pairs - 1) * 4 / accumulator_bytes());
    pool_ = reserve(true, num_own_ * accumulator_bytes());
    bool pads = padded_queries_ != p_.Lq || padded_keys_ != p_.Lk || reinterpret_cast<uintptr_t>(p_.dbias2) % 16 != 0;
    padded_dbias2_ = reserve(p_.dbias2 && pads, padded_dbias2_size() * 4);
  }
  // In the workspace where that takes no more than delta of the three passes. Else some lie in the last rows n of dk
  // and dv, where that makes few pairs late, and those have accumulators enough; or all are in the workspace.
  void plan_lending(int64_t pairs, int64_t least, int64_t wanted, int64_t fitting) {
    num_accumulators_ = num_own_ = std::min(wanted, std::max(least, fitting)), first_late_ = pairs;
    if (fitting >= least || fitting < kSideBySide) return;
    if (!is_dense(p_.dk_stride, p_.D) || !is_dense(p_.dv_stride, p_.Dv)) return;
    int64_t rows = p_.B * p_.N, first = (rows - 1) / kSideBySide * kSideBySide;
    auto in_rows_from = [&](int64_t row, int64_t row_stride) {
      return (rows - row) * row_stride * int64_t(sizeof(scalar_t)) / accumulator_bytes();
    };
    for (; first > 0 && 8 * (rows - first) <= rows; first -= kSideBySide) {
      int64_t in_dk = in_rows_from(first, p_.dk_stride[1]), in_dv = in_rows_from(first, p_.dv_stride[1]);
      int64_t all = std::min(wanted, fitting + in_dk + in_dv);
      if (all < least) continue;
      if (first * p_.H < all || 5 * fitting < 2 * all) return;
      num_own_ = fitting, num_accumulators_ = all, first_late_ = first * p_.H;
      num_in_dk_ = std::min(in_dk, all - fitting);
      in_dk_ = static_cast<float*>(p_.dk) + first * p_.dk_stride[1] * int64_t(sizeof(scalar_t)) / 4;
      in_dv_ = static_cast<float*>(p_.dv) + first * p_.dv_stride[1] * int64_t(sizeof(scalar_t)) / 4;
      return;
    }
  }
  // One row n after the other, with nothing between.
  bool is_dense(const int64_t (&s)[4], int64_t cols) const {
    bool rows = s[1] == p_.Lk * p_.H * cols && (p_.Lk - 1) * s[2] + (p_.H - 1) * s[3] + cols == s[1];
    return rows && (p_.B == 1 || s[0] == p_.N * s[1]);
  }
  int64_t accumulator_bytes() const { return padded_queries_ * kHeadDim * 4; }
  int64_t padded_dbias2_size() const { return p_.B * p_.H * padded_queries_ * padded_keys_; }

  static int device_attribute(cudaDeviceAttr attribute) {
    int device = 0, value = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&value, attribute, device);
    return value;
  }

  bool fits_in_grid() const {
    int64_t most = ceil_div(p_.Lq > p_.Lk ? p_.Lq : p_.Lk, 4) * p_.H * p_.B * p_.N;
    int64_t tiles = ceil_div(p_.Lq, 32) * ceil_div(p_.Lk, 32) * p_.B * p_.H * slices_;
    return most < (int64_t(1) << 31) && tiles < (int64_t(1) << 31);
  }

  // Two stages where the device's shared memory takes them.
  template <typename Pass>
  int stages() {
    if constexpr (Config::kMaxStages == 1) return 1;
    int device = 0, limit = 0;
    check(cudaGetDevice(&device));
    check(cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    return Pass::shared_bytes(2) <= limit ? 2 : 1;
  }

  void prepare() {
    args_ = arguments(bias1_, key_mask_);
    args_.softmax = at<float2>(softmax_);
    args_.negative_delta = at<const void>(delta_);
    args_.dbias1_parts = at<float>(dbias1_parts_);
    args_.dbias2_parts = at<float>(dbias2_parts_);
    args_.dbias2_slices = int32_t(slices_);
    int64_t batches = p_.B * p_.N;
    KeyMaskBuffers<BwdParams> key_mask(p_);
    check(key_mask.template fill<scalar_t>(at<void>(key_mask_), at<void>(bias1_), stream_));
    if constexpr (kHasBias2) {
      args_.bias2 = {p_.bias2, p_.bias2_stride[0], p_.bias2_stride[1], p_.bias2_stride[2]};
      if (bias2_ >= 0) args_.bias2 = copy(at<void>(bias2_), p_.Lq, pitch_);
      scalar_t* bias2_t = dbias2_holds_bias2_t_ ? reinterpret_cast<scalar_t*>(p_.dbias2) : at<scalar_t>(bias2_t_);
      args_.bias2_t = copy(bias2_t, p_.Lk, pitch_t_);
      if (bias2_ >= 0 || bias2_t) {
        int64_t tiles = ceil_div(p_.Lq, 32) * ceil_div(p_.Lk, 32) * copies_b_ * copies_h_;
        start(copy_bias2<scalar_t>, tiles, kPrepareThreads, 0, args_, copies_h_, at<scalar_t>(bias2_), pitch_, bias2_t,
              pitch_t_);
      }
    }
    if constexpr (Config::kExact) {
      int64_t blocks = ceil_div(p_.Lq, Config::kRows) * p_.H * batches;
      start(row_statistics<Config>, blocks, Config::kThreads, RowStatistics<Config>::kSharedBytes, args_,
            at<float2>(softmax_), at<float2>(delta_));
    } else {
      int64_t blocks = ceil_div(p_.Lq * p_.H, PrepareRows<Config>::kRowsPerBlock) * batches;
      start(prepare_rows<Config>, blocks, kPrepareThreads, 0, args_, at<float>(delta_));
    }
  }

  BiasMatrix copy(const void* ptr, int64_t rows, int64_t pitch) const {
    return {ptr, copies_b_ == 1 ? 0 : copies_h_ * rows * pitch, copies_h_ == 1 ? 0 : rows * pitch, pitch};
  }

  // dk, dv or both; with dbias1 where it is wanted.
  template <Gradients kWhat>
  void key_pass() {
    if (!p_.dbias1) return row_pass<kWhat>();
    if (dbias1_parts_ < 0) zero(p_.dbias1, p_.B * p_.N * p_.Lk);
    row_pass<kWhat, true>();
    if (dbias1_parts_ >= 0) sum(p_.dbias1, dbias1_parts_, p_.B * p_.N, p_.H, p_.Lk);
  }

  template <Gradients kWhat, bool kWantsDbias1 = false>
  void row_pass() {
    using PassConfig = RowPassConfig<Config, kWhat, kWantsDbias1>;
    using Pass = RowPass<PassConfig>;
    int64_t blocks = ceil_div(PassConfig::kKeyRows ? p_.Lk : p_.Lq, Config::kRows) * p_.H * p_.B * p_.N;
    int num_stages = stages<Pass>();
    start(backward_row_pass<PassConfig>, blocks, Config::kThreads, Pass::shared_bytes(num_stages), args_, num_stages);
  }

  // dq, dk, dv, dbias1 and dbias2.
  void fused_pass() {
    if constexpr (Config::kCanFuse) {
      float* dbias2 = padded_dbias2_ >= 0 ? at<float>(padded_dbias2_) : p_.dbias2;
      zero(at<float>(progress_), (pool_ - progress_ + num_own_ * accumulator_bytes()) / 4);
      if (in_dk_) zero(in_dk_, num_in_dk_ * accumulator_bytes() / 4);
      if (in_dv_) zero(in_dv_, (num_accumulators_ - num_own_ - num_in_dk_) * accumulator_bytes() / 4);
      if (p_.dbias1) zero(p_.dbias1, p_.B * p_.N * p_.Lk);
      if (dbias2) zero(dbias2, padded_dbias2_size());
      DqAccumulatorPool pool{at<float>(pool_),
                             in_dk_,
                             in_dv_,
                             at<int32_t>(progress_) + 1,
                             at<uint32_t>(progress_),
                             uint32_t(num_own_),
                             uint32_t(num_in_dk_),
                             uint32_t(num_accumulators_),
                             uint32_t(first_late_),
                             int32_t(padded_queries_),
                             int32_t(padded_keys_),
                             dbias2};
      if (p_.dbias1) {
        start_fused<FusedPassConfig<Config, /*kWantsDbias1=*/true>>(pool);
      } else {
        start_fused<Fused>(pool);
      }
      if (padded_dbias2_ >= 0) {
        int64_t blocks = p_.B * p_.H * p_.Lq;
        start(crop_rows, blocks < 4096 ? blocks : 4096, kPrepareThreads, 0, p_.dbias2, dbias2, p_.B * p_.H, p_.Lq,
              p_.Lk, padded_queries_, padded_keys_);
      }
    }
  }

  template <typename PassConfig>
  void start_fused(const DqAccumulatorPool& pool) {
    int64_t blocks = ceil_div(p_.Lk, PassConfig::kRows) * p_.H * p_.B * p_.N;
    start(backward_fused_pass<PassConfig>, blocks, PassConfig::kThreads, RowPass<PassConfig>::shared_bytes(2), args_,
          pool);
  }

  void bias_pass() {
    using Pass = BiasPass<Bias>;
    int64_t size = p_.B * p_.H * p_.Lq * p_.Lk;
    if (slices_ > 1 && dbias2_parts_ < 0) zero(p_.dbias2, size);
    int64_t blocks = ceil_div(p_.Lq, Bias::kRows) * ceil_div(p_.Lk, Bias::kCols) * p_.B * p_.H * slices_;
    int num_stages = stages<Pass>();
    start(backward_bias_pass<Bias>, blocks, Bias::kThreads, Pass::shared_bytes(num_stages), args_, num_stages);
    if (slices_ > 1 && dbias2_parts_ >= 0) sum(p_.dbias2, dbias2_parts_, 1, slices_, size);
  }

  BackwardArgs args_{};
  bool fuses_ = false;
  int64_t num_accumulators_ = 0, num_own_ = 0, num_in_dk_ = 0, first_late_ = 0, padded_queries_ = 0, padded_keys_ = 0;
  float *in_dk_ = nullptr, *in_dv_ = nullptr;
  int64_t pool_ = -1, progress_ = -1, padded_dbias2_ = -1;
  int64_t slices_ = 1;
  bool dbias2_holds_bias2_t_ = false;
  int64_t key_mask_ = -1, softmax_ = -1, delta_ = -1, bias1_ = -1, bias2_ = -1, bias2_t_ = -1, dbias1_parts_ = -1,
          dbias2_parts_ = -1;
  int64_t copies_b_ = 1, copies_h_ = 1, pitch_ = 0, pitch_t_ = 0;
};

template <typename scalar_t, typename ArchTag, int kHeadDim, bool kIsAligned, bool kTf32, bool kHasBias2>
cudaError_t launch_backward(const BwdParams& p, cudaStream_t stream) {
  return Backward<scalar_t, ArchTag, kHeadDim, kIsAligned, kTf32, kHasBias2>(p).run(stream);
}

template <typename scalar_t, typename ArchTag, int kHeadDim, bool kIsAligned, bool kTf32, bool kHasBias2>
int64_t backward_workspace_bytes(const BwdParams& p) {
  return Backward<scalar_t, ArchTag, kHeadDim, kIsAligned, kTf32, kHasBias2>(p).workspace_bytes();
}

}  // namespace ds4s
