// dS = P (dP - delta) with P = exp(s - lse) recomputed; dq = scale dS K, dk = scale dS^T Q, dv = P^T dO,
// dbias1 = sum over h and q of dS, dbias2 = sum over n of dS. Only what has an output pointer is computed.
//
// A group is (b, h), walking over n, where dbias2 is wanted: its sum over n is then one thread's at a time, in order.
// Otherwise a group is (b, n, h). Many groups: one thread each. Few: all threads walk together and share out
// (group, chunk of keys); after each step they add up dq. Both give the same bits (kMaxChunks says why).
// Scratch per thread: Q, dO and dq packed, 4 Lq (3 D + Dv) bytes, and tiles; the shared walk keeps a dq for each
// chunk of its groups.
#pragma once

#include <cerrno>

#include "../params.h"
#include "backward_scratch.h"
#include "backward_worker.h"
#include "engine.h"
#include "parallel.h"

namespace ds4s::cpu {

// How the work is cut; a function of the shape, the wanted outputs and the number of threads.
struct BackwardPlan {
  int64_t groups;
  int64_t steps;       // values of n a group walks over
  int64_t chunk_keys;  // keys of a chunk
  int64_t chunks;
  int threads;
  bool shared;  // all threads walk together

  BackwardPlan(const BwdParams& p, int keys_per_block) {
    groups = p.dbias2 != nullptr ? p.B * p.H : p.B * p.H * p.N;
    steps = p.dbias2 != nullptr ? p.N : 1;
    const int64_t blocks = (p.Lk + keys_per_block - 1) / keys_per_block;
    chunk_keys = (blocks + kMaxChunks - 1) / kMaxChunks * keys_per_block;
    chunks = (p.Lk + chunk_keys - 1) / chunk_keys;

    const double flops = 4.0 * double(p.B * p.H * p.N) * double(p.Lq) * double(p.Lk) * double(p.D + p.Dv);
    threads = useful_threads(p.num_threads, flops, groups * chunks);
    const double alone = double((groups + threads - 1) / threads);
    const double together = double((groups * chunks + threads - 1) / threads) / double(chunks);
    // Below twice the threads, so that the parts of dq stay few; a tenth is what waiting for each other costs.
    shared = threads > 1 && groups < 2 * threads && together * 1.1 < alone;
    if (!shared && threads > groups) threads = int(groups);
  }

  void place(const BwdParams& p, int64_t group, int64_t step, int64_t& b, int64_t& n, int64_t& h) const {
    const int64_t head = steps > 1 || groups == p.B * p.H ? group : group / p.N;
    b = head / p.H;
    h = head % p.H;
    n = steps > 1 || groups == p.B * p.H ? step : group % p.N;
  }
};

template <typename scalar_t, typename E>
class Backward {
 public:
  Backward(const BwdParams& p, const BackwardPlan& plan, float* dbias1_parts, float* dq_parts)
      : p_(p), plan_(plan), dbias1_parts_(dbias1_parts), dq_parts_(dq_parts), queue_(plan.groups, plan.threads) {}

  void run(int thread, int team, const BackwardScratch<E>& scratch) {
    [[maybe_unused]] typename E::Session session;
    BackwardWorker<scalar_t, E> worker(p_, scratch, dbias1_parts_);
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
  void walk_alone(BackwardWorker<scalar_t, E>& worker, const BackwardScratch<E>& scratch) {
    const int64_t size = scratch.padded_queries * scratch.channels;
    for (int64_t first, last; queue_.take(first, last);) {
      for (int64_t group = first; group < last; ++group) {
        for (int64_t step = 0; step < plan_.steps; ++step) {
          int64_t b, n, h;
          plan_.place(p_, group, step, b, n, h);
          for (int64_t c = 0; c < plan_.chunks; ++c) {
            worker.run(b, n, h, first_key(c), first_key(c + 1), c == 0 ? scratch.dq : scratch.dq_part);
            if (c > 0 && p_.dq != nullptr) {
              for (int64_t x = 0; x < size; ++x) scratch.dq[x] += scratch.dq_part[x];
            }
          }
          if (p_.dq != nullptr) worker.store_dq(b, n, h, 0, int(p_.Lq), scratch.dq, 0, 1);
        }
      }
    }
  }

  void walk_together(BackwardWorker<scalar_t, E>& worker, int thread, int team, const BackwardScratch<E>& scratch) {
    const int64_t size = scratch.padded_queries * scratch.channels;
    const int64_t items = plan_.groups * plan_.chunks;
    const int64_t blocks = (p_.Lq + E::kQueries - 1) / E::kQueries;
    int64_t b, n, h;
    for (int64_t step = 0; step < plan_.steps; ++step) {
      // The same thread has the same items in every step, so dbias2 needs no barrier.
      for (int64_t item = items * thread / team; item < items * (thread + 1) / team; ++item) {
        const int64_t c = item % plan_.chunks;
        plan_.place(p_, item / plan_.chunks, step, b, n, h);
        worker.run(b, n, h, first_key(c), first_key(c + 1), dq_parts_ + item * size);
      }
      if (p_.dq == nullptr) continue;
      barrier(team);
      const int64_t rows = plan_.groups * blocks;
      for (int64_t x = rows * thread / team; x < rows * (thread + 1) / team; ++x) {
        const int64_t q0 = x % blocks * E::kQueries;
        const int count = int(p_.Lq - q0 < E::kQueries ? p_.Lq - q0 : E::kQueries);
        plan_.place(p_, x / blocks, step, b, n, h);
        worker.store_dq(b, n, h, q0, count, dq_parts_ + x / blocks * plan_.chunks * size, size, plan_.chunks);
      }
      barrier(team);
    }
  }

  int64_t first_key(int64_t chunk) const {
    const int64_t key = chunk * plan_.chunk_keys;
    return key < p_.Lk ? key : p_.Lk;
  }

  void add_dbias1(int thread, int team) {
    const int64_t rows = p_.B * p_.N;
    for (int64_t row = rows * thread / team; row < rows * (thread + 1) / team; ++row) {
      const float* parts = dbias1_parts_ + row * p_.H * p_.Lk;
      float* to = p_.dbias1 + row * p_.Lk;
      for (int64_t k = 0; k < p_.Lk; ++k) to[k] = parts[k];
      for (int64_t h = 1; h < p_.H; ++h) {
        for (int64_t k = 0; k < p_.Lk; ++k) to[k] += parts[h * p_.Lk + k];
      }
    }
  }

  const BwdParams& p_;
  const BackwardPlan& plan_;
  float* const dbias1_parts_;
  float* const dq_parts_;
  Queue queue_;
};

template <typename scalar_t, typename Isa>
int backward(const BwdParams& p) {
  using E = typename EngineFor<scalar_t, Isa>::type;
  if (const int status = E::prepare(); status != 0) return status;

  const BackwardPlan plan(p, E::kKeys);
  const BackwardScratch<E> size(nullptr, p, !plan.shared, plan.chunks);
  const bool adds_dbias1 = p.dbias1 != nullptr && p.H > 1;

  Carver shared_size(nullptr);
  const int64_t dbias1_count = adds_dbias1 ? p.B * p.N * p.H * p.Lk : 0;
  const int64_t dq_count =
      plan.shared && p.dq != nullptr ? plan.groups * plan.chunks * size.padded_queries * size.channels : 0;
  shared_size.take<float>(dbias1_count);
  shared_size.take<float>(dq_count);

  const Memory memory(size.bytes * plan.threads + shared_size.bytes());
  if (memory.data() == nullptr) return ENOMEM;
  Carver shared(memory.data() + size.bytes * plan.threads);
  float* const dbias1_parts = shared.take<float>(dbias1_count);
  float* const dq_parts = shared.take<float>(dq_count);

  Backward<scalar_t, E> run(p, plan, adds_dbias1 ? dbias1_parts : p.dbias1, dq_parts);
  in_parallel(plan.threads, [&](int thread, int team) {
    const BackwardScratch<E> scratch(memory.data() + size.bytes * thread, p, !plan.shared, plan.chunks);
    run.run(thread, team, scratch);
  });
  return 0;
}

}  // namespace ds4s::cpu
