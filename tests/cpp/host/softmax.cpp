// sm80/forward/softmax.h against sums in double, over random scores and biases: `softmax SEED` prints a line for each
// kind of bias with the worst relative error of weighted means and of lse, with a reference that moves and with one
// that comes from the first scores, and in how many of 100 rows the latter did not fit. Two parts of a row, six blocks
// of keys each, are joined at the end, as warps are.
#include "sm80/forward/softmax.h"

#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "softmax_checks.h"

using namespace ds4s;

constexpr int kParts = 2, kBlocks = 6, kKeys = 32;

const Kind kKinds[] = {
    {"none", [](int, int, int) { return 0.; }},
    {"-1e6 everywhere", [](int, int, int) { return -1e6; }},
    {"-1e9 everywhere", [](int, int, int) { return -1e9; }},
    {"-3e38 everywhere", [](int, int, int) { return -3e38; }},
    {"-3.3e38 and -2.5e38", [](int, int, int key) { return key % 3 ? -3.3e38 : -2.5e38; }},
    {"-1e9, later nothing", [](int, int block, int) { return block < 3 ? -1e9 : 0; }},
    {"one part hidden", [](int part, int, int) { return part == 0 ? -kInf : 0; }},
    {"all hidden", [](int, int, int) { return -kInf; }},
    {"-1e6 and -3e38 in parts", [](int part, int, int) { return part == 0 ? -1e6 : -3e38; }},
    {"-3e38, one block 300", [](int part, int block, int) { return part == 1 && block == 4 ? 300 : -3e38; }},
    {"50 more in each block", [](int, int block, int) { return 50. * block; }},
    {"35 more from the second block on", [](int, int block, int) { return block > 0 ? 35. : 0; }},
    {"95 more from the second block on", [](int, int block, int) { return block > 0 ? 95. : 0; }},
    {"300 less in each block", [](int, int block, int) { return -300. * block; }},
    {"-inf, later nothing", [](int, int block, int) { return block < 2 ? -kInf : 0; }},
};

// Scores are kept in `unit`s; each key's value is a thousand times its number. kFixes: references come from begin();
// `unfit` counts rows with a part that does not fit, which have no error then.
template <int kLaneRows, bool kIsWide = false, bool kFixes = false>
double worst_error(const Kind& kind, float unit, std::mt19937& random, int& unfit) {
  using Softmax = RowSoftmax<OneLane<kLaneRows>, kIsWide>;
  std::normal_distribution<float> normal(0, 3);
  std::vector<double> scores[kLaneRows], values[kLaneRows];
  Softmax parts[kParts] = {Softmax(1 / unit), Softmax(1 / unit)};
  double sums[kParts][kLaneRows] = {};
  bool fits = true;
  for (int part = 0; part < kParts; ++part) {
    Softmax& softmax = parts[part];
    float o[1][8] = {};  // one value of each row, for lower() and fits()
    for (int block = 0; block < kBlocks; ++block) {
      float s[4][8];
      auto value = [&](int x) { return 1000. * (1 + x + kKeys * (block + kBlocks * part)); };
      for (int x = 0; x < kKeys; ++x) {
        float& score = s[x / 8][x % 8];
        score = std::fmaf(float(kind.bias(part, block, x)), unit, normal(random) * unit);
        scores[x / 2 % kLaneRows].push_back(double(score) / unit), values[x / 2 % kLaneRows].push_back(value(x));
      }
      typename Softmax::Row largest;
      if constexpr (kFixes) {
        if (block == 0) softmax.begin(s);
        softmax.m_prime.fill(1.f);
        softmax.lower(o);
        for (int lane_row = 0; lane_row < kLaneRows; ++lane_row) sums[part][lane_row] *= softmax.m_prime[lane_row];
      } else if (softmax.must_move(largest, s)) {
        softmax.move(largest);
        for (int lane_row = 0; lane_row < kLaneRows; ++lane_row) sums[part][lane_row] *= softmax.m_prime[lane_row];
      }
      softmax.to_exponents(s);
      softmax.exponentiate(s);
      for (int x = 0; x < kKeys; ++x) {
        sums[part][x / 2 % kLaneRows] += s[x / 8][x % 8] * value(x);
        o[0][2 * (x / 2 % kLaneRows)] += s[x / 8][x % 8] * float(value(x));
      }
    }
    softmax.finish();
    if (kFixes) fits &= softmax.fits(o);
  }
  if (!fits) return ++unfit, 0;
  double worst = 0;
  for (int lane_row = 0; lane_row < kLaneRows; ++lane_row) {
    float theirs = parts[0].join(lane_row, parts[1].cm[lane_row], parts[1].l[lane_row]), l = parts[0].l[lane_row];
    double mean = (sums[0][lane_row] * parts[0].m_prime[lane_row] + sums[1][lane_row] * theirs) / (l == 0 ? 1 : l);
    double m = -kInf, sum = 0, weighted = 0;
    for (double x : scores[lane_row]) m = std::max(m, x);
    for (size_t i = 0; i < scores[lane_row].size() && m > -kInf; ++i) {
      double p = std::exp(scores[lane_row][i] - m);
      sum += p, weighted += p * values[lane_row][i];
    }
    worst = std::max(worst, difference(mean, sum == 0 ? 0 : weighted / sum));
    worst = std::max(worst, difference(parts[0].logsumexp(lane_row), m + std::log(sum)));
  }
  return worst;
}

int main(int, char** argv) {
  std::mt19937 random(std::atoi(argv[1]));
  for (const Kind& kind : kKinds) {
    double worst = 0, worst_fixed = 0;
    int unfit = 0;
    for (int round = 0; round < 50; ++round) {
      for (float unit : {std::sqrt(32.f) / 64, std::sqrt(128.f) / 64}) {
        worst = std::max({worst, worst_error<2>(kind, unit, random, unfit), worst_error<4>(kind, unit, random, unfit),
                          worst_error<4, /*kIsWide=*/true>(kind, unit, random, unfit)});
        worst_fixed =
            std::max(worst_fixed, worst_error<4, /*kIsWide=*/false, /*kFixes=*/true>(kind, unit, random, unfit));
      }
    }
    std::printf("%g %g %d %s\n", worst, worst_fixed, unfit, kind.name);
  }
}
