// sm90/forward/mask.h against plain loops: `forward_mask SEED` reads random rows of bias1 and prints a line for each
// that went wrong, and at the end how many there were.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "sm90/forward/mask.h"

using namespace ds4s;

int rows = 0;

// Runs of hidden keys, by -inf and by numbers around the threshold; NaN, infinity and huge shifts at times.
template <typename Element>
std::vector<Element> random_row(std::mt19937& random, int Lk) {
  const bool half = sizeof(Element) == 2 && std::is_same<Element, cutlass::half_t>::value;
  const float threshold = half ? 1e4f : 1e8f;
  const float shifts[] = {0.f, 0.f, -2e4f, half ? 3e4f : -1e9f, half ? -6e4f : -3e38f};
  const float shift = shifts[random() % 5], infinite = infinity();
  std::vector<Element> row(Lk);
  int kind = 0;
  const int begin = random() % 4 == 0 ? int(random() % Lk) : 0;  // nothing before it is visible
  for (int k = 0; k < Lk; ++k) {
    if (random() % (random() % 4 == 0 ? 3 : 90) == 0) kind = random() % 5;
    float x = float(random() % 1000) / 500.f;
    if (kind == 1) x = -infinite;
    if (kind == 2 || k < begin) x -= 3.f * threshold;
    if (kind == 3) x -= 0.4f * threshold;
    x += shift;
    row[k] = Element(std::isfinite(x) ? std::max(x, half ? -65504.f : -3.38e38f) : x);
  }
  if (random() % 6 == 0) row[random() % Lk] = Element(std::numeric_limits<float>::quiet_NaN());
  if (random() % 6 == 0) row[random() % Lk] = Element(infinite);
  if (random() % 8 == 0) std::fill(row.begin(), row.end(), Element(-infinite));
  return row;
}

template <typename Element>
void check(std::mt19937& random, int Lk, int stride, bool has_bias1) {
  constexpr float kThreshold = std::is_same<Element, cutlass::half_t>::value ? 1e4f : 1e8f;
  constexpr int kRows = 2;
  const int N = random() % 4 == 0 ? 1 : 2;
  std::vector<Element> values[kRows];
  std::vector<Element> memory(size_t(kRows) * Lk * stride + 8);
  Element* bias1 = memory.data();
  while (reinterpret_cast<uintptr_t>(bias1) % 16 != 0) ++bias1;
  uint8_t read[kRows];
  for (int n = 0; n < kRows; ++n) {
    values[n] = random_row<Element>(random, Lk), read[n] = random() % 5 != 0;
    for (int k = 0; k < Lk; ++k) bias1[(n * Lk + k) * stride] = values[n][k];
  }
  sm90::ForwardArgs args{};
  args.bias1 = has_bias1 ? bias1 : nullptr, args.row_mask = read;
  args.bias1_stride[1] = int64_t(Lk) * stride, args.bias1_stride[2] = stride, args.row_mask_stride[1] = 1;
  args.N = N, args.Lk = Lk, args.bias1_in_vectors = stride == 1 && Lk % 8 == 0;

  const int num_steps = (Lk + 63) / 64;
  const int num_ahead = random() % 2;
  static sm90::TileMask<kRows> mask;
  std::vector<std::thread> lanes;
  for (int lane = 0; lane < 32; ++lane) {
    lanes.emplace_back([&, lane] {
      threadIdx.x = lane;
      for (int n = 0; n < kRows; ++n) {
        if (has_bias1) {
          sm90::RowScan<Element, true>(args, 0, n).run(mask, n, num_ahead);
        } else {
          sm90::RowScan<Element, false>(args, 0, n).run(mask, n, num_ahead);
        }
      }
    });
  }
  for (auto& lane : lanes) lane.join();

  std::vector<bool> any(num_steps);
  bool right = true;
  for (int n = 0; n < kRows; ++n) {
    float largest = -infinity();
    for (Element x : values[n]) {
      if (std::isfinite(float(x))) largest = std::max(largest, float(x));
    }
    if (!has_bias1) largest = 0.f;
    bool sees_any = false;
    int end = 0;
    for (int step = 0; step < num_steps; ++step) {
      bool sees = false;
      for (int k = 64 * step; k < std::min(64 * step + 64, Lk); ++k) {
        const float x = has_bias1 ? float(values[n][k]) : 0.f;
        const bool visible =
            std::isnan(x) || x == infinity() || (std::isfinite(x) && (x == largest || x > largest - kThreshold));
        sees |= visible;
        if (visible && n < N && read[n] != 0) end = k + 1;
      }
      sees &= n < N && read[n] != 0;
      sees_any |= sees;
      if (step == 0) right &= mask.sees_first[n] == sees;
      sees |= step < num_ahead;
      right &= (mask.steps[n][step / 32] >> step % 32 & 1) == uint32_t(sees);
      any[step] = any[step] || sees;
    }
    right &= mask.sees_any[n] == sees_any && mask.end[n] == end;
    if (sees_any) right &= mask.shift[n] == (std::isfinite(largest) ? largest : 0.f);
    ++rows;
  }
  sm90::TileSteps<kRows> steps(&mask, Lk);
  right &= steps.count() == std::count(any.begin(), any.end(), true);
  steps.skip(num_ahead);
  for (int step = num_ahead; step < num_steps && right; ++step) {
    if (any[step]) right &= steps.next() == 64 * step;
  }
  if (!right) std::printf("wrong: Lk = %d, stride %d, bias1 %d\n", Lk, stride, has_bias1);
}

int main(int, char** argv) {
  std::mt19937 random(std::atoi(argv[1]));
  for (int i = 0; i < 240; ++i) {
    const int lengths[] = {1, 7, 64, 72, 384, 501, 768, 2048, 2056, 4500};
    const int Lk = lengths[i % 10];
    const int stride = i % 3 == 0 ? 2 : 1;
    check<cutlass::bfloat16_t>(random, Lk, stride, i % 20 < 19);
    check<cutlass::half_t>(random, Lk, stride, true);
  }
  // All keys for everybody, without a mask.
  sm90::TileSteps<2> all(nullptr, 130);
  if (all.count() != 3 || all.next() != 0 || all.next() != 64 || all.next() != 128) std::printf("wrong: no mask\n");
  std::printf("%d rows\n", rows);
}
