// common/dbias2_rows.h against plain loops: `dbias2_rows SEED` finishes random rows and prints a line for each that
// went wrong, and at the end how many there were.
#include "common/dbias2_rows.h"

#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

using namespace ds4s;

int rows = 0;

enum class Row { kUsual, kHidden, kNaN, kInfinite, kOneElement };

// An element in ten is 0, which are keys that every row n hides; small ones are soft masks.
std::vector<float> random_row(std::mt19937& random, int Lk, Row kind) {
  std::normal_distribution<float> normal;
  std::vector<float> row(Lk);
  for (float& x : row) {
    const int size = int(random() % 10);
    x = size == 0 || kind == Row::kHidden || kind == Row::kOneElement ? 0.f
                                                                      : normal(random) * (size == 1 ? 1e-20f : 1.f);
  }
  float& one = row[random() % Lk];
  if (kind == Row::kNaN) one = std::numeric_limits<float>::quiet_NaN();
  if (kind == Row::kInfinite) one = infinity();
  if (kind == Row::kOneElement) one = normal(random);
  return row;
}

// What math.md (16a) makes of a row, in double.
std::vector<double> expected(const std::vector<float>& row, bool corrects) {
  double sum = 0, size = 0;
  for (float x : row) sum += x, size += std::fabs(x);
  const double excess = corrects && std::isfinite(sum) && size > 0 ? sum / size : 0.0;
  std::vector<double> result;
  for (float x : row) result.push_back(x - excess * std::fabs(x));
  return result;
}

template <typename scalar_t>
void check(std::mt19937& random, int Lk, Row kind, int N, bool partial_keys, bool rounds, int offset, int stride) {
  constexpr int kQueries = 2;
  std::vector<std::vector<float>> before;
  std::vector<float> memory(kQueries * stride + 8);
  std::vector<scalar_t> rounded(kQueries * Lk + 8, scalar_t(7.f));
  float* dbias2 = memory.data();
  while (reinterpret_cast<uintptr_t>(dbias2) % 16 != 0) ++dbias2;
  dbias2 += offset;
  for (int q = 0; q < kQueries; ++q) {
    before.push_back(random_row(random, Lk, kind));
    std::copy(before[q].begin(), before[q].end(), dbias2 + q * stride);
  }
  BwdParams p{};
  p.B = p.H = 1, p.Lq = kQueries, p.Lk = Lk, p.dbias2 = dbias2, p.partial_keys = partial_keys, p.N = N;
  const bool corrects = N > 1 && !partial_keys;
  if (rounds) p.rounded_dbias2 = rounded.data();
  std::vector<std::thread> warp;
  for (int lane = 0; lane < 32; ++lane) {
    warp.emplace_back([&, lane] {
      threadIdx.x = lane;
      for (int q = 0; q < kQueries; ++q) Dbias2Rows<scalar_t>(p, stride).finish(q);
    });
  }
  for (std::thread& lane : warp) lane.join();

  bool right = true;
  for (int q = 0; q < kQueries; ++q) {
    const std::vector<double> wanted = expected(before[q], corrects);
    double sum = 0, size = 0;
    for (int k = 0; k < Lk; ++k) {
      const float found = rounds ? float(rounded[q * Lk + k]) : dbias2[q * stride + k];
      const double ulp = rounds && sizeof(scalar_t) == 2 ? 1 / 256.0 : 2e-6;
      sum += found, size += std::fabs(before[q][k]);
      const double allowed =
          ulp * std::max(std::fabs(double(before[q][k])), std::fabs(wanted[k])) + (rounds ? 6e-8 : 0.0);
      right &= std::isfinite(wanted[k]) ? std::fabs(found - wanted[k]) <= allowed
               : std::isnan(found)      ? std::isnan(before[q][k])
                                        : found == before[q][k];
      right &= before[q][k] != 0.f || found == 0.f;
      right &= !rounds || dbias2[q * stride + k] == before[q][k] || std::isnan(before[q][k]);
    }
    const bool adds_up = kind != Row::kNaN && kind != Row::kInfinite && corrects;
    right &= !adds_up || rounds || std::fabs(sum) <= 2e-6 * size;
  }
  rows += kQueries;
  if (!right)
    std::printf("wrong: Lk = %d, kind %d, N = %d, partial %d, rounds %d\n", Lk, int(kind), N, partial_keys, rounds);
}

int main(int, char** argv) {
  std::mt19937 random(uint32_t(std::atoi(argv[1])));
  for (int Lk : {1, 2, 31, 32, 67, 128, 389, 512, 516, 1300}) {
    for (Row kind : {Row::kUsual, Row::kHidden, Row::kNaN, Row::kInfinite, Row::kOneElement}) {
      for (int options = 0; options < 3; ++options) {  // all keys; some of them; one row n
        const bool partial_keys = options == 1;
        const int N = options == 2 ? 1 : 2, offset = int(random() % 2);
        const int stride = Lk % 4 != 0 && random() % 2 == 0 ? (Lk + 3) / 4 * 4 : Lk;
        check<cutlass::bfloat16_t>(random, Lk, kind, N, partial_keys, /*rounds=*/true, offset, stride);
        check<cutlass::half_t>(random, Lk, kind, N, partial_keys, /*rounds=*/true, 0, stride);
        check<float>(random, Lk, kind, N, partial_keys, /*rounds=*/false, offset, stride);
      }
    }
  }
  std::printf("%d rows\n", rows);
}
