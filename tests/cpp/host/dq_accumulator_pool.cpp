// sm80/backward/dq_accumulator_pool.h against a record of who had which accumulator: `dq_accumulator_pool SEED` plans
// random calls and prints a line for each that went wrong, and at the end how many had accumulators in dk and dv.
#include "sm80/backward/dq_accumulator_pool.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "sm80/backward/dq_accumulator_plan.h"

using namespace ds4s;

struct Call {
  BwdParams p{};
  int64_t tiles, padded_queries, side_by_side;
  DqAccumulatorPlan plan;
  DqAccumulatorPool pool{};

  int64_t rows() const { return p.B * p.N; }
};

constexpr int64_t kDkBegin = int64_t(1) << 40, kDvBegin = int64_t(1) << 41;

// Addresses that nobody reads: the workspace's accumulators from 0 on.
float* address(int64_t floats) { return reinterpret_cast<float*>(floats * 4); }

Call random_call(std::mt19937& random) {
  auto pick = [&](int from, int to) { return int64_t(from + random() % (to - from + 1)); };
  Call call;
  BwdParams& p = call.p;
  p.B = pick(1, 2), p.N = pick(20, 400), p.Lq = pick(40, 500), p.Lk = pick(40, 500), p.H = pick(1, 8);
  p.D = p.Dv = pick(0, 1) ? 16 : 32;
  p.row_mask = pick(0, 1) ? reinterpret_cast<const uint8_t*>(&random) : nullptr;
  for (auto* stride : {&p.dk_stride, &p.dv_stride}) {
    (*stride)[3] = p.D, (*stride)[2] = p.H * p.D, (*stride)[1] = p.Lk * p.H * p.D, (*stride)[0] = p.N * (*stride)[1];
  }
  call.tiles = (p.Lk + 127) / 128, call.padded_queries = (p.Lq + 63) / 64 * 64;
  call.side_by_side = pick(0, 1) ? 8 : 16;
  call.plan = DqAccumulatorPlan::of(p, 2, call.padded_queries * p.D * 4, call.tiles, pick(10, 270), call.side_by_side,
                                    call.side_by_side * pick(1, 3));
  DqAccumulatorPool& pool = call.pool;
  pool.own = address(0), pool.in_dk = address(kDkBegin), pool.in_dv = address(kDvBegin);
  pool.dk_row = pool.dv_row = p.dk_stride[1] / 2, pool.size = call.padded_queries * p.D;
  std::copy(call.plan.groups, call.plan.groups + call.plan.num_groups, pool.groups);
  pool.num_groups = call.plan.num_groups;
  return call;
}

// The first and the last of the numbers that blocks of each pair draw: rows n side by side, then tiles, then heads.
struct Numbers {
  int64_t first = -1, last = -1;
};
std::vector<Numbers> draw(const Call& call) {
  std::vector<Numbers> numbers(call.rows() * call.p.H);
  int64_t number = 0;
  for (int64_t row = 0, group; row < call.rows(); row += group) {
    group = std::min<int64_t>(call.side_by_side, call.rows() - row);
    for (int64_t h = 0; h < call.p.H; ++h) {
      for (int64_t id = 0; id < call.tiles * group; ++id, ++number) {
        Numbers& pair = numbers[row * call.p.H + h * group + id % group];
        if (pair.first < 0) pair.first = number;
        pair.last = number;
      }
    }
  }
  return numbers;
}

bool is_right(const Call& call) {
  const std::vector<Numbers> numbers = draw(call);
  const int64_t pairs = call.rows() * call.p.H, bytes = call.pool.size * 4;
  std::map<float*, int32_t> had;  // the last pair of each accumulator
  for (int64_t pair = 0; pair < pairs; ++pair) {
    float* mine = call.pool.accumulator(uint32_t(pair));
    const auto found = had.find(mine);
    const int32_t before = found == had.end() ? -1 : found->second;
    if (call.pool.before(uint32_t(pair)) != before) return false;
    if (before >= 0 && numbers[before].last > numbers[pair].first) return false;
    had[mine] = int32_t(pair);

    // In the workspace, or in a row n of a group behind: all of the pair's own numbers are before that group's.
    const int64_t offset = reinterpret_cast<int64_t>(mine) / 4;
    if (offset < kDkBegin) {
      if (offset + call.pool.size > call.plan.num_own * call.pool.size) return false;
      continue;
    }
    const int64_t in_output = offset - (offset < kDvBegin ? kDkBegin : kDvBegin), row_size = call.pool.dk_row;
    const int64_t first_row = in_output / row_size, last_row = (in_output + call.pool.size - 1) / row_size;
    const int group = call.pool.group_of(uint32_t(first_row * call.p.H));
    if (last_row >= call.rows() || group != call.pool.group_of(uint32_t(last_row * call.p.H))) return false;
    if (group <= call.pool.group_of(uint32_t(pair))) return false;
    if (first_row < call.plan.first_host_row(call.rows())) return false;  // earlier rows n are not cleared
  }
  // No two accumulators overlap.
  float* end = nullptr;
  for (const auto& accumulator : had) {
    if (end != nullptr && accumulator.first < end) return false;
    end = accumulator.first + call.pool.size;
  }
  // All pairs before a group have smaller numbers than its own.
  for (int group = 1; group < call.pool.num_groups; ++group) {
    const int64_t first = call.pool.groups[group].first_pair;
    for (int64_t pair = 0; pair < pairs; ++pair) {
      if (pair < first ? numbers[pair].last > numbers[first].first : numbers[pair].first < numbers[first].first) {
        return false;
      }
    }
  }
  // Whoever writes dk or dv of a row n waits for the last pair of each accumulator there, all of them before its group.
  for (int64_t row = call.plan.first_host_row(call.rows()); row < call.rows(); ++row) {
    const int group = call.pool.group_of(uint32_t(row * call.p.H));
    std::set<int32_t> waits;
    for (const auto& there :
         {call.pool.hosted_in_dk(group, uint32_t(row)), call.pool.hosted_in_dv(group, uint32_t(row))}) {
      for (uint32_t x = 0; x < there.count; ++x) waits.insert(call.pool.last_before(group, there.first + x));
    }
    for (const auto& [address, last] : had) {
      const int64_t begin = reinterpret_cast<int64_t>(address) / 4, end = begin + call.pool.size;
      for (int64_t output : {kDkBegin, kDvBegin}) {
        const int64_t row_begin = output + row * call.pool.dk_row;
        const bool reaches = begin < row_begin + call.pool.dk_row && end > row_begin;
        if (reaches && (waits.count(last) == 0 || uint32_t(last) >= call.pool.groups[group].first_pair)) return false;
      }
    }
  }
  return int64_t(had.size()) <= call.plan.count() && bytes == call.plan.accumulator_bytes;
}

int main(int argc, char** argv) {
  std::mt19937 random(argc > 1 ? std::atoi(argv[1]) : 0);
  int hosted = 0;
  for (int i = 0; i < 800; ++i) {
    const Call call = random_call(random);
    hosted += call.plan.num_groups > 1;
    if (is_right(call)) continue;
    std::printf("wrong: B %lld N %lld Lq %lld Lk %lld H %lld D %lld\n", (long long)call.p.B, (long long)call.p.N,
                (long long)call.p.Lq, (long long)call.p.Lk, (long long)call.p.H, (long long)call.p.D);
  }
  std::printf("%d hosted\n", hosted);
}
