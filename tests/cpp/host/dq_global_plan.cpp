// sm90/backward/dq_global_plan.h: `dq_global_plan KIND B N Lq Lk H BLOCKS` prints accumulators, elements of one,
// counters, whether dbias2 is added to by the same kernel, sections of the queries, bytes for the range of dq, the
// bound of a scale of 0.18, and the ends of the pieces of that range; for D = 64 (KIND = 0), D = 128 (1), or D = 64 in
// pairs of rows n (2); with sums in float32, 10 more. A last number is the stride of dq over Lq.
#include "sm90/backward/dq_global_plan.h"

#include <cstdio>
#include <cstdlib>

int main(int argc, char** argv) {
  using namespace ds4s::sm90;
  ds4s::BwdParams p{};
  p.B = std::atoll(argv[2]), p.N = std::atoll(argv[3]), p.Lq = std::atoll(argv[4]), p.Lk = std::atoll(argv[5]);
  p.H = std::atoll(argv[6]), p.D = p.Dv = 64, p.scale = 0.18f;
  const int64_t blocks = std::atoll(argv[7]);
  p.dq_stride[2] = argc > 8 ? std::atoll(argv[8]) : p.H * p.D;
  const int kind = std::atoi(argv[1]) % 10;
  const bool half = std::atoi(argv[1]) < 10;  // dq_sums.h
  const DqGlobalPlan plan = kind == 1   ? DqGlobalPlan::of<BackwardTiles<128>::DqGlobal, 128>(p, blocks, half)
                            : kind == 2 ? DqGlobalPlan::of<BackwardTiles<64>::DqGlobalPaired, 64>(p, blocks, half)
                                        : DqGlobalPlan::of<BackwardTiles<64>::DqGlobal, 64>(p, blocks, half);
  DqRangeArgs range = DqRangeArgs::of(p, kind == 1 ? 128 : 64, plan.key_blocks);
  char* const memory = reinterpret_cast<char*>(256);
  range.lie_at(memory, nullptr);
  auto end_of = [&](const void* next) { return static_cast<long long>(static_cast<const char*>(next) - memory); };
  std::printf("%lld %lld %lld %d %lld %lld %d %lld %lld %lld\n", (long long)plan.num_accumulators,
              (long long)plan.accumulator_size, (long long)plan.num_counters, plan.adds_dbias2,
              (long long)plan.num_sections, (long long)plan.range_bytes, range.bound, end_of(range.exponents),
              end_of(range.largest), end_of(range.wrong));
}
