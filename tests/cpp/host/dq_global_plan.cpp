// sm90/backward/dq_global_plan.h: `dq_global_plan WIDE B N Lq Lk H BLOCKS` prints accumulators, elements of one,
// counters, and whether dbias2 is added to in the same pass. Passes as BackwardChoice has them for D = 128 (WIDE = 1)
// and 64.
#include "sm90/backward/dq_global_plan.h"

#include <cstdio>
#include <cstdlib>

template <int kColumns_, int kAccumulatorColumns_, bool kAddsDbias2_>
struct Pass {
  static constexpr int kTiles = 2, kOwned = 64, kColumns = kColumns_, kAccumulatorColumns = kAccumulatorColumns_;
  static constexpr bool kAddsDbias2 = kAddsDbias2_;
  using Element = uint16_t;
  struct Queue {
    static constexpr int kPlaces = 32;
  };
};

int main(int, char** argv) {
  ds4s::BwdParams p{};
  p.B = std::atoll(argv[2]), p.N = std::atoll(argv[3]), p.Lq = std::atoll(argv[4]), p.Lk = std::atoll(argv[5]);
  p.H = std::atoll(argv[6]);
  int64_t blocks = std::atoll(argv[7]);
  using Plan = ds4s::sm90::DqGlobalPlan;
  Plan plan = std::atoi(argv[1]) ? Plan::of<Pass<32, 128, true>>(p, blocks) : Plan::of<Pass<64, 64, false>>(p, blocks);
  std::printf("%lld %lld %lld %d\n", (long long)plan.num_accumulators, (long long)plan.accumulator_size,
              (long long)plan.num_counters, plan.adds_dbias2);
}
