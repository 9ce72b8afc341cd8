// AttentionKernel with other tiles, types and families, against a plain loop on the host: every pair of values of two
// parameters stands in one of the rows. scripts/forward_tiles compiles the whole product.
//   nvcc -std=c++17 -arch=native -I csrc/deepspeed4science/evoformer_attn -I <cutlass>/include; exit code 0 when
//   everything agrees.
#include "attention_case.h"

using namespace cutlass::arch;
using cutlass::bfloat16_t;
using cutlass::half_t;

template <typename scalar_t, typename ArchTag, bool kAligned, int kQueries, int kKeys, bool kSingle>
void test(const char* type, const char* family) {
  using Kernel = AttentionKernel<scalar_t, ArchTag, kAligned, kQueries, kKeys, kSingle, true, BroadcastA, BroadcastB>;
  const int head_dim = kAligned ? 24 : 27;
  std::string name = std::string(type) + " " + family + (kAligned ? " aligned " : " unaligned ") +
                     std::to_string(kQueries) + " x " + std::to_string(kKeys) +
                     (kSingle ? ", O in registers" : ", several value iterations");
  test_attention<Kernel>(name, {2, 2, 150, 333, head_dim, head_dim, 0.2f}, limit_of<scalar_t>());
}

int main() {
  test<half_t, Sm80, true, 32, 32, true>("half", "Sm80");
  test<bfloat16_t, Sm80, false, 32, 64, false>("bfloat16", "Sm80");
  test<float, Sm80, true, 32, 96, false>("float", "Sm80");
  test<half_t, Sm75, false, 32, 128, true>("half", "Sm75");
  test<bfloat16_t, Sm80, true, 64, 32, true>("bfloat16", "Sm80");
  test<float, Sm75, false, 64, 64, true>("float", "Sm75");
  test<half_t, Sm70, false, 64, 96, false>("half", "Sm70");
  test<bfloat16_t, Sm80, true, 64, 128, false>("bfloat16", "Sm80");
  test<float, Sm70, false, 96, 32, false>("float", "Sm70");
  test<half_t, Sm75, true, 96, 64, false>("half", "Sm75");
  test<bfloat16_t, Sm80, false, 96, 96, true>("bfloat16", "Sm80");
  test<float, Sm80, true, 96, 128, true>("float", "Sm80");
  test<half_t, Sm70, true, 128, 32, false>("half", "Sm70");
  test<half_t, Sm80, true, 128, 64, true>("half", "Sm80");
  test<float, Sm75, true, 128, 96, true>("float", "Sm75");
  test<bfloat16_t, Sm80, false, 128, 128, true>("bfloat16", "Sm80");
  test<float, Sm70, false, 128, 128, false>("float", "Sm70");
  using Exact = AttentionKernel<float, Sm80, true, 96, 128, true, true, BroadcastA, BroadcastB>;
  test_attention<Exact>("float Sm80, scale below 0", {2, 2, 150, 333, 24, 24, -0.2f}, limit_of<float>());
  // TF32.
  using Tf32 = AttentionKernel<float, Sm80, true, 64, 64, true, true, BroadcastA, BroadcastB, 64, 64, /*kTf32_=*/true>;
  test_attention<Tf32>("TF32", {2, 2, 150, 333, 24, 24, -0.2f}, limit_of<float>(/*tf32=*/true));
  // The row bias second, and two of them.
  using Second = AttentionKernel<half_t, Sm80, true, 32, 32, true, true, BroadcastB, BroadcastA, 32>;
  test_attention<Second>("half Sm80, matrix and row", {2, 2, 150, 333, 24, 24, 0.2f}, limit_of<half_t>());
  using Both = AttentionKernel<bfloat16_t, Sm80, true, 32, 32, true, true, BroadcastA, BroadcastA, 32>;
  test_attention<Both>("bfloat16 Sm80, two rows", {2, 2, 150, 333, 24, 24, 0.2f}, limit_of<bfloat16_t>());
  std::printf("%d failures\n", failures);
  return failures != 0;
}
