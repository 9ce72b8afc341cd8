// Calls of few scores in float32, computed in double on one thread, in both directions: math.md (1) to (6), (9) to
// (16).
//
// Where scores are large (a standard deviation of 10), the rounding of a handful of them makes nearly all of the error.
// The error law, math.md (17), then compares one random draw of roundings with another, and no float32 kernel keeps it
// every time. Many scores average the roundings out; with few, exactness costs less than the call itself.
#pragma once

#include <cerrno>
#include <cmath>

#include "../params.h"
#include "key_tiles.h"
#include "parallel.h"
#include "tile_sizes.h"

namespace ds4s::cpu {

// (1, 1, 64, 1, 32) takes 60 us forward and 150 us with its backward. At four times as many scores float32 breaks the
// law once in several thousand calls with large scores.
constexpr double kFewScores = 4096;

template <typename scalar_t, typename Params>
inline bool has_few_scores(const Params& p) {
  return sizeof(scalar_t) == 4 && double(p.B) * double(p.N) * double(p.H) * double(p.Lq) * double(p.Lk) <= kFewScores;
}

// to += x row.
inline void add_multiple(double* __restrict to, double x, const float* __restrict row, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] += x * double(row[i]);
}

// The visible keys of one (b, n, h) and the weights P of a query.
template <typename Params>
class FewKeys {
 public:
  FewKeys(const Params& p, Carver& carver)
      : p_(p),
        bias1_(carver.take<float>(KeyTiles<kKeys>::most(p.Lk) * kKeys)),
        tile_(carver.take<KeyTile>(KeyTiles<kKeys>::most(p.Lk))),
        tiles_(bias1_, tile_),
        key_(carver.take<int64_t>(p.Lk)),
        shifted_(carver.take<double>(p.Lk)),
        keys_t_(carver.take<double>(p.Lk * p.D)),
        weights_(carver.take<double>(p.Lk)) {}

  static const float* at(const void* data, const int64_t* stride, int64_t b, int64_t n, int64_t l, int64_t h) {
    return static_cast<const float*>(data) + b * stride[0] + n * stride[1] + l * stride[2] + h * stride[3];
  }

  void find(int64_t b, int64_t n, int64_t h) {
    tiles_.find(p_, b_ = b, n_ = n);
    h_ = h;
    num_ = 0;
    for (int x = 0; x < tiles_.num(); ++x) {
      for (int j = 0; j < tiles_[x].count; ++j) {
        key_[num_] = tiles_[x].key + j;
        shifted_[num_++] = tiles_.bias1(x)[j];
      }
    }
    pack_transposed(keys_t_, p_.k, p_.k_stride, p_.D);
  }

  int64_t num() const { return num_; }
  int64_t key(int64_t j) const { return key_[j]; }
  const double* weights() const { return weights_; }
  const float* key_row(int64_t j) const { return at(p_.k, p_.k_stride, b_, n_, key_[j], h_); }
  const float* value_row(int64_t j) const { return at(p_.v, p_.v_stride, b_, n_, key_[j], h_); }
  const float* query_row(int64_t q) const { return at(p_.q, p_.q_stride, b_, n_, q, h_); }

  // to: [channels][num].
  void pack_transposed(double* to, const void* data, const int64_t* stride, int64_t channels) const {
    for (int64_t j = 0; j < num_; ++j) {
      const float* row = at(data, stride, b_, n_, key_[j], h_);
      for (int64_t d = 0; d < channels; ++d) to[d * num_ + j] = row[d];
    }
  }

  // to[j] = sum of row[d] matrix[d][j].
  void multiply(double* __restrict to, const float* row, const double* __restrict matrix, int64_t channels) const {
    const int64_t num = num_;
    for (int64_t j = 0; j < num; ++j) to[j] = 0.0;
    for (int64_t d = 0; d < channels; ++d) {
      const double x = row[d];
      for (int64_t j = 0; j < num; ++j) to[j] += x * matrix[d * num + j];
    }
  }

  // Computes P of one query, math.md (4), as weights() and returns its lse; where no key is visible, returns -inf and
  // leaves the weights.
  double find_weights(int64_t q) const {
    multiply(weights_, query_row(q), keys_t_, p_.D);
    double most = -double(kInfinity);
    bool unseen = true;
    for (int64_t j = 0; j < num_; ++j) {
      double& s = weights_[j];
      s = s * double(p_.scale) + shifted_[j];
      if (p_.bias2 != nullptr) s += load_element(p_.bias2, p_.bias2_dtype, bias2_index(q, key_[j]));
      most = s > most ? s : most;
      unseen &= s == -double(kInfinity);  // NaN is seen
    }
    if (unseen) return -double(kInfinity);
    double sum = 0.0;
    for (int64_t j = 0; j < num_; ++j) sum += weights_[j] = std::exp(weights_[j] - most);
    for (int64_t j = 0; j < num_; ++j) weights_[j] /= sum;
    return most + std::log(sum);
  }

  // Calls body(first, last) for every range of hidden keys.
  template <typename Body>
  void for_each_gap(const Body& body) const {
    tiles_.for_each_gap(p_.Lk, body);
  }

 private:
  static constexpr int kKeys = kBackwardKeys;  // of a tile; here tiles only say what is visible

  int64_t bias2_index(int64_t q, int64_t k) const {
    const int64_t* stride = p_.bias2_stride;
    return b_ * stride[0] + h_ * stride[1] + q * stride[2] + k * stride[3];
  }

  const Params& p_;
  float* const bias1_;
  KeyTile* const tile_;
  KeyTiles<kKeys> tiles_;
  int64_t* const key_;     // [num]
  double* const shifted_;  // [num], bias1 - shift
  double* const keys_t_;   // [D][num]
  double* const weights_;  // [num]
  int64_t num_ = 0;
  int64_t b_ = -1, n_ = -1, h_ = -1;
};

class FewScoresForward {
 public:
  FewScoresForward(const FwdParams& p, Carver& carver) : p_(p), keys_(p, carver), sums_(carver.take<double>(p.Dv)) {}

  void run() {
    for (int64_t b = 0; b < p_.B; ++b) {
      for (int64_t n = 0; n < p_.N; ++n) {
        for (int64_t h = 0; h < p_.H; ++h) {
          keys_.find(b, n, h);
          for (int64_t q = 0; q < p_.Lq; ++q) query(b, n, h, q);
        }
      }
    }
  }

 private:
  void query(int64_t b, int64_t n, int64_t h, int64_t q) {
    const double lse = keys_.find_weights(q);
    for (int64_t d = 0; d < p_.Dv; ++d) sums_[d] = 0.0;
    if (lse != -double(kInfinity)) {
      for (int64_t j = 0; j < keys_.num(); ++j) {
        add_multiple(sums_, keys_.weights()[j], keys_.value_row(j), p_.Dv);
      }
    }
    float* o = const_cast<float*>(keys_.at(p_.o, p_.o_stride, b, n, q, h));
    for (int64_t d = 0; d < p_.Dv; ++d) o[d] = float(sums_[d]);
    if (p_.lse != nullptr) p_.lse[((b * p_.N + n) * p_.H + h) * p_.Lq + q] = float(lse);
  }

  const FwdParams& p_;
  FewKeys<FwdParams> keys_;
  double* const sums_;
};

class FewScoresBackward {
 public:
  FewScoresBackward(const BwdParams& p, Carver& carver)
      : p_(p),
        keys_(p, carver),
        values_t_(carver.take<double>(p.Dv * p.Lk)),
        dscores_(carver.take<double>(p.Lk)),
        dq_(carver.take<double>(p.D)),
        dk_(carver.take<double>(p.Lk * p.D)),
        dv_(carver.take<double>(p.Lk * p.Dv)),
        dbias1_(carver.take<double>(p.dbias1 == nullptr ? 0 : p.N * p.Lk)),
        dbias2_(carver.take<double>(p.dbias2 == nullptr ? 0 : p.Lq * p.Lk)) {}

  void run() {
    for (int64_t b = 0; b < p_.B; ++b) {
      if (p_.dbias1 != nullptr) clear(dbias1_, p_.N * p_.Lk);
      for (int64_t h = 0; h < p_.H; ++h) {
        if (p_.dbias2 != nullptr) clear(dbias2_, p_.Lq * p_.Lk);
        for (int64_t n = 0; n < p_.N; ++n) head(b, n, h);
        if (p_.dbias2 != nullptr) store(p_.dbias2 + (b * p_.H + h) * p_.Lq * p_.Lk, dbias2_, p_.Lq * p_.Lk, 1.0);
      }
      if (p_.dbias1 != nullptr) store(p_.dbias1 + b * p_.N * p_.Lk, dbias1_, p_.N * p_.Lk, 1.0);
    }
  }

 private:
  static void clear(double* x, int64_t count) {
    for (int64_t i = 0; i < count; ++i) x[i] = 0.0;
  }
  static void store(float* to, const double* from, int64_t count, double factor) {
    for (int64_t i = 0; i < count; ++i) to[i] = float(from[i] * factor);
  }
  static float* at(void* data, const int64_t* stride, int64_t b, int64_t n, int64_t l, int64_t h) {
    return const_cast<float*>(FewKeys<BwdParams>::at(data, stride, b, n, l, h));
  }

  void head(int64_t b, int64_t n, int64_t h) {
    keys_.find(b, n, h);
    keys_.pack_transposed(values_t_, p_.v, p_.v_stride, p_.Dv);
    clear(dk_, keys_.num() * p_.D);
    clear(dv_, keys_.num() * p_.Dv);
    for (int64_t q = 0; q < p_.Lq; ++q) query(b, n, h, q);
    for (int64_t j = 0; j < keys_.num(); ++j) {
      const int64_t key = keys_.key(j);
      if (p_.dk != nullptr) store(at(p_.dk, p_.dk_stride, b, n, key, h), dk_ + j * p_.D, p_.D, p_.scale);
      if (p_.dv != nullptr) store(at(p_.dv, p_.dv_stride, b, n, key, h), dv_ + j * p_.Dv, p_.Dv, 1.0);
    }
    keys_.for_each_gap([&](int64_t first, int64_t last) {
      const int64_t count = last - first;
      if (p_.dk != nullptr) zero_rows(at(p_.dk, p_.dk_stride, b, n, first, h), p_.dk_stride[2], count, p_.D);
      if (p_.dv != nullptr) zero_rows(at(p_.dv, p_.dv_stride, b, n, first, h), p_.dv_stride[2], count, p_.Dv);
    });
  }

  void query(int64_t b, int64_t n, int64_t h, int64_t q) {
    clear(dq_, p_.D);
    if (keys_.find_weights(q) != -double(kInfinity)) differentiate(b, n, h, q);
    if (p_.dq != nullptr) store(at(p_.dq, p_.dq_stride, b, n, q, h), dq_, p_.D, p_.scale);
  }

  void differentiate(int64_t b, int64_t n, int64_t h, int64_t q) {
    const float* dout = keys_.at(p_.do_, p_.do_stride, b, n, q, h);
    const float* query = keys_.query_row(q);
    const double* weights = keys_.weights();
    keys_.multiply(dscores_, dout, values_t_, p_.Dv);
    double delta = 0.0;
    for (int64_t j = 0; j < keys_.num(); ++j) delta += weights[j] * dscores_[j];
    for (int64_t j = 0; j < keys_.num(); ++j) {
      const double ds = weights[j] * (dscores_[j] - delta);
      add_multiple(dq_, ds, keys_.key_row(j), p_.D);
      add_multiple(dk_ + j * p_.D, ds, query, p_.D);
      add_multiple(dv_ + j * p_.Dv, weights[j], dout, p_.Dv);
      if (p_.dbias1 != nullptr) dbias1_[n * p_.Lk + keys_.key(j)] += ds;
      if (p_.dbias2 != nullptr) dbias2_[q * p_.Lk + keys_.key(j)] += ds;
    }
  }

  const BwdParams& p_;
  FewKeys<BwdParams> keys_;
  double* const values_t_;  // [Dv][num]
  double* const dscores_;   // [num], dP and then dS
  double* const dq_;        // [D]
  double* const dk_;        // [num][D]
  double* const dv_;        // [num][Dv]
  double* const dbias1_;    // [N][Lk] of one b
  double* const dbias2_;    // [Lq][Lk] of one b and h
};

// FewScoresForward or FewScoresBackward.
template <typename Direction, typename Params>
int run_few_scores(const Params& p) {
  Carver size(nullptr);
  const Direction measured(p, size);
  const Memory memory(size.bytes());
  if (memory.data() == nullptr) return ENOMEM;
  Carver carver(memory.data());
  Direction(p, carver).run();
  return 0;
}

}  // namespace ds4s::cpu
