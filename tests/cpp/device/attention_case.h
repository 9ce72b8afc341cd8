// One call of AttentionKernel as the seed documents write it, against a plain loop on the host.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>

#include "check.h"
#include "kernel_forward.h"

struct AttentionCase {
  int batches, heads, queries, keys, head_dim, head_dim_value;
  float scale;
  bool has_buffer = false;  // output_accum_ptr
};

template <typename T>
constexpr double limit_of(bool tf32 = false) {
  return sizeof(T) == 4 && !tf32 ? 5e-6 : std::is_same<T, cutlass::bfloat16_t>::value ? 5e-3 : 1e-3;
}

// Only the fields that the documents list are set; grid (query blocks, heads, batch).
template <typename Kernel>
void test_attention(const std::string& name, const AttentionCase& c, double limit) {
  using scalar_t = typename Kernel::scalar_t;
  const size_t queries = size_t(c.batches) * c.heads * c.queries, keys = size_t(c.batches) * c.heads * c.keys;
  using Bias1 = typename Kernel::Bias1;
  using Bias2 = typename Kernel::Bias2;
  auto size_of = [&](auto bias) {
    return decltype(bias)::kIsRow ? size_t(c.batches) * c.keys : decltype(bias)::kIsMatrix ? queries * c.keys : 1;
  };
  auto q = random_values<scalar_t>(queries * c.head_dim, 1), k = random_values<scalar_t>(keys * c.head_dim, 2);
  auto v = random_values<scalar_t>(keys * c.head_dim_value, 3);
  auto bias1 = random_values<scalar_t>(size_of(Bias1()), 4), bias2 = random_values<scalar_t>(size_of(Bias2()), 5);
  Device<scalar_t> query(q), key(k), value(v), d_bias1(bias1), d_bias2(bias2), output(queries * c.head_dim_value);
  Device<float> accum(queries * c.head_dim_value), logsumexp(queries);

  typename Kernel::Params params;
  params.query_ptr = query.ptr;
  params.key_ptr = key.ptr;
  params.value_ptr = value.ptr;
  params.bias1_ptr = bias1.size() > 1 ? d_bias1.ptr : nullptr;
  params.bias2_ptr = bias2.size() > 1 ? d_bias2.ptr : nullptr;
  params.output_ptr = output.ptr;
  if (c.has_buffer) params.output_accum_ptr = accum.ptr;
  params.logsumexp_ptr = logsumexp.ptr;
  params.scale = c.scale;
  params.head_dim = c.head_dim;
  if (c.head_dim_value != c.head_dim) params.head_dim_value = c.head_dim_value;
  params.num_queries = c.queries;
  params.num_keys = c.keys;
  params.q_strideM = params.k_strideM = c.head_dim;
  params.v_strideM = c.head_dim_value;
  params.q_strideH = c.queries * c.head_dim;
  params.k_strideH = c.keys * c.head_dim;
  params.v_strideH = c.keys * c.head_dim_value;
  params.q_strideB = c.heads * params.q_strideH;
  params.k_strideB = c.heads * params.k_strideH;
  params.v_strideB = c.heads * params.v_strideH;

  if (const char* reason = Kernel::check_supported(params)) {
    std::printf("%s: ", reason);
    return report(name.c_str(), false);
  }
  dim3 grid((c.queries + Kernel::QTile::kRows - 1) / Kernel::QTile::kRows, c.heads, c.batches);
  check(cudaFuncSetAttribute(attention_forward<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             Kernel::kSharedBytes),
        "shared memory");
  attention_forward<Kernel><<<grid, Kernel::kNumThreads, Kernel::kSharedBytes>>>(params);
  check(cudaGetLastError(), name.c_str());
  check(cudaDeviceSynchronize(), name.c_str());

  auto bias_of = [&](auto bias, const std::vector<scalar_t>& values, size_t batch, size_t query, int key) {
    if (decltype(bias)::kIsRow) return float(values[batch * c.keys + key]);
    return decltype(bias)::kIsMatrix ? float(values[query * c.keys + key]) : 0.f;
  };
  auto out = output.host();
  auto lse = logsumexp.host();
  double wrong = 0, norm = 0, lse_error = 0;
  std::vector<double> p(c.keys);
  for (size_t r = 0; r < queries; ++r) {
    size_t bh = r / c.queries, batch = bh / c.heads;
    const scalar_t* k_head = &k[bh * c.keys * c.head_dim];
    double sum = 0, largest = -INFINITY;
    for (int j = 0; j < c.keys; ++j) {
      double s = 0;
      for (int d = 0; d < c.head_dim; ++d) {
        s += double(float(q[r * c.head_dim + d])) * double(float(k_head[j * c.head_dim + d]));
      }
      s *= c.scale;
      s += bias_of(Bias1(), bias1, batch, r, j) + bias_of(Bias2(), bias2, batch, r, j);
      p[j] = s, largest = std::max(largest, s);
    }
    for (double& x : p) sum += x = std::exp(x - largest);
    double difference = std::fabs(std::log(sum) + largest - lse[r]) / std::max(1., std::fabs(largest));
    lse_error = std::isnan(difference) ? difference : std::max(lse_error, difference);
    for (int d = 0; d < c.head_dim_value; ++d) {
      double want = 0;
      for (int j = 0; j < c.keys; ++j) {
        want += p[j] / sum * double(float(v[(bh * c.keys + j) * c.head_dim_value + d]));
      }
      double got = double(float(out[r * c.head_dim_value + d]));
      wrong += (got - want) * (got - want), norm += want * want;
    }
  }
  report(name.c_str(), std::sqrt(wrong / norm) + lse_error, limit);
}
