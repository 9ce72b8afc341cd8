// What one thread of the backward keeps between tiles.
#pragma once

#include <cstdint>

#include "../params.h"
#include "bias.h"
#include "parallel.h"

namespace ds4s::cpu {

// Keys are cut into at most this many chunks, the unit of work where groups are few. It depends on Lk alone, and the
// parts of dq are added in the order of the chunks, so results do not depend on the number of threads.
constexpr int kMaxChunks = 16;

template <typename E>
struct BackwardScratch {
  using Elem = typename E::Elem;

  Elem* queries;       // [Lq][channels]
  Elem* queries_t;     // [query blocks][channels][kQueries]; the same memory as queries where read by broadcast
  Elem* douts;         // [Lq][value_channels]: dO
  Elem* douts_t;       // as queries_t
  float* max;          // [Lq]
  float* log_sum;      // [Lq]
  float* delta;        // [Lq]
  Elem* keys_t;        // [channels][kKeys], right operand of Q K^T
  Elem* values_t;      // [value_channels][kKeys], right operand of dO V^T
  Elem* keys;          // [kKeys][channels], right operand of dS K
  float* bias1;        // [kKeys]
  float* scores;       // [kQueries][kKeys]
  float* dprobs;       // [kQueries][kKeys]
  Elem* probs_right;   // [kQueries][kKeys], and so the next two; scores and dprobs themselves where kInPlace
  Elem* dscores_right;
  Elem* dscores_left;
  float* dkeys_t;      // [channels][kKeys]
  float* dvalues_t;    // [value_channels][kKeys]
  float* row;          // [max(channels, value_channels)]
  float* dbias1;       // [kKeys] of a tile
  float* dbias1_sum;   // [kKeys] of all tiles
  float* gather;       // [kQueries][kKeys] for a bias2 whose columns are not contiguous
  float* dq;           // [Lq][channels]: chunk 0, then the sum of all
  float* dq_part;      // [Lq][channels]: one later chunk

  int channels;  // D and Dv padded
  int value_channels;
  int64_t padded_queries;
  int64_t bytes;

  // `own_dq`: the thread adds the chunks of dq itself.
  BackwardScratch(void* base, const BwdParams& p, bool own_dq, int64_t chunks) {
    constexpr int64_t kTile = int64_t(E::kQueries) * E::kKeys;
    Carver carver(base);
    channels = round_up(p.D, E::kChannelAlign);
    value_channels = round_up(p.Dv, E::kChannelAlign);
    padded_queries = round_up(p.Lq, E::kQueries);

    queries = carver.take<Elem>(padded_queries * channels);
    queries_t = E::kPacksTransposedLeft ? carver.take<Elem>(padded_queries * channels) : queries;
    douts = carver.take<Elem>(padded_queries * value_channels);
    douts_t = E::kPacksTransposedLeft ? carver.take<Elem>(padded_queries * value_channels) : douts;
    max = carver.take<float>(padded_queries);
    log_sum = carver.take<float>(padded_queries);
    delta = carver.take<float>(padded_queries);
    keys_t = carver.take<Elem>(int64_t(channels) * E::kKeys);
    values_t = carver.take<Elem>(int64_t(value_channels) * E::kKeys);
    keys = carver.take<Elem>(int64_t(channels) * E::kKeys);
    bias1 = carver.take<float>(E::kKeys);
    scores = carver.take<float>(kTile);
    dprobs = carver.take<float>(kTile);
    probs_right = E::kInPlace ? reinterpret_cast<Elem*>(scores) : carver.take<Elem>(kTile);
    dscores_right = E::kInPlace ? reinterpret_cast<Elem*>(dprobs) : carver.take<Elem>(kTile);
    dscores_left = E::kInPlace ? reinterpret_cast<Elem*>(dprobs) : carver.take<Elem>(kTile);
    dkeys_t = carver.take<float>(int64_t(channels) * E::kKeys);
    dvalues_t = carver.take<float>(int64_t(value_channels) * E::kKeys);
    row = carver.take<float>(channels > value_channels ? channels : value_channels);
    dbias1 = carver.take<float>(E::kKeys);
    dbias1_sum = carver.take<float>(E::kKeys);
    gather = carver.take<float>(gathers_bias2(p) ? kTile : 0);
    const bool wants_dq = own_dq && p.dq != nullptr;
    dq = carver.take<float>(wants_dq ? padded_queries * channels : 0);
    dq_part = carver.take<float>(wants_dq && chunks > 1 ? padded_queries * channels : 0);
    bytes = carver.bytes();
  }
};

}  // namespace ds4s::cpu
