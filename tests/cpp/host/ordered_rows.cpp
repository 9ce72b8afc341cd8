// OrderedRows of sm90/backward/dbias2_global.h with 128 threads: `ordered_rows SEED` orders random matrices and prints
// a line for each that went wrong, and at the end how many there were. An element that is overwritten before it has
// been read goes wrong.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "common/ptx.h"
#include "sm90/backward/dbias2_global.h"

using namespace ds4s;
using namespace ds4s::sm90;

int matrices = 0;

// Where kernel_dq_dkdv adds the element of a query and key, from the first of its eight queries on.
int64_t place(int query, int key, int num_queries, int Lk) {
  if (num_queries < Dbias2Unit::kQueries || key >= Lk / Dbias2Unit::kKeys * Dbias2Unit::kKeys)
    return int64_t(query) * Lk + key;
  for (int warp = 0; warp < 4; ++warp) {
    for (int lane = 0; lane < 32; ++lane) {
      const Dbias2Unit unit{Lk, warp, lane};
      for (int e = 0; e < 4; ++e) {
        const bool is_here = unit.query(e) == query && unit.key(e) == key % Dbias2Unit::kKeys;
        if (is_here) return key / Dbias2Unit::kKeys * Dbias2Unit::kKeys + unit.offset() + e;
      }
    }
  }
  std::abort();
}

void check(std::mt19937& random, int Lq, int Lk, int num_matrices, bool corrects) {
  constexpr float kUntouched = 12345.f;
  const int64_t count = int64_t(num_matrices) * Lq * Lk;
  std::vector<float> sums(count), memory(count + 8, kUntouched);
  float* dbias2 = memory.data();
  while (reinterpret_cast<uintptr_t>(dbias2) % 16 != 0) ++dbias2;
  std::normal_distribution<float> normal;
  for (float& x : sums) x = normal(random);
  const int blocks_of_matrix = (Lq + 7) / 8;
  for (int64_t x = 0; x < count; ++x) {
    const int query = int(x / Lk % Lq), first = query / 8 * 8;
    dbias2[x / Lk / Lq * Lq * Lk + int64_t(first) * Lk + place(query - first, int(x % Lk), min(8, Lq - first), Lk)] =
        sums[x];
  }
  BackwardArgs args{};
  args.Lq = Lq, args.Lk = Lk, args.dbias2_global = dbias2;
  OrderedRows::Shared shared;
  block.threads = kOrderThreads;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kOrderThreads; ++thread) {
    threads.emplace_back([&, thread] {
      threadIdx.x = thread;
      for (int x = 0; x < num_matrices * blocks_of_matrix; ++x) {
        OrderedRows(args, corrects, shared, uint32_t(x)).finish();
        block.wait();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();

  bool right = dbias2[count] == kUntouched;
  for (int64_t row = 0; row < count / Lk; ++row) {
    double sum = 0, size = 0;
    for (int k = 0; k < Lk; ++k) sum += sums[row * Lk + k], size += std::fabs(sums[row * Lk + k]);
    const double excess = corrects ? sum / size : 0.0;
    for (int k = 0; k < Lk; ++k) {
      const double x = sums[row * Lk + k], wanted = x - excess * std::fabs(x);
      right &= std::fabs(dbias2[row * Lk + k] - wanted) <= 4e-6 * std::max(std::fabs(x), std::fabs(wanted)) + 1e-7;
    }
  }
  ++matrices;
  if (!right) std::printf("wrong: Lq = %d, Lk = %d\n", Lq, Lk);
}

int main(int, char** argv) {
  std::mt19937 random(uint32_t(std::atoi(argv[1])));
  for (int Lk : {4, 64, 196, 1024, 1092, 2116}) {  // keys without a unit; up to 16 units and more
    const int Lq = 7 + int(random() % 4), num_matrices = Lk < 1000 ? 2 : 1;
    check(random, Lq, Lk, num_matrices, /*corrects=*/true);
    check(random, 8, Lk, 1, /*corrects=*/false);
  }
  std::printf("%d matrices\n", matrices);
}
