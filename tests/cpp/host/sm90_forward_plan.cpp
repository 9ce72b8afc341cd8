// sm90/forward/plan.h: `sm90_forward_plan D N Lq H COPIED BLOCKS` prints the plan of a call with one b; COPIED: bias2
// has rows that the tensor memory accelerator cannot read.
#include <cstdio>
#include <cstdlib>

#include "sm90/forward/plan.h"

int main(int, char** argv) {
  using namespace ds4s::sm90;
  alignas(256) static char bias2[256];
  auto number = [&](int i) { return std::atoll(argv[i]); };
  ds4s::FwdParams p{};
  p.B = 1, p.D = p.Dv = number(1), p.N = number(2), p.Lq = p.Lk = number(3), p.H = number(4), p.bias2 = bias2;
  const int64_t row = p.Lk + (number(5) ? 1 : 0);
  p.bias2_stride[0] = p.H * p.Lq * row, p.bias2_stride[1] = p.Lq * row, p.bias2_stride[2] = row, p.bias2_stride[3] = 1;
  ForwardFacts device;
  device.one_row_blocks = number(6);
  const Sm90ForwardPlan plan = p.D <= 32   ? make_plan<32>(p, device)
                               : p.D <= 64 ? make_plan<64>(p, device)
                                           : make_plan<128>(p, device);
  char text[256];
  ds4s::PlanText out(text, sizeof(text));
  plan.print(out);
  std::puts(text);
}
