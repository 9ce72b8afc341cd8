// tiles DTYPE Lk ROW_MASK < bias1: the tiles of one row n and the shift that its bias1 lost, as text.
// plan THREADS N L H SHARE...: how a backward with dbias2 of batch items with these visible shares is cut.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cpu/backward_plan.h"

using namespace ds4s;
using namespace ds4s::cpu;

constexpr int kKeys = 96;

int print_tiles(char** words) {
  BwdParams p{};
  p.B = p.N = 1;
  p.bias1_dtype = std::atoi(words[0]);
  p.Lk = std::atoll(words[1]);
  const uint8_t row_mask = uint8_t(std::atoi(words[2]));
  std::vector<char> bias1(size_t(p.Lk) * 4);
  if (std::fread(bias1.data(), 1, bias1.size(), stdin) == 0) return 1;
  p.bias1 = bias1.data();
  p.row_mask = &row_mask;
  p.bias1_stride[2] = 1;
  const int64_t most = KeyTiles<kKeys>::most(p.Lk);
  std::vector<float> floats(size_t(most) * kKeys);
  std::vector<KeyTile> tiles(static_cast<size_t>(most));
  KeyTiles<kKeys> keys(floats.data(), tiles.data());
  keys.find(p, 0, 0);
  for (int tile = 0; tile < keys.num(); ++tile) {
    std::printf("%lld %d", static_cast<long long>(keys[tile].key), keys[tile].count);
    for (int i = 0; i < keys[tile].count; ++i) std::printf(" %.9g", double(keys.bias1(tile)[i]));
    std::printf("\n");
  }
  return 0;
}

int print_plan(int count, char** words) {
  BwdParams p{};
  p.num_threads = std::atoi(words[0]);
  p.N = std::atoll(words[1]);
  p.Lq = p.Lk = std::atoll(words[2]);
  p.H = std::atoll(words[3]);
  p.B = count - 4;
  p.D = p.Dv = 32;
  float unused;
  p.dbias2 = &unused;
  std::vector<float> bias1(size_t(p.B * p.Lk));
  for (int64_t i = 0; i < p.B * p.Lk; ++i) {
    bias1[size_t(i)] = double(i % p.Lk) < std::atof(words[4 + i / p.Lk]) * double(p.Lk) ? 0.0f : -1e9f;
  }
  p.bias1 = bias1.data();
  p.bias1_stride[0] = p.Lk;
  p.bias1_stride[2] = 1;
  CpuBackwardPlan plan(p, 48);
  std::vector<int32_t> costs(size_t(p.B * p.N + p.B));
  const bool uneven = plan.wants_row_costs(p);
  if (uneven && !find_row_costs<kKeys>(p, costs.data())) return 1;
  plan.share_out(p, uneven ? costs.data() : nullptr);
  std::printf("%d %d %d", int(plan.shared), plan.threads, int(uneven));
  for (int64_t b = 0; uneven && b < p.B; ++b) std::printf(" %d", plan.batch_order[b]);
  return 0;
}

int main(int count, char** words) {
  return std::strcmp(words[1], "tiles") == 0 ? print_tiles(words + 2) : print_plan(count - 2, words + 2);
}
