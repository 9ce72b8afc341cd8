// The backward, math.md (8) to (16), with P recomputed. Only outputs with a pointer are computed.
//
// Where dbias2 is wanted, a group is (b, h) and iterates over n: the sum over n is then computed by one thread at a
// time, in order. Otherwise a group is (b, n, h). With many groups, each belongs to one thread. With few, all threads
// work on the same step and divide its items (group, chunk of queries) among them; after each step they add up the sums
// over queries: dk, dv and dbias1. Chunks depend on Lq alone and are added in order, so both ways give the same bits.
// Scratch per thread: K, V packed and dk, dv twice, 4 Lk (4 D + 3 Dv) bytes, and 2 kQueries Lk scores; threads that
// share steps keep sums for each chunk of their groups.
#pragma once

#include <cerrno>

#include "../params.h"
#include "backward_plan.h"
#include "backward_scratch.h"
#include "backward_worker.h"
#include "engine.h"
#include "few_scores.h"
#include "parallel.h"

namespace ds4s::cpu {

template <typename scalar_t, typename E>
class CpuBackward {
 public:
  CpuBackward(const BwdParams& p, const CpuBackwardPlan& plan, float* dbias1_parts, float* chunk_sums,
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
      mainloop_together(worker, thread, team, scratch);
    } else {
      mainloop_alone(worker, scratch);
    }
    if (p_.dbias1 != nullptr && dbias1_parts_ != p_.dbias1) {
      barrier(team);
      add_dbias1(thread, team);
    }
  }

 private:
  // A head of a row n.
  struct Head {
    int64_t b, n, h;
  };

  // Groups that do not iterate over n have n innermost: neighbours share bias2[b, h].
  Head head_of(int64_t group, int64_t step) const {
    const int64_t rows = p_.N / plan_.steps;
    const int64_t head = group / rows;
    const int64_t b = head / p_.H;
    return {plan_.batch_order == nullptr ? b : plan_.batch_order[b], group % rows + step, head % p_.H};
  }

  int64_t cost(const Head& at) const { return plan_.row_costs == nullptr ? 1 : plan_.row_costs[at.b * p_.N + at.n]; }

  int64_t first_query(int64_t chunk) const {
    const int64_t q = chunk * plan_.chunk_queries;
    return q < p_.Lq ? q : p_.Lq;
  }

  // The part of dbias1 of one (b, n, h): [Lk].
  float* dbias1_part(const Head& at) const {
    return dbias1_parts_ == nullptr ? nullptr : dbias1_parts_ + ((at.b * p_.N + at.n) * p_.H + at.h) * p_.Lk;
  }

  void mainloop_alone(BackwardWorker<scalar_t, E>& worker, const BackwardScratch<E>& scratch) {
    for (int64_t first, last; queue_.take(first, last);) {
      for (int64_t group = first; group < last; ++group) {
        for (int64_t step = 0; step < plan_.steps; ++step) {
          const Head at = head_of(group, step);
          const KeyTiles<E::kKeys>& tiles = worker.tiles(at.b, at.n);
          for (int64_t c = 0; c < plan_.chunks; ++c) {
            worker.run(at.b, at.n, at.h, first_query(c), first_query(c + 1), c == 0 ? scratch.sums : scratch.part);
            for (int x = 0; c > 0 && x < tiles.num(); ++x) worker.add_tile(scratch.sums, scratch.part, x);
          }
          if (sums_keys_) store_keys(worker, at, scratch.sums, 0, 1);
        }
      }
    }
  }

  void mainloop_together(BackwardWorker<scalar_t, E>& worker, int thread, int team, const BackwardScratch<E>& scratch) {
    const int64_t size = sums_count(scratch);
    for (int64_t step = 0; step < plan_.steps; ++step) {
      run_share(worker, step, thread, team, scratch);
      // Where all rows cost the same, a thread has the same items in every step, and dbias2 needs no barrier.
      if (sums_keys_ || plan_.row_costs != nullptr) barrier(team);
      if (!sums_keys_) continue;
      for (int64_t group = 0; group < plan_.groups; ++group) {
        float* const sums = chunk_sums_ + group * plan_.chunks * size;
        add_chunks(worker, head_of(group, step), scratch, sums, thread, team);
      }
      barrier(team);
    }
  }

  // Computes this thread's items (group, chunk) of a step: those that begin within its share of the cost.
  void run_share(BackwardWorker<scalar_t, E>& worker, int64_t step, int thread, int team,
                 const BackwardScratch<E>& scratch) {
    int64_t total = 0;
    for (int64_t group = 0; group < plan_.groups; ++group) total += plan_.chunks * cost(head_of(group, step));
    int64_t done = 0;
    for (int64_t item = 0; item < plan_.groups * plan_.chunks; ++item) {
      const Head at = head_of(item / plan_.chunks, step);
      if (done >= total * thread / team && done < total * (thread + 1) / team) {
        const int64_t c = item % plan_.chunks;
        worker.run(at.b, at.n, at.h, first_query(c), first_query(c + 1),
                   scratch.key_sums(chunk_sums_ + item * sums_count(scratch)));
      }
      done += cost(at);
    }
  }

  // For this thread's tiles of one group: adds the sums of all chunks to those of the first and stores them.
  void add_chunks(BackwardWorker<scalar_t, E>& worker, const Head& at, const BackwardScratch<E>& scratch, float* sums,
                  int thread, int team) {
    const int num = worker.tiles(at.b, at.n).num();
    for (int x = num * thread / team; x < num * (thread + 1) / team; ++x) {
      for (int64_t c = 1; c < plan_.chunks; ++c) {
        worker.add_tile(scratch.key_sums(sums), scratch.key_sums(sums + c * sums_count(scratch)), x);
      }
    }
    store_keys(worker, at, scratch.key_sums(sums), thread, team);
  }

  // Stores this thread's tiles and hidden keys.
  void store_keys(BackwardWorker<scalar_t, E>& worker, const Head& at, const KeySums& sums, int thread, int team) {
    const KeyTiles<E::kKeys>& tiles = worker.tiles(at.b, at.n);
    float* const dbias1 = dbias1_part(at);
    for (int x = tiles.num() * thread / team; x < tiles.num() * (thread + 1) / team; ++x) {
      worker.store_tile(at.h, x, sums, dbias1);
    }
    tiles.for_each_gap(p_.Lk, [&](int64_t first, int64_t last) {
      const int64_t count = last - first;
      worker.store_hidden(at.h, first + count * thread / team, first + count * (thread + 1) / team, dbias1);
    });
  }

  static int64_t sums_count(const BackwardScratch<E>& scratch) {
    return KeySums::count(scratch.padded_keys, scratch.channels, scratch.value_channels);
  }

  static void add(float* to, const float* from, int64_t count) {
    for (int64_t i = 0; i < count; ++i) to[i] += from[i];
  }

  // The sum over h of math.md (15).
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
  const CpuBackwardPlan& plan_;
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

  if (p.B * p.N * p.H == 0) return 0;
  if (p.partial_keys == 0 && has_few_scores<scalar_t>(p)) return run_few_scores<FewScoresBackward>(p);

  CpuBackwardPlan plan(p, E::kQueries);
  const bool uneven = plan.wants_row_costs(p);
  const Memory costs(uneven ? (p.B * p.N + p.B) * int64_t(sizeof(int32_t)) : 0);
  int32_t* const row_costs = uneven ? reinterpret_cast<int32_t*>(costs.data()) : nullptr;
  if (uneven && (row_costs == nullptr || !find_row_costs<E::kKeys>(p, row_costs))) return ENOMEM;
  plan.share_out(p, row_costs);
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

  CpuBackward<scalar_t, E> run(p, plan, adds_dbias1 ? dbias1_parts : p.dbias1, chunk_sums, dbias2_runs);
  in_parallel(plan.threads, [&](int thread, int team) {
    const BackwardScratch<E> scratch(memory.data() + size.bytes * thread, p, !plan.shared, plan.chunks);
    run.run(thread, team, scratch);
  });
  return 0;
}

}  // namespace ds4s::cpu
