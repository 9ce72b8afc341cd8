// How the work of a backward is divided: a function of the shape, the wanted outputs, the number of threads and, where
// keys are hidden, the cost of each row n.
#pragma once

#include <algorithm>

#include "../params.h"
#include "key_tiles.h"
#include "parallel.h"

namespace ds4s::cpu {

constexpr int kMaxChunks = 16;
// With more groups than this for each thread, the queue of groups balances unequal rows by itself.
constexpr int64_t kManyGroups = 16;

struct CpuBackwardPlan {
  int64_t groups;
  int64_t steps;  // number of rows n that a group iterates over
  int64_t chunk_queries;
  int64_t chunks;
  int threads;
  bool shared = false;                   // all threads divide each step among them
  const int32_t* row_costs = nullptr;    // [B, N] in keys; null: all rows cost the same
  const int32_t* batch_order = nullptr;  // [B] most expensive first; null: in order

  CpuBackwardPlan(const BwdParams& p, int queries_per_block) {
    steps = p.dbias2 != nullptr ? p.N : 1;
    groups = p.B * p.H * p.N / steps;
    const int64_t blocks = (p.Lq + queries_per_block - 1) / queries_per_block;
    chunk_queries = (blocks + kMaxChunks - 1) / kMaxChunks * queries_per_block;
    chunks = (p.Lq + chunk_queries - 1) / chunk_queries;

    const double flops = 4.0 * double(p.B * p.H * p.N) * double(p.Lq) * double(p.Lk) * double(p.D + p.Dv);
    threads = useful_threads(p.num_threads, flops, groups * chunks);
  }

  bool wants_row_costs(const BwdParams& p) const {
    return threads > 1 && groups < kManyGroups * threads && (p.bias1 != nullptr || p.row_mask != nullptr);
  }

  // costs: [B * N] and space for B more, or null.
  void share_out(const BwdParams& p, int32_t* costs) {
    if (costs != nullptr) {
      row_costs = costs;
      if (steps == p.N) batch_order = order_batches(p, costs + p.B * p.N);
    }
    // Threads share groups only where there are fewer than two groups for each, so that there are few sums of chunks.
    // The factor 1.1 stands for the cost of the barriers.
    if (threads > 1 && groups < 2 * threads) {
      const double share = double((groups * chunks + threads - 1) / threads) / double(groups * chunks);
      shared = share * 1.1 < longest_share(p);
    }
    if (!shared && threads > groups) threads = int(groups);
  }

 private:
  int64_t batch_cost(const BwdParams& p, int64_t b) const {
    int64_t cost = 0;
    for (int64_t n = 0; n < p.N; ++n) cost += row_costs[b * p.N + n];
    return cost;
  }

  const int32_t* order_batches(const BwdParams& p, int32_t* order) const {
    for (int64_t b = 0; b < p.B; ++b) order[b] = int32_t(b);
    std::sort(order, order + p.B, [&](int32_t x, int32_t y) {
      const int64_t cost_x = batch_cost(p, x), cost_y = batch_cost(p, y);
      return cost_x != cost_y ? cost_x > cost_y : x < y;
    });
    return order;
  }

  // The busiest thread's share of all work if each group belongs to one thread. There are fewer than two groups for
  // each thread, so no thread takes a third group.
  double longest_share(const BwdParams& p) const {
    if (batch_order == nullptr) return double((groups + threads - 1) / threads) / double(groups);
    auto cost = [&](int64_t group) { return group < groups ? batch_cost(p, batch_order[group / p.H]) : 0; };
    int64_t total = 0, most = 0;
    for (int64_t group = 0; group < groups; ++group) {
      total += cost(group);
      // The thread with the shortest first group takes the longest of the remaining groups.
      const int64_t second = groups > threads && group < threads ? cost(2 * int64_t(threads) - 1 - group) : 0;
      most = std::max(most, group < threads ? cost(group) + second : int64_t(0));
    }
    return double(most) / double(total);
  }
};

// Fills costs[b, n]: the number of keys in the tiles of the row n, plus kEmptyRow. Returns false without memory.
template <int kKeys>
bool find_row_costs(const BwdParams& p, int32_t* costs) {
  constexpr int32_t kEmptyRow = 8;
  const int64_t rows = p.B * p.N, tiles = KeyTiles<kKeys>::most(p.Lk);
  const int threads = useful_threads(p.num_threads, 8.0 * double(rows) * double(p.Lk), rows);
  Carver size(nullptr);
  size.take<float>(tiles * kKeys);
  size.take<KeyTile>(tiles);
  const Memory memory(size.bytes() * threads);
  if (memory.data() == nullptr) return false;
  in_parallel(threads, [&](int thread, int team) {
    Carver own(memory.data() + size.bytes() * thread);
    float* const bias1 = own.take<float>(tiles * kKeys);
    KeyTiles<kKeys> keys(bias1, own.take<KeyTile>(tiles));
    for (int64_t row = rows * thread / team; row < rows * (thread + 1) / team; ++row) {
      keys.find(p, row / p.N, row % p.N);
      costs[row] = kEmptyRow;
      for (int tile = 0; tile < keys.num(); ++tile) costs[row] += keys[tile].count;
    }
  });
  return true;
}

}  // namespace ds4s::cpu
