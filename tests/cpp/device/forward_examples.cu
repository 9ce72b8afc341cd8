// The forward headers used the way their published examples use them, each against a plain loop on the host:
//   AttentionBiasEpilogue<MatrixShape<64, 64>, half_t, 256, BroadcastA, ...> writing a float tile,
//   MemoryEfficientAttentionNormalize first, middle and last,
//   AttentionKernel<half_t, Sm80, true, 64, 64, false, true, BroadcastA, BroadcastB> (and Sm75, Sm70, both value
//   modes),
//     launched over (query blocks, heads, batch).
// A program: nvcc -std=c++17 -arch=native -I csrc/deepspeed4science/evoformer_attn -I <cutlass>/include; exit code 0
// when everything agrees. Elsewhere it is compiled only.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "kernel_forward.h"

namespace {

using cutlass::half_t;

int failures = 0;

void report(const char* name, double error, double limit) {
  bool ok = error <= limit;  // false for NaN
  std::printf("%s %s: error %.2e, limit %.2e\n", ok ? "ok  " : "FAIL", name, error, limit);
  failures += !ok;
}

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("FAIL %s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

template <typename T>
struct Device {
  T* ptr = nullptr;
  size_t count;
  explicit Device(size_t n) : count(n) {
    check(cudaMalloc(&ptr, n * sizeof(T)), "cudaMalloc");
    check(cudaMemset(ptr, 0xff, n * sizeof(T)), "cudaMemset");  // NaN: what is not written shows
  }
  explicit Device(const std::vector<T>& host) : Device(host.size()) {
    check(cudaMemcpy(ptr, host.data(), count * sizeof(T), cudaMemcpyHostToDevice), "copy to device");
  }
  ~Device() { cudaFree(ptr); }
  std::vector<T> host() const {
    std::vector<T> x(count);
    check(cudaMemcpy(x.data(), ptr, count * sizeof(T), cudaMemcpyDeviceToHost), "copy to host");
    return x;
  }
};

template <typename T>
std::vector<T> random_values(size_t n, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<T> x(n);
  for (T& value : x) value = T(normal(generator));
  return x;
}

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

template <typename ForwardKernel>
void test_attention(const char* name, int head_dim_value) {
  const int B = 2, N = 2, num_heads = 3, seq_len = 136, head_dim = 32;
  const int batch_size = B * N;
  const size_t rows = size_t(batch_size) * num_heads * seq_len;
  auto q = random_values<half_t>(rows * head_dim, 1), k = random_values<half_t>(rows * head_dim, 2);
  auto v = random_values<half_t>(rows * head_dim_value, 3);
  auto bias1 = random_values<half_t>(size_t(batch_size) * seq_len, 4);
  auto bias2 = random_values<half_t>(size_t(B) * num_heads * seq_len * seq_len, 5);
  Device<half_t> query(q), key(k), value(v), d_bias1(bias1), d_bias2(bias2), output(rows * head_dim_value);
  Device<float> accum(rows * head_dim_value), logsumexp(rows);

  typename ForwardKernel::Params params;
  params.query_ptr = query.ptr;
  params.key_ptr = key.ptr;
  params.value_ptr = value.ptr;
  params.bias1_ptr = d_bias1.ptr;
  params.bias2_ptr = d_bias2.ptr;
  params.output_ptr = output.ptr;
  params.output_accum_ptr = accum.ptr;
  params.logsumexp_ptr = logsumexp.ptr;
  params.scale = 1.0f / sqrtf(head_dim);
  params.head_dim = head_dim;
  params.head_dim_value = head_dim_value;
  params.num_queries = params.num_keys = seq_len;
  params.num_heads = num_heads;
  params.num_batches = batch_size;
  params.B = B;
  params.N = N;
  params.q_strideM = params.k_strideM = head_dim;
  params.v_strideM = params.o_strideM = head_dim_value;
  params.q_strideH = params.k_strideH = int64_t(seq_len) * head_dim;
  params.v_strideH = params.o_strideH = int64_t(seq_len) * head_dim_value;
  params.q_strideB = params.k_strideB = params.q_strideH * num_heads;
  params.v_strideB = params.o_strideB = params.v_strideH * num_heads;
  params.bias1_strideB = int64_t(N) * seq_len;
  params.bias1_strideN = seq_len;
  params.bias2_strideB = int64_t(num_heads) * seq_len * seq_len;
  params.bias2_strideH = int64_t(seq_len) * seq_len;
  params.bias2_strideM = seq_len;

  dim3 grid((seq_len + 64 - 1) / 64, num_heads, batch_size);
  dim3 block(ForwardKernel::kNumThreads);
  check(cudaFuncSetAttribute(attention_forward<ForwardKernel>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             ForwardKernel::kSharedBytes),
        "shared memory");
  attention_forward<ForwardKernel><<<grid, block, ForwardKernel::kSharedBytes>>>(params);
  check(cudaGetLastError(), "launch");
  check(cudaDeviceSynchronize(), "attention_forward");

  auto out = output.host();
  auto lse = logsumexp.host();
  double wrong = 0, norm = 0, lse_error = 0;
  std::vector<double> p(seq_len);
  for (size_t row = 0; row < rows; ++row) {
    size_t i = row % seq_len, head_row = row - i, bh = row / seq_len, batch = bh / num_heads, h = bh % num_heads;
    double sum = 0;
    for (int j = 0; j < seq_len; ++j) {
      double s = 0;
      for (int d = 0; d < head_dim; ++d)
        s += double(float(q[row * head_dim + d])) * float(k[(head_row + j) * head_dim + d]);
      s = s * params.scale + float(bias1[batch * seq_len + j]) +
          float(bias2[(((batch / N) * num_heads + h) * seq_len + i) * seq_len + j]);
      sum += p[j] = std::exp(s);
    }
    lse_error = std::fmax(lse_error, std::fabs(std::log(sum) - lse[row]));
    for (int d = 0; d < head_dim_value; ++d) {
      double want = 0;
      for (int j = 0; j < seq_len; ++j) want += p[j] / sum * float(v[(head_row + j) * head_dim_value + d]);
      double got = float(out[row * head_dim_value + d]);
      wrong += (got - want) * (got - want);
      norm += want * want;
    }
  }
  report(name, std::sqrt(wrong / norm) + lse_error, 1e-3);
}

}  // namespace

int main() {
  using namespace cutlass::arch;
  test_bias_epilogue();
  test_normalize();
  using Sm80Buffered = AttentionKernel<half_t, Sm80, true, 64, 64, false, true, BroadcastA, BroadcastB>;
  using Sm75Buffered = AttentionKernel<half_t, Sm75, true, 64, 64, false, true, BroadcastA, BroadcastB>;
  using Sm70Buffered = AttentionKernel<half_t, Sm70, true, 64, 64, false, true, BroadcastA, BroadcastB>;
  using Sm80Registers = AttentionKernel<half_t, Sm80, true, 64, 64, true, true, BroadcastA, BroadcastB, 32>;
  using Sm70Unaligned = AttentionKernel<half_t, Sm70, false, 64, 32, true, true, BroadcastA, BroadcastB, 32>;
  test_attention<Sm80Registers>("AttentionKernel Sm80, O in registers", 32);
  test_attention<Sm70Unaligned>("AttentionKernel Sm70, unaligned", 29);
  test_attention<Sm80Buffered>("AttentionKernel Sm80, O through the buffer", 32);
  test_attention<Sm80Buffered>("AttentionKernel Sm80, Dv = 200 through the buffer", 200);
  test_attention<Sm75Buffered>("AttentionKernel Sm75, O through the buffer", 32);
  test_attention<Sm70Buffered>("AttentionKernel Sm70, O through the buffer", 72);
  std::printf("%d failures\n", failures);
  return failures != 0;
}
