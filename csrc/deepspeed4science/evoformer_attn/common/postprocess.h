// The last kernel of a backward. It repairs gradients of queries whose weights are exactly 0 or 1 (docs/math.md,
// "Queries without a visible key" and "Queries that see one key"), which the kernels before it compute like all others:
//
//   - A query whose keys are all hidden, by bias2 or by both biases together, has P = 0. Its gradients are products
//     with P, and 0 times NaN is NaN: a NaN in V or dO reaches dk, dv and both bias gradients. Those that are NaN are
//     computed again without such queries, whose dq becomes 0.
//   - A query that sees a single key has P = 1 and dS = 0, but the difference dP - delta keeps a rounding error. In
//     rows n in which bias1 leaves one key visible, dq, dk and dbias1 become 0, and dbias2 of that key is computed
//     again without these rows n.
//
// The kernels before it raise a flag where they find either. Without the flag nothing is repaired. With it, this kernel
// is slow: it computes in float32, with a group of lanes for each score and sums in a fixed order (BiasSum).
//
// After the repair, rows of dbias2 are made to add up to 0 (common/dbias2_rows.h), and bias gradients that are wanted
// in the type of q are rounded. Where there is nothing to repair, an earlier kernel may have made them add up to 0.
#pragma once

#include "common/backward_args.h"
#include "common/dbias2_rows.h"

namespace ds4s {

struct PostprocessArgs {
  BwdParams p;
  const float* shift;       // [B, N], math.md (1a), or null
  const int32_t* only_key;  // [B, N], the single visible key; -1 where there are several or none; or null
  // Float32 only: [B, N, H, Lq] in place of lse and delta (sm80/backward/statistics.h).
  const float2* softmax;
  const float2* negative_delta;
  PostprocessFlag flag;
  int64_t dbias2_stride;  // from one row of p.dbias2 to the next
  bool dbias2_adds_up;    // each row to 0, before anything is repaired
};

// kPostprocessBlocks on each multiprocessor, resident at once, so that the loads of 12 warps are in flight. Above D =
// 32 their 168 registers are too few for a repair, which spills up to 80 bytes; without a repair nothing is spilled.
constexpr int kPostprocessThreads = 128, kPostprocessBlocks = 3;

template <typename scalar_t, int kHeadDim>
class Postprocess {
 public:
  CUTLASS_DEVICE explicit Postprocess(const PostprocessArgs& args)
      : args_(args),
        p_(args.p),
        lane_(int(threadIdx.x) % 32),
        sublane_(int(threadIdx.x) % kLanes),
        of_group_(int(threadIdx.x) % 32 / kLanes) {}

  CUTLASS_DEVICE void run() const {
    const int64_t warp = int64_t(blockIdx.x) * (kPostprocessThreads / 32) + threadIdx.x / 32;
    const int64_t num_warps = int64_t(gridDim.x) * (kPostprocessThreads / 32);
    const int64_t groups = (p_.Lk + kKeys - 1) / kKeys;
    for (int64_t x = warp; x < p_.B * p_.N * groups; x += num_warps) {
      const int64_t bn = x / groups, key0 = x % groups * kKeys, end = key0 + kKeys < p_.Lk ? key0 + kKeys : p_.Lk;
      repair_keys(bn, key0);
      __syncwarp();
      round(p_.rounded_dbias1, p_.dbias1, bn * p_.Lk + key0 + lane_, bn * p_.Lk + end, /*step=*/32);
    }
    for (int64_t x = warp; p_.dq && x < p_.B * p_.N * p_.Lq; x += num_warps) repair_dq(x / p_.Lq, x % p_.Lq);
    const bool has_dbias2 = p_.dbias2 != nullptr || p_.rounded_dbias2 != nullptr;
    for (int64_t x = warp; has_dbias2 && x < p_.B * p_.H * p_.Lq; x += num_warps) {
      repair_dbias2(x / (p_.H * p_.Lq), x / p_.Lq % p_.H, x % p_.Lq);
      __syncwarp();
      Dbias2Rows<scalar_t>(p_, args_.dbias2_stride).finish(x);
    }
  }

  // Computes dq of a query again, by a warp. is_small: also if dq is finite. A dO that is not finite makes dq so, too.
  CUTLASS_DEVICE void recompute_dq(int64_t bn, int64_t h, int64_t q, bool is_small) const {
    const int64_t b = bn / p_.N, n = bn % p_.N;
    if (is_hidden(bn, h, q) || (is_small && only_key(bn) >= 0)) return;
    scalar_t* row = element<scalar_t>(p_.dq, p_.dq_stride, b, n, q, h);
    if (!is_small && is_finite(load(row, p_.D))) return;
    if (!is_finite(load(element<const scalar_t>(p_.do_, p_.do_stride, b, n, q, h), p_.Dv))) return;
    Channels sum;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int64_t key0 = 0; key0 < p_.Lk; key0 += kKeys) {
      const int64_t key = key0 + of_group_;
      const int64_t existing = key < p_.Lk ? key : p_.Lk - 1;
      const float ds = score(b, n, h, q, existing).ds;
      if (key < p_.Lk && ds != 0.f) sum.add(ds, load(element<const scalar_t>(p_.k, p_.k_stride, b, n, key, h), p_.D));
    }
    CUTLASS_PRAGMA_UNROLL
    for (int c = 0; c < kPerLane; ++c) {
      CUTLASS_PRAGMA_UNROLL
      for (int mask = kLanes; mask < 32; mask *= 2) sum.x[c] += ptx::shfl_xor(sum.x[c], mask);
    }
    if (of_group_ == 0) store(row, p_.D, sum, p_.scale);
  }

  // Where there is nothing to repair: finishes all bias gradients.
  CUTLASS_DEVICE static void finish_all(const PostprocessArgs& args) {
    const BwdParams& p = args.p;
    const int64_t thread = int64_t(blockIdx.x) * kPostprocessThreads + threadIdx.x;
    const int64_t num_threads = int64_t(gridDim.x) * kPostprocessThreads;
    const Dbias2Rows<scalar_t> rows(p, args.dbias2_stride, args.dbias2_adds_up);
    for (int64_t x = thread / 32; p.dbias2 && x < p.B * p.H * p.Lq; x += num_threads / 32) rows.finish(x);
    round(p.rounded_dbias1, p.dbias1, thread, p.B * p.N * p.Lk, num_threads);
  }

 private:
  // Rounds the elements first, first + step, ... below end. Does nothing if `rounded` is null (not wanted).
  CUTLASS_DEVICE static void round(void* rounded, const float* sums, int64_t first, int64_t end, int64_t step) {
    if (rounded == nullptr) return;
    constexpr int kAtOnce = 8;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int64_t x = first; x < end; x += kAtOnce * step) {
      float sum[kAtOnce];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        if (x + i * step < end) sum[i] = ptx::load_written(sums + x + i * step);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        if (x + i * step < end) static_cast<scalar_t*>(rounded)[x + i * step] = scalar_t(sum[i]);
      }
    }
  }

  static constexpr int kLanes = kHeadDim <= 64 ? 8 : kHeadDim <= 128 ? 16 : 32;  // lanes of a key, 8 channels each
  static constexpr int kKeys = 32 / kLanes;                                      // keys of a warp
  static constexpr int kPerLane = kHeadDim / kLanes;
  static constexpr bool kExact = sizeof(scalar_t) == 4;
  // One sum in float32 over hundreds of rows n or queries would round more than the error law allows in float32.
  using BiasSum = typename cutlass::platform::conditional<kExact, double, float>::type;

  // This lane's channels of a query or key: sublane, sublane + kLanes, ...
  struct Channels {
    float x[kPerLane] = {};

    CUTLASS_DEVICE void add(float factor, const Channels& other) {
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < kPerLane; ++c) x[c] = fmaf(factor, other.x[c], x[c]);
    }
    CUTLASS_DEVICE float dot(const Channels& other) const {
      float sum = 0.f;
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < kPerLane; ++c) sum = fmaf(x[c], other.x[c], sum);
      CUTLASS_PRAGMA_UNROLL
      for (int mask = kLanes / 2; mask > 0; mask /= 2) sum += ptx::shfl_xor(sum, mask);
      return sum;
    }
  };
  CUTLASS_DEVICE Channels load(const scalar_t* row, int64_t count) const {
    Channels channels;
    CUTLASS_PRAGMA_UNROLL
    for (int c = 0; c < kPerLane; ++c) {
      if (sublane_ + c * kLanes < count) channels.x[c] = float(row[sublane_ + c * kLanes]);
    }
    return channels;
  }
  CUTLASS_DEVICE void store(scalar_t* row, int64_t count, const Channels& channels, float factor) const {
    CUTLASS_PRAGMA_UNROLL
    for (int c = 0; c < kPerLane; ++c) {
      if (sublane_ + c * kLanes < count) row[sublane_ + c * kLanes] = scalar_t(channels.x[c] * factor);
    }
  }

  CUTLASS_DEVICE int64_t index(int64_t bn, int64_t h, int64_t q) const { return (bn * p_.H + h) * p_.Lq + q; }
  CUTLASS_DEVICE bool is_hidden(int64_t bn, int64_t h, int64_t q) const {
    return p_.lse[index(bn, h, q)] == -infinity();
  }
  CUTLASS_DEVICE int only_key(int64_t bn) const { return args_.only_key == nullptr ? -1 : args_.only_key[bn]; }

  // P and dS of a score, with Q and dO of its query. dS of a single visible key is 0, or NaN if dP - delta is not
  // finite.
  struct Score {
    float p, ds;
    Channels q, do_;
  };
  CUTLASS_DEVICE Score score(int64_t b, int64_t n, int64_t h, int64_t q, int64_t key) const {
    const int64_t bn = b * p_.N + n;
    Score of{};
    of.q = load(element<const scalar_t>(p_.q, p_.q_stride, b, n, q, h), p_.D);
    of.do_ = load(element<const scalar_t>(p_.do_, p_.do_stride, b, n, q, h), p_.Dv);
    Channels values = load(element<const scalar_t>(p_.v, p_.v_stride, b, n, key, h), p_.Dv);
    float s = p_.scale * of.q.dot(load(element<const scalar_t>(p_.k, p_.k_stride, b, n, key, h), p_.D));
    bool is_visible = true;
    if (p_.bias1) {
      const int64_t at = b * p_.bias1_stride[0] + n * p_.bias1_stride[1] + key * p_.bias1_stride[2];
      const float bias1 = float(static_cast<const scalar_t*>(p_.bias1)[at]), shift = args_.shift[bn];
      s += bias1 - shift, is_visible = MaskRule<scalar_t>::is_visible(bias1, shift);
    }
    if (p_.bias2) s += float(*element<const scalar_t>(p_.bias2, p_.bias2_stride, b, h, q, key));
    if (kExact && args_.softmax != nullptr) {
      const float2 softmax = args_.softmax[index(bn, h, q)], delta = args_.negative_delta[index(bn, h, q)];
      of.p = expf(s + softmax.x) * softmax.y;
      of.ds = of.p * ((of.do_.dot(values) + delta.x) + delta.y);
    } else {
      const float lse = p_.lse[index(bn, h, q)];
      of.p = lse < -kLargestLse ? 0.f : expf(s - lse);
      values.add(-1.f, load(element<const scalar_t>(p_.o, p_.o_stride, b, n, q, h), p_.Dv));
      of.ds = of.p * of.do_.dot(values);  // dP - delta = dO (V - O)
    }
    if (only_key(bn) >= 0) of.ds *= 0.f;
    if (!is_visible) of.p = of.ds = 0.f;  // whatever K and V hold
    return of;
  }

  // Repairs dk, dv and dbias1 of a warp's keys, from key0 on.
  CUTLASS_DEVICE void repair_keys(int64_t bn, int64_t key0) const {
    const int64_t b = bn / p_.N, n = bn % p_.N;
    const bool exists = key0 + of_group_ < p_.Lk;
    const int64_t key = exists ? key0 + of_group_ : p_.Lk - 1;
    auto dk = [&](int64_t h) { return element<scalar_t>(p_.dk, p_.dk_stride, b, n, key, h); };
    auto dv = [&](int64_t h) { return element<scalar_t>(p_.dv, p_.dv_stride, b, n, key, h); };
    const bool sees_one = only_key(bn) >= 0;
    float* dbias1 = p_.dbias1 ? p_.dbias1 + bn * p_.Lk + key : nullptr;
    bool is_nan = dbias1 && isnan(*dbias1), hides = false;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int64_t h = 0; h < p_.H; ++h) {
      if (p_.dk) {
        const Channels x = load(dk(h), p_.D);
        is_nan |= has_nan(x);
        if (sees_one && exists) store(dk(h), p_.D, x, 0.f);
      }
      if (p_.dv) is_nan |= has_nan(load(dv(h), p_.Dv));
    }
    __syncwarp();
    if (sees_one && exists && dbias1 && sublane_ == 0) *dbias1 *= 0.f;
    if (!ptx::any(is_nan)) return;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int64_t x = lane_; x < p_.H * p_.Lq; x += 32) hides |= is_hidden(bn, x / p_.Lq, x % p_.Lq);
    if (!ptx::any(hides)) return;

    BiasSum sum = 0;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int64_t h = 0; h < p_.H; ++h) {
      Channels sum_dk, sum_dv;
      CUTLASS_PRAGMA_NO_UNROLL
      for (int64_t q = 0; q < p_.Lq; ++q) {
        if (is_hidden(bn, h, q)) continue;
        const Score x = score(b, n, h, q, key);
        sum_dk.add(x.ds, x.q), sum_dv.add(x.p, x.do_), sum += x.ds;
      }
      if (p_.dk && exists) store(dk(h), p_.D, sum_dk, p_.scale);
      if (p_.dv && exists) store(dv(h), p_.Dv, sum_dv, 1.f);
    }
    if (dbias1 && exists && sublane_ == 0) *dbias1 = float(sum);
  }
  CUTLASS_DEVICE bool is_finite(const Channels& channels) const {
    bool all = true;
    CUTLASS_PRAGMA_UNROLL
    for (int c = 0; c < kPerLane; ++c) all &= fabsf(channels.x[c]) < infinity();
    return !ptx::any(!all);
  }
  CUTLASS_DEVICE static bool has_nan(const Channels& channels) {
    bool found = false;
    CUTLASS_PRAGMA_UNROLL
    for (int c = 0; c < kPerLane; ++c) found |= isnan(channels.x[c]);
    return found;
  }

  // Repairs dq of a query, in all heads.
  CUTLASS_DEVICE void repair_dq(int64_t bn, int64_t q) const {
    CUTLASS_PRAGMA_NO_UNROLL
    for (int64_t h = of_group_; h < p_.H; h += kKeys) {
      scalar_t* row = element<scalar_t>(p_.dq, p_.dq_stride, bn / p_.N, bn % p_.N, q, h);
      if (is_hidden(bn, h, q)) {
        store(row, p_.D, Channels(), 0.f);
      } else if (only_key(bn) >= 0) {
        store(row, p_.D, load(row, p_.D), 0.f);
      }
    }
  }

  // Repairs dbias2 of a query and all keys.
  CUTLASS_DEVICE void repair_dbias2(int64_t b, int64_t h, int64_t q) const {
    bool hides = false, sees_one = false;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int64_t n = lane_; n < p_.N; n += 32) {
      hides |= is_hidden(b * p_.N + n, h, q), sees_one |= only_key(b * p_.N + n) >= 0;
    }
    hides = ptx::any(hides), sees_one = ptx::any(sees_one);
    if (!hides && !sees_one) return;
    scalar_t* const rounded = p_.dbias2 == nullptr ? static_cast<scalar_t*>(p_.rounded_dbias2) : nullptr;
    const int64_t row = ((b * p_.H + h) * p_.Lq + q) * (rounded ? p_.Lk : args_.dbias2_stride);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int64_t key0 = 0; key0 < p_.Lk; key0 += 32) {
      const int64_t key = key0 + lane_;
      bool wrong = hides && key < p_.Lk && isnan(rounded ? float(rounded[row + key]) : p_.dbias2[row + key]);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int64_t n = 0; sees_one && n < p_.N; ++n) wrong |= only_key(b * p_.N + n) == key;
      uint32_t left = __ballot_sync(0xffffffffu, wrong);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int first = 0; left != 0; first += kKeys, left >>= kKeys) {
        if (left % (1 << kKeys) == 0) continue;
        const int64_t mine = key0 + first + of_group_;
        BiasSum sum = 0;
        CUTLASS_PRAGMA_NO_UNROLL
        for (int64_t n = 0; n < p_.N; ++n) {
          if (!is_hidden(b * p_.N + n, h, q)) sum += score(b, n, h, q, mine < p_.Lk ? mine : p_.Lk - 1).ds;
        }
        if ((left >> of_group_ & 1) == 0 || sublane_ != 0) continue;
        if (rounded) {
          rounded[row + mine] = scalar_t(sum);
        } else {
          p_.dbias2[row + mine] = float(sum);
        }
      }
    }
  }

  const PostprocessArgs& args_;
  const BwdParams& p_;
  const int lane_, sublane_, of_group_;
};

template <typename scalar_t, int kHeadDim>
__global__ void __launch_bounds__(kPostprocessThreads, kPostprocessBlocks)
    postprocess(const __grid_constant__ PostprocessArgs args) {
  ptx::wait_for_kernel_before();
  using Kernel = Postprocess<scalar_t, kHeadDim>;
  args.flag.is_raised() ? Kernel(args).run() : Kernel::finish_all(args);
}

}  // namespace ds4s
