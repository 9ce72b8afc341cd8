// dS = P (dP - delta) with P recomputed; dq = scale dS K, dk = scale dS^T Q, dv = P^T dO, dbias1 = sum over h and q
// of dS, dbias2 = sum over n of dS. Only what has an output pointer is computed.
//
// A group is (b, h), walking over n, where dbias2 is wanted: its sum over n is then one thread's at a time, in order.
// Otherwise a group is (b, n, h). Many groups: one thread each. Few: all threads walk together and share out
// (group, chunk of queries); after each step they add up the sums over queries: dk, dv and dbias1. Chunks depend on
// Lq alone and are added in their order, so both ways give the same bits.
// Scratch per thread: K, V packed and dk, dv twice, 4 Lk (4 D + 3 Dv) bytes, and 2 kQueries Lk scores; the shared walk
// keeps sums for each chunk of its groups.
#pragma once

#include <cerrno>

#include "../params.h"
#include "backward_scratch.h"
#include "backward_worker.h"
#include "engine.h"
#include "parallel.h"

namespace ds4s::cpu {

constexpr int kMaxChunks = 16;

// How the work is cut; a function of the shape, the wanted outputs and the number of threads.
struct BackwardPlan {
  int64_t groups;
  int64_t steps;         // values of n a group walks over
  int64_t chunk_queries;
  int64_t chunks;
  int threads;
  bool shared;  // all threads walk together

  BackwardPlan(const BwdParams& p, int queries_per_block) {
    steps = p.dbias2 != nullptr ? p.N : 1;
    groups = p.B * p.H * p.N / steps;
    const int64_t blocks = (p.Lq + queries_per_block - 1) / queries_per_block;
    chunk_queries = (blocks + kMaxChunks - 1) / kMaxChunks * queries_per_block;
    chunks = (p.Lq + chunk_queries - 1) / chunk_queries;

    const double flops = 4.0 * double(p.B * p.H * p.N) * double(p.Lq) * double(p.Lk) * double(p.D + p.Dv);
    threads = useful_threads(p.num_threads, flops, groups * chunks);
    const double alone = double((groups + threads - 1) / threads);
    const double together = double((groups * chunks + threads - 1) / threads) / double(chunks);
    // Below twice the threads, so that the sums of the chunks stay few; a tenth is what waiting for each other costs.
    shared = threads > 1 && groups < 2 * threads && together * 1.1 < alone;
    if (!shared && threads > groups) threads = int(groups);
  }
};

template <typename scalar_t, typename E>
class Backward {
 public:
  Backward(const BwdParams& p, const BackwardPlan& plan, float* dbias1_parts, float* chunk_sums,
           float* dbias2_runs)
      : p_(p),
        plan_(plan),
        dbias1_parts_(dbias1_parts),
        chunk_sums_(chunk_sums),
        dbias2_runs_(dbias2_runs),
        queue_(plan.groups, plan.threads),
        sums_keys_(p.dk != nullptr || p.dv != nullptr || p.dbias1 != nullptr) {}

  void run(int thread, int team, const BackwardScratch<E>& scratch) {
    [[maybe_unused]] typename E::Session session;
    BackwardWorker<scalar_t, E> worker(p_, scratch, dbias2_runs_);
    if (plan_.shared) {
      walk_together(worker, thread, team, scratch);
    } else {
      walk_alone(worker, scratch);
    }
    if (p_.dbias1 != nullptr && dbias1_parts_ != p_.dbias1) {
      barrier(team);
      add_dbias1(thread, team);
    }
  }

 private:
  struct Place {
    int64_t b, n, h;
  };

  // Groups have n innermost where they are not walks over n: neighbours share bias2[b, h].
  Place place(int64_t group, int64_t step) const {
    const int64_t rows = p_.N / plan_.steps;
    const int64_t head = group / rows;
    return {head / p_.H, group % rows + step, head % p_.H};
  }

  int64_t first_query(int64_t chunk) const {
    const int64_t q = chunk * plan_.chunk_queries;
    return q < p_.Lq ? q : p_.Lq;
  }

  // [Lk] of one (b, n, h) of the parts of dbias1.
  float* dbias1_part(const Place& at) const {
    return dbias1_parts_ == nullptr ? nullptr : dbias1_parts_ + ((at.b * p_.N + at.n) * p_.H + at.h) * p_.Lk;
  }

  void walk_alone(BackwardWorker<scalar_t, E>& worker, const BackwardScratch<E>& scratch) {
    for (int64_t first, last; queue_.take(first, last);) {
      for (int64_t group = first; group < last; ++group) {
        for (int64_t step = 0; step < plan_.steps; ++step) {
          const Place at = place(group, step);
          for (int64_t c = 0; c < plan_.chunks; ++c) {
            worker.run(at.b, at.n, at.h, first_query(c), first_query(c + 1), c == 0 ? scratch.sums : scratch.part);
            if (c > 0 && sums_keys_) add(scratch.sums.data, scratch.part.data, sums_count(scratch));
          }
          for (int64_t key = 0; sums_keys_ && key < p_.Lk; key += E::kKeys) {
            worker.store_keys(at.b, at.n, at.h, key, scratch.sums, dbias1_part(at));
          }
        }
      }
    }
  }

  void walk_together(BackwardWorker<scalar_t, E>& worker, int thread, int team, const BackwardScratch<E>& scratch) {
    const int64_t size = sums_count(scratch);
    const int64_t items = plan_.groups * plan_.chunks;
    for (int64_t step = 0; step < plan_.steps; ++step) {
      // The same thread has the same items in every step, so dbias2 needs no barrier.
      for (int64_t item = items * thread / team; item < items * (thread + 1) / team; ++item) {
        const Place at = place(item / plan_.chunks, step);
        const int64_t c = item % plan_.chunks;
        worker.run(at.b, at.n, at.h, first_query(c), first_query(c + 1), scratch.key_sums(chunk_sums_ + item * size));
      }
      if (!sums_keys_) continue;
      barrier(team);
      for (int64_t group = 0; group < plan_.groups; ++group) {
        float* const sums = chunk_sums_ + group * plan_.chunks * size;
        add_chunks(worker, place(group, step), scratch.key_sums(sums), thread, team);
      }
      barrier(team);
    }
  }

  // This thread's key blocks of one group: the sums of all chunks into the first, and out.
  void add_chunks(BackwardWorker<scalar_t, E>& worker, const Place& at, const KeySums& sums, int thread, int team) {
    const int64_t size = KeySums::count(sums.padded_keys, sums.channels, sums.value_channels);
    const int64_t blocks = sums.padded_keys / E::kKeys;
    for (int64_t x = blocks * thread / team; x < blocks * (thread + 1) / team; ++x) {
      const int64_t key = x * E::kKeys;
      for (int64_t c = 1; c < plan_.chunks; ++c) {
        if (p_.dk != nullptr) add(sums.dk_t(key), sums.dk_t(key) + c * size, int64_t(E::kKeys) * sums.channels);
        if (p_.dv != nullptr) add(sums.dv_t(key), sums.dv_t(key) + c * size, int64_t(E::kKeys) * sums.value_channels);
        if (p_.dbias1 != nullptr) add(sums.dbias1(key), sums.dbias1(key) + c * size, E::kKeys);
      }
      worker.store_keys(at.b, at.n, at.h, key, sums, dbias1_part(at));
    }
  }

  static int64_t sums_count(const BackwardScratch<E>& scratch) {
    return KeySums::count(scratch.padded_keys, scratch.channels, scratch.value_channels);
  }

  static void add(float* to, const float* from, int64_t count) {
    for (int64_t i = 0; i < count; ++i) to[i] += from[i];
  }

  void add_dbias1(int thread, int team) {
    const int64_t rows = p_.B * p_.N;
    for (int64_t row = rows * thread / team; row < rows * (thread + 1) / team; ++row) {
      const float* parts = dbias1_parts_ + row * p_.H * p_.Lk;
      float* to = p_.dbias1 + row * p_.Lk;
      for (int64_t k = 0; k < p_.Lk; ++k) to[k] = parts[k];
      for (int64_t h = 1; h < p_.H; ++h) add(to, parts + h * p_.Lk, p_.Lk);
    }
  }

  const BwdParams& p_;
  const BackwardPlan& plan_;
  float* const dbias1_parts_;
  float* const chunk_sums_;
  float* const dbias2_runs_;
  Queue queue_;
  const bool sums_keys_;
};

template <typename scalar_t, typename Isa>
int backward(const BwdParams& p) {
  using E = typename EngineFor<scalar_t, Isa, kBackwardKeys>::type;
  if (const int status = E::prepare(); status != 0) return status;

  if (p.B * p.N * p.H == 0) {  // nothing to sum
    for (int64_t i = 0; p.dbias1 != nullptr && i < p.B * p.N * p.Lk; ++i) p.dbias1[i] = 0.0f;
    for (int64_t i = 0; p.dbias2 != nullptr && i < p.B * p.H * p.Lq * p.Lk; ++i) p.dbias2[i] = 0.0f;
    return 0;
  }

  const BackwardPlan plan(p, E::kQueries);
  const BackwardScratch<E> size(nullptr, p, !plan.shared, plan.chunks);
  const bool adds_dbias1 = p.dbias1 != nullptr && p.H > 1;

  Carver shared_size(nullptr);
  const int64_t dbias1_count = adds_dbias1 ? p.B * p.N * p.H * p.Lk : 0;
  const int64_t sums_count = KeySums::count(size.padded_keys, size.channels, size.value_channels);
  const int64_t chunk_sums_count = plan.shared ? plan.groups * plan.chunks * sums_count : 0;
  shared_size.take<float>(dbias1_count);
  const int64_t dbias2_runs_count = dbias2_levels<scalar_t>(p) * p.B * p.H * p.Lq * p.Lk;
  shared_size.take<float>(chunk_sums_count);
  shared_size.take<float>(dbias2_runs_count);

  const Memory memory(size.bytes * plan.threads + shared_size.bytes());
  if (memory.data() == nullptr) return ENOMEM;
  Carver shared(memory.data() + size.bytes * plan.threads);
  float* const dbias1_parts = shared.take<float>(dbias1_count);
  float* const chunk_sums = shared.take<float>(chunk_sums_count);
  float* const dbias2_runs = shared.take<float>(dbias2_runs_count);

  Backward<scalar_t, E> run(p, plan, adds_dbias1 ? dbias1_parts : p.dbias1, chunk_sums,
                            dbias2_runs);
  in_parallel(plan.threads, [&](int thread, int team) {
    const BackwardScratch<E> scratch(memory.data() + size.bytes * thread, p, !plan.shared, plan.chunks);
    run.run(thread, team, scratch);
  });
  return 0;
}

}  // namespace ds4s::cpu
