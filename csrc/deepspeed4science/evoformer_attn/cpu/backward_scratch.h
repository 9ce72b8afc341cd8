// The memory of one thread of the backward: packed keys, one block of queries with its strip of scores, sums.
#pragma once

#include <cstdint>

#include "../params.h"
#include "bias.h"
#include "key_tiles.h"
#include "parallel.h"

namespace ds4s::cpu {

// The part of the gradients of the keys of one (b, n, h) that comes from one chunk of queries. One array of floats, so
// that chunks are added by adding arrays.
struct KeySums {
  float* data;
  int64_t padded_keys;
  int channels;
  int value_channels;

  static int64_t count(int64_t padded_keys, int channels, int value_channels) {
    return padded_keys * (channels + value_channels + 1);
  }

  // `key`: tile * kKeys.
  float* dk_t(int64_t key) const { return data + key * channels; }  // [tiles][channels][kKeys]
  float* dv_t(int64_t key) const { return data + padded_keys * channels + key * value_channels; }      // likewise
  float* dbias1(int64_t key) const { return data + padded_keys * (channels + value_channels) + key; }  // [tiles][kKeys]
};

template <typename E>
struct BackwardScratch {
  using Elem = typename E::Elem;

  Elem* keys_t;    // [tiles][channels][kKeys], right operand of Q K^T
  Elem* values_t;  // [tiles][value_channels][kKeys], right operand of dO V^T
  Elem* keys;      // [tiles][kKeys][channels], right operand of dS K
  float* bias1;    // [tiles][kKeys]
  KeyTile* tiles;
  Elem* queries;      // [kQueries][channels]
  Elem* queries_t;    // [channels][kQueries]; the same memory as queries where read by broadcast
  Elem* douts;        // [kQueries][value_channels]: dO
  Elem* douts_t;      // as queries_t
  float* scores;      // [tiles][kQueries][kKeys]: the strip, scores and then p
  float* dprobs;      // [tiles][kQueries][kKeys]: dP
  Elem* probs_right;  // [kQueries][kKeys], and so the next two; where kInPlace, tiles of the strip instead
  Elem* dscores_right;
  Elem* dscores_left;
  float* dq;      // [kQueries][channels]
  float* gather;  // [kQueries][kKeys] for a bias2 whose columns are not contiguous
  KeySums sums;   // chunk 0, then all chunks
  KeySums part;   // one later chunk

  int channels;  // D and Dv padded
  int value_channels;
  int64_t padded_keys;
  int64_t bytes;

  // own_sums: the thread adds the chunks itself.
  BackwardScratch(void* base, const BwdParams& p, bool own_sums, int64_t chunks) {
    Carver carver(base);
    channels = round_up(p.D, E::kChannelAlign);
    value_channels = round_up(p.Dv, E::kChannelAlign);
    padded_keys = round_up(p.Lk, E::kKeys);
    const int64_t tile = int64_t(E::kQueries) * E::kKeys;
    const int64_t strip = int64_t(E::kQueries) * padded_keys;

    keys_t = carver.take<Elem>(padded_keys * channels);
    values_t = carver.take<Elem>(padded_keys * value_channels);
    keys = carver.take<Elem>(padded_keys * channels);
    bias1 = carver.take<float>(padded_keys);
    tiles = carver.take<KeyTile>(padded_keys / E::kKeys);
    queries = carver.take<Elem>(E::kQueries * channels);
    queries_t = E::kPacksTransposedLeft ? carver.take<Elem>(E::kQueries * channels) : queries;
    douts = carver.take<Elem>(E::kQueries * value_channels);
    douts_t = E::kPacksTransposedLeft ? carver.take<Elem>(E::kQueries * value_channels) : douts;
    scores = carver.take<float>(strip);
    dprobs = carver.take<float>(strip);
    probs_right = E::kInPlace ? nullptr : carver.take<Elem>(tile);
    dscores_right = E::kInPlace ? nullptr : carver.take<Elem>(tile);
    dscores_left = E::kInPlace ? nullptr : carver.take<Elem>(tile);
    dq = carver.take<float>(E::kQueries * channels);
    gather = carver.take<float>(gathers_bias2(p) ? tile : 0);
    const int64_t count = KeySums::count(padded_keys, channels, value_channels);
    sums = key_sums(carver.take<float>(own_sums ? count : 0));
    part = key_sums(carver.take<float>(own_sums && chunks > 1 ? count : 0));
    bytes = carver.bytes();
  }

  KeySums key_sums(float* data) const { return {data, padded_keys, channels, value_channels}; }
};

}  // namespace ds4s::cpu
