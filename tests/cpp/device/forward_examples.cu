// The forward headers used the way their published examples use them, each against a plain loop on the host:
//   AttentionBiasEpilogue<MatrixShape<64, 64>, half_t, 256, BroadcastA, ...> writing a float tile,
//   MemoryEfficientAttentionNormalize first, middle and last,
//   AttentionKernel<half_t, Sm80, true, 64, 64, false, true, BroadcastA, BroadcastB>, launched over (query blocks,
//     heads, batch) with the fields of Params that the documents list, head dimensions up to 256, any scale.
// A program: nvcc -std=c++17 -arch=native -I csrc/deepspeed4science/evoformer_attn -I <cutlass>/include; exit code 0
// when everything agrees. Elsewhere it is compiled only.
#include "attention_case.h"

namespace {

using cutlass::half_t;

// ---- AttentionBiasEpilogue ----

template <template <typename, typename, typename> class Second>
__global__ void load_bias(half_t* bias1_ptr, half_t* bias2_ptr, int seq_len, float* out) {
  __shared__ float smem_bias[64][64 + 4];
  using BiasEpilogue = AttentionBiasEpilogue<cutlass::MatrixShape<64, 64>, half_t, 256, BroadcastA, Second>;
  int thread_id = threadIdx.x;
  BiasEpilogue bias_loader;
  bias_loader({smem_bias[0], 64 + 4}, bias1_ptr, bias2_ptr, thread_id, {64, 64}, seq_len);
  __syncthreads();
  for (int i = thread_id; i < 64 * 64; i += 256) out[i] = smem_bias[i / 64][i % 64];
}

void test_bias_epilogue() {
  const int seq_len = 72;
  auto row = random_values<half_t>(seq_len, 1), matrix = random_values<half_t>(seq_len * seq_len, 2);
  Device<half_t> d_row(row), d_matrix(matrix);
  Device<float> d_out(64 * 64);
  for (int second = 0; second < 2; ++second) {
    if (second) {
      load_bias<BroadcastB><<<1, 256>>>(d_row.ptr, d_matrix.ptr, seq_len, d_out.ptr);
    } else {
      load_bias<BroadcastNoLoad><<<1, 256>>>(d_row.ptr, nullptr, seq_len, d_out.ptr);
    }
    check(cudaDeviceSynchronize(), "load_bias");
    auto out = d_out.host();
    double error = 0;
    for (int i = 0; i < 64 * 64; ++i) {
      double want = float(row[i % 64]) + (second ? float(matrix[i / 64 * seq_len + i % 64]) : 0.f);
      error = std::fmax(error, std::fabs(out[i] - want));
      if (std::isnan(out[i])) error = NAN;
    }
    report(second ? "AttentionBiasEpilogue, BroadcastA + BroadcastB" : "AttentionBiasEpilogue, BroadcastA", error,
           1e-6);
  }
}

// ---- MemoryEfficientAttentionNormalize ----

void test_normalize() {
  constexpr int kQueriesPerBlock = 4;
  float si[kQueriesPerBlock] = {2.f, 4.f, 0.5f, 3.f};
  float mi_prime[kQueriesPerBlock] = {1.f, 0.5f, 0.25f, 0.125f};
  using Rows = cutlass::Array<float, kQueriesPerBlock>;
  using NormalizeFirst = MemoryEfficientAttentionNormalize<half_t, half_t, 8, float, float, true, false, Rows>;
  using NormalizeMid = MemoryEfficientAttentionNormalize<half_t, half_t, 8, float, float, false, false, Rows>;
  using NormalizeLast = MemoryEfficientAttentionNormalize<half_t, half_t, 8, float, float, false, true, Rows>;
  NormalizeFirst normalize_first(si, mi_prime);
  NormalizeMid normalize_mid(si, mi_prime);
  NormalizeLast normalize_last(si, mi_prime);
  double error = 0;
  for (int row = 0; row < kQueriesPerBlock; ++row) {
    cutlass::Array<float, 8> accumulator;
    cutlass::Array<half_t, 8> source;
    for (int i = 0; i < 8; ++i) accumulator[i] = 0.25f * float(i + row), source[i] = half_t(0.5f * float(i));
    auto first = normalize_first(row, accumulator);
    auto mid = normalize_mid(row, accumulator, source);
    auto last = normalize_last(row, accumulator, source);
    for (int i = 0; i < 8; ++i) {
      float a = accumulator[i], s = float(source[i]);
      float want_mid = a + mi_prime[row] * s;
      error = std::fmax(error, std::fabs(float(first[i]) - a));
      error = std::fmax(error, std::fabs(float(mid[i]) - want_mid));
      error = std::fmax(error, std::fabs(float(last[i]) - want_mid / si[row]) / std::fmax(1.f, want_mid / si[row]));
    }
  }
  report("MemoryEfficientAttentionNormalize, first, middle, last", error, 1e-3);
}

// ---- AttentionKernel ----

using ForwardKernel = AttentionKernel<cutlass::half_t,      // FP16
                                      cutlass::arch::Sm80,  // Ampere
                                      true,                 // Aligned
                                      64,                   // Queries per block
                                      64,                   // Keys per block
                                      false,                // Multi-iteration for large Dv
                                      true,                 // Support bias
                                      BroadcastA,           // Row-wise bias
                                      BroadcastB            // Matrix bias
                                      >;
using AttentionWithBias =
    AttentionKernel<cutlass::half_t, cutlass::arch::Sm80, true, 64, 64, false, true, BroadcastA, BroadcastNoLoad>;
// The document's formula, with kNumThreads the number of threads that is launched.
static_assert(ForwardKernel::kMinBlocksPerSm ==
              getWarpsPerSm<cutlass::half_t, cutlass::arch::Sm80>() / (ForwardKernel::kNumThreads / 32));

void test_forward() {
  auto test = [](const char* name, const AttentionCase& c) {
    test_attention<ForwardKernel>(name, c, limit_of<half_t>());
  };
  const float scale = 1.0f / sqrtf(32);
  test("AttentionKernel", {4, 3, 136, 136, 32, 32, scale});
  test("AttentionKernel through the buffer", {4, 3, 136, 136, 32, 32, scale, true});
  test("AttentionKernel, bias rows of 77 elements", {2, 3, 77, 77, 32, 32, scale});
  test("AttentionKernel, D = 136", {2, 2, 200, 200, 136, 136, 1 / sqrtf(136)});
  test("AttentionKernel, D = 136 through the buffer", {2, 2, 200, 200, 136, 136, 1 / sqrtf(136), true});
  test("AttentionKernel, D = 256", {2, 2, 200, 200, 256, 256, 1 / 16.f});
  test("AttentionKernel, D = 256 through the buffer", {2, 2, 200, 200, 256, 256, 1 / 16.f, true});
  test("AttentionKernel, D = 32, Dv = 200", {2, 2, 100, 170, 32, 200, scale});
  test("AttentionKernel, scale 0", {2, 2, 100, 170, 32, 32, 0.f});
  test("AttentionKernel, scale below 0", {2, 2, 100, 170, 32, 32, -2.f});
  test("AttentionKernel, scale below 0, D = 136", {2, 2, 100, 170, 136, 136, -0.5f, true});
  test_attention<AttentionWithBias>("AttentionKernel, row bias", {4, 3, 136, 136, 32, 32, scale}, limit_of<half_t>());
}

void test_check_supported() {
  alignas(16) half_t x[16];
  using Kernel = AttentionKernel<half_t, cutlass::arch::Sm80, true, 64, 64, true, true, BroadcastA, BroadcastNoLoad>;
  typename Kernel::Params good;
  good.query_ptr = good.key_ptr = good.value_ptr = x;
  good.output_ptr = good.bias1_ptr = x;
  good.head_dim = 32, good.num_queries = good.num_keys = 77;
  good.q_strideM = good.k_strideM = good.v_strideM = 32;
  report("check_supported", Kernel::check_supported(good) == nullptr);
  auto refused = [&](const char* name, auto change) {
    auto p = good;
    change(p);
    report(name, Kernel::check_supported(p) != nullptr);
  };
  refused("check_supported: a stride of half a piece", [](auto& p) { p.k_strideM = 36; });
  refused("check_supported: D is not whole pieces", [](auto& p) { p.head_dim = 30; });
  refused("check_supported: an address between pieces", [&](auto& p) { p.query_ptr = x + 1; });
  refused("check_supported: D above the tier", [](auto& p) { p.head_dim = 136; });
  refused("check_supported: no bias", [](auto& p) { p.bias1_ptr = nullptr; });
  refused("check_supported: no keys", [](auto& p) { p.num_keys = 0; });
}

}  // namespace

int main() {
  test_check_supported();
  test_bias_epilogue();
  test_normalize();
  test_forward();
  std::printf("%d failures\n", failures);
  return failures != 0;
}
