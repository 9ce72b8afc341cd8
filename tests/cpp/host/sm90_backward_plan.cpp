// sm90/backward/plan.h: `sm90_backward_plan NAME=VALUE...` prints the plan of a call. Names: D B N Lq Lk H, bias1,
// bias2, row_mask, bias1_gap (elements between two of bias1), odd_bias2 (rows that have to be copied), deterministic;
// dq dk dv dbias1 dbias2 (which are wanted), odd_dbias2 (not on 16 bytes), rounded_dbias2; blocks (multiprocessors),
// clusters (of two blocks), no_fused (no room for kernels that keep dq in shared memory); float16 (not bfloat16).
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

#include "sm90/backward/plan.h"

using namespace ds4s::sm90;

template <int kHeadDim>
Sm90BackwardPlan plan_of(const ds4s::BwdParams& p, const BackwardFacts& device, bool half_dq_sums) {
  return p.bias2 ? make_plan<kHeadDim, true>(p, device, half_dq_sums)
                 : make_plan<kHeadDim, false>(p, device, half_dq_sums);
}

int main(int argc, char** argv) {
  std::map<std::string, int64_t> given{{"B", 1}, {"H", 4}, {"bias2", 1}, {"blocks", 132}, {"clusters", 66}};
  for (const char* name : {"dq", "dk", "dv", "dbias2"}) given[name] = 1;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    given[word.substr(0, word.find('='))] = std::atoll(word.c_str() + word.find('=') + 1);
  }
  alignas(256) static char some[256];
  auto pointer = [&](const char* name) { return given[name] ? static_cast<void*>(some) : nullptr; };
  ds4s::BwdParams p{};
  p.B = given["B"], p.N = given["N"], p.Lq = given["Lq"], p.Lk = given["Lk"], p.H = given["H"];
  p.D = p.Dv = given["D"], p.scale = 1.f;
  p.bias1 = pointer("bias1"), p.bias2 = pointer("bias2");
  p.row_mask = static_cast<uint8_t*>(pointer("row_mask"));
  p.dq = pointer("dq"), p.dk = pointer("dk"), p.dv = pointer("dv");
  p.dbias1 = static_cast<float*>(pointer("dbias1")), p.dbias2 = static_cast<float*>(pointer("dbias2"));
  if (given["odd_dbias2"]) ++p.dbias2;
  p.rounded_dbias2 = pointer("rounded_dbias2");
  p.deterministic = int32_t(given["deterministic"]);
  p.dbias2_stride = given["dbias2_stride"] ? given["dbias2_stride"] : p.Lk;
  p.bias1_stride[0] = p.N * p.Lk, p.bias1_stride[1] = p.Lk, p.bias1_stride[2] = 1 + given["bias1_gap"];
  const int64_t row = given["odd_bias2"] ? p.Lk + 1 : p.Lk;
  p.bias2_stride[0] = p.H * p.Lq * row, p.bias2_stride[1] = p.Lq * row, p.bias2_stride[2] = row, p.bias2_stride[3] = 1;

  BackwardFacts device;
  device.num_multiprocessors = int(given["blocks"]);
  for (int64_t& blocks : device.resident_blocks) blocks = given["blocks"];
  for (Kernel kernel : {Kernel::kNarrowPaired, Kernel::kLongPaired, Kernel::kPartsPaired, Kernel::kDqGlobalPaired,
                        Kernel::kSplitFused, Kernel::kPairedDbias2}) {
    device.resident_blocks[int(kernel)] = 2 * given["clusters"];
  }
  device.resident_blocks[int(Kernel::kTripleFused)] = 2 * given["clusters"] / 3 * 3;
  device.resident_blocks[int(Kernel::kQuadFused)] = given["clusters"] / 2 * 4;
  device.resident_blocks[int(Kernel::kClusterFused)] = given["clusters"] / 4 * 8;
  for (Kernel kernel :
       {Kernel::kFused, Kernel::kNarrowFused, Kernel::kNarrowPaired, Kernel::kLongFused, Kernel::kLongPaired,
        Kernel::kPartsPaired, Kernel::kSplitFused, Kernel::kTripleFused, Kernel::kQuadFused, Kernel::kClusterFused}) {
    if (given["no_fused"]) device.resident_blocks[int(kernel)] = 0;
  }
  const bool half = !given["float16"];
  const Sm90BackwardPlan plan = p.D <= 32   ? plan_of<32>(p, device, half)
                                : p.D <= 48 ? plan_of<48>(p, device, half)
                                : p.D <= 64 ? plan_of<64>(p, device, half)
                                            : plan_of<128>(p, device, half);
  char text[1024];
  ds4s::PlanText out(text, sizeof(text));
  plan.print(out);
  std::puts(text);
  if (!plan.takes_dbias2_rows(p)) std::puts(" refused=1");
}
