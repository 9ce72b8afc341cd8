// sm80/forward/plan.h: `sm80_forward_plan NAME=VALUE...` prints the plan of a call. Names: B N Lq Lk H; bytes (of an
// element); bias1, bias2, row_mask; gap (elements between two of bias1), row (of bias2, in elements), repeats (bias2 is
// the same for all heads), odd (bias2 is not on 16 bytes); D; tiles (the unit reads bias2 in tiles).
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

#include "sm80/forward/plan.h"

int main(int argc, char** argv) {
  std::map<std::string, int64_t> given{{"B", 1}, {"H", 4}, {"bytes", 2}, {"bias1", 1}, {"bias2", 1}, {"gap", 1}};
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    given[word.substr(0, word.find('='))] = std::atoll(word.c_str() + word.find('=') + 1);
  }
  alignas(256) static char some[256];
  auto pointer = [&](const char* name) { return given[name] ? some : nullptr; };
  ds4s::FwdParams p{};
  p.B = given["B"], p.N = given["N"], p.Lq = given["Lq"], p.Lk = given["Lk"], p.H = given["H"];
  p.D = p.Dv = given["D"];
  p.bias1 = pointer("bias1"), p.row_mask = reinterpret_cast<uint8_t*>(pointer("row_mask"));
  p.bias2 = given["bias2"] ? some + (given["odd"] ? given["bytes"] : 0) : nullptr;
  p.bias1_stride[0] = p.N * p.Lk, p.bias1_stride[1] = p.Lk, p.bias1_stride[2] = given["gap"];
  const int64_t row = given["row"] ? given["row"] : p.Lk;
  p.bias2_stride[1] = given["repeats"] ? 0 : p.Lq * row, p.bias2_stride[0] = p.H * p.bias2_stride[1];
  p.bias2_stride[2] = row, p.bias2_stride[3] = 1;
  const ds4s::ForwardUnit unit{int(given["bytes"]), 64, 32, p.bias1 != nullptr, p.bias2 != nullptr,
                               given["tiles"] != 0};
  const ds4s::Sm80ForwardPlan plan = ds4s::make_plan(p, unit);
  char text[256];
  ds4s::PlanText out(text, sizeof(text));
  plan.print(out, unit);
  std::printf("blocks=%lld %s\n", static_cast<long long>(plan.blocks), text);
}
