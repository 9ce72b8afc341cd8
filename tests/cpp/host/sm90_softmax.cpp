// sm90/forward/softmax.h against sums in double, over random scores and biases: `sm90_softmax SEED` prints a line for
// each kind of bias with the worst relative error of weighted means, in bfloat16 and in float16, and of lse. A warp has
// 16 rows; two parts of a row, four steps of 64 keys each, are joined at the end, as warpgroups that divide keys are.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "sm90/forward/softmax.h"
#include "softmax_checks.h"

using namespace ds4s;

constexpr int kParts = 2, kSteps = 4, kKeys = 64, kRows = 16;

const Kind kKinds[] = {
    {"none", [](int, int, int) { return 0.; }},
    {"-1e9 everywhere", [](int, int, int) { return -1e9; }},
    {"-inf everywhere", [](int, int, int) { return -kInf; }},
    {"-1e9, later nothing", [](int, int step, int) { return step < 2 ? -1e9 : 0; }},
    {"-inf, later nothing", [](int, int step, int) { return step < 2 ? -kInf : 0; }},
    {"all hidden but one", [](int part, int step, int key) { return part == 1 && step == 2 && key == 63 ? 0 : -kInf; }},
    {"one part hidden", [](int part, int, int) { return part == 0 ? -kInf : 0; }},
    {"200 more in each step", [](int, int step, int) { return 200. * step; }},
    {"200 less in each step", [](int, int step, int) { return -200. * step; }},
    {"a last key of 300", [](int, int step, int key) { return step == 3 && key == 63 ? 300. : 0; }},
};

double value(int part, int step, int key) { return 1 + part * 300 + step * kKeys + key; }

struct Scores {
  float s[kRows][kParts][kSteps][kKeys];
};

// Of a row: the weighted mean and lse.
struct Outcome {
  double mean[kRows], lse[kRows];
};

template <typename scalar_t>
Outcome of_warp(const Scores& scores, float c) {
  using Softmax = sm90::WarpgroupSoftmax<scalar_t>;
  double weighted[32][2] = {}, sums[32][2] = {}, lse[32][2] = {};
  std::vector<std::thread> lanes;
  for (int lane = 0; lane < 32; ++lane) {
    lanes.emplace_back([&, lane] {
      threadIdx.x = lane;
      Softmax parts[kParts] = {Softmax(c), Softmax(c)};
      double o[kParts][2] = {};
      for (int part = 0; part < kParts; ++part) {
        for (int step = 0; step < kSteps; ++step) {
          float s[kKeys / 2];
          uint32_t p[kKeys / 4];
          auto key = [&](int x) { return x / 8 * 16 + (x >> 2 & 1) * 8 + 2 * (lane % 4) + (x & 1); };
          for (int x = 0; x < kKeys / 2; ++x) {
            s[x] = scores.s[lane / 4 + 8 * sm90::row_of(x)][part][step][key(x)];
          }
          if (Softmax::kWide && step == 0) parts[part].begin(s);
          parts[part].exponentiate(p, s, [&](const float (&factor)[2]) {
            for (int r = 0; r < 2; ++r) o[part][r] *= factor[r];
          });
          for (int x = 0; x < kKeys / 2; x += 2) {
            const float2 pair = ptx::unpack<scalar_t>(p[x / 2]);
            o[part][sm90::row_of(x)] += pair.x * value(part, step, key(x)) + pair.y * value(part, step, key(x + 1));
          }
        }
      }
      Softmax& mine = parts[0];
      for (int r = 0; r < 2; ++r) {
        float factor, of_theirs;
        mine.join(r, parts[1].m[r], parts[1].l[r], factor, of_theirs);
        weighted[lane][r] = o[0][r] * factor + o[1][r] * of_theirs;
      }
      mine.finish_sums();
      for (int r = 0; r < 2; ++r) sums[lane][r] = mine.l[r], lse[lane][r] = mine.logsumexp(r);
    });
  }
  for (auto& lane : lanes) lane.join();
  Outcome outcome;
  for (int row = 0; row < kRows; ++row) {
    const int lane = row % 8 * 4, r = row / 8;
    double o = 0;
    for (int i = 0; i < 4; ++i) o += weighted[lane + i][r];
    outcome.mean[row] = sums[lane][r] == 0 ? 0 : o / sums[lane][r], outcome.lse[row] = lse[lane][r];
  }
  return outcome;
}

Outcome of_double(const Scores& scores, float c) {
  Outcome outcome;
  for (int row = 0; row < kRows; ++row) {
    double m = -kInf, sum = 0, weighted = 0;
    auto for_each = [&](auto visit) {
      for (int i = 0; i < kParts * kSteps * kKeys; ++i) {
        const int part = i / (kSteps * kKeys), step = i / kKeys % kSteps, key = i % kKeys;
        visit(double(scores.s[row][part][step][key]) * c, value(part, step, key));
      }
    };
    for_each([&](double x, double) { m = std::max(m, x); });
    for_each([&](double x, double v) {
      const double p = m == -kInf ? 0 : std::exp2(x - m);
      sum += p, weighted += p * v;
    });
    outcome.mean[row] = sum == 0 ? 0 : weighted / sum, outcome.lse[row] = (m + std::log2(sum)) * std::log(2.);
  }
  return outcome;
}

int main(int, char** argv) {
  std::mt19937 random(std::atoi(argv[1]));
  std::normal_distribution<float> normal(0, 3);
  for (const Kind& kind : kKinds) {
    double wide = 0, half = 0, lse = 0;
    for (int round = 0; round < 12; ++round) {
      const float c = round % 2 == 0 ? 1.4426950f : 2.4f;
      Scores scores;
      for (int i = 0; i < kRows * kParts * kSteps * kKeys; ++i) {
        const int row = i / (kParts * kSteps * kKeys), part = i / (kSteps * kKeys) % kParts, step = i / kKeys % kSteps;
        const int key = i % kKeys;
        // All rows have the bias, or one of a lane's two.
        const bool has_bias = round % 3 == 0 || (row < 8) == (round % 3 == 1);
        scores.s[row][part][step][key] = float(normal(random) + (has_bias ? kind.bias(part, step, key) : 0));
      }
      const Outcome expected = of_double(scores, c), of_bf16 = of_warp<cutlass::bfloat16_t>(scores, c),
                    of_fp16 = of_warp<cutlass::half_t>(scores, c);
      for (int row = 0; row < kRows; ++row) {
        wide = std::max(wide, difference(of_bf16.mean[row], expected.mean[row]));
        half = std::max(half, difference(of_fp16.mean[row], expected.mean[row]));
        for (const Outcome* outcome : {&of_bf16, &of_fp16}) {
          lse = std::max(lse, difference(outcome->lse[row], expected.lse[row]));
        }
      }
    }
    std::printf("%g %g %g %s\n", wide, half, lse, kind.name);
  }
}
