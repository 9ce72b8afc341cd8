// kernel_forward.h in full precision, whose products need no matrix instruction: blocks of one warp, one after another,
// against a plain loop, with scales of both signs. Prints the number of calls; stops at the first wrong one.
#include <cuda_fp16.h>

#include "common/ptx.h"

// What CUDA's compiler knows, for a block of one warp.
#undef __global__
#define __global__
#undef __shared__
#define __shared__
int __dp4a(int, int, int);
unsigned __byte_perm(unsigned, unsigned, unsigned);
__half2 __hfma2(__half2, __half2, __half2);
template <typename, typename>
constexpr int getWarpsPerSm() {
  return 8;
}

namespace ds4s {

template <typename ArchTag>
struct ArchTraits {
  static constexpr int kCapability = ArchTag::kMinComputeCapability;
  static constexpr bool kHasCpAsync = false;
};

inline int uniform(int x) { return x; }

namespace ptx {
inline float shfl_quad(float x, int lane) {
  return bits_of<float>(exchange(bits_of<uint32_t>(x))[(threadIdx.x & ~3) + lane]);
}
inline uint32_t thread_x() { return uint32_t(threadIdx.x); }
template <typename T>
void keep(T&) {}
template <typename>
uint32_t scale_word(uint32_t x, float factor) {
  return bits_of<uint32_t>(bits_of<float>(x) * factor);
}
inline float2 load_pair(const float* x) { return {x[0], x[1]}; }
inline uint32_t load_bits(const float* x) { return bits_of<uint32_t>(*x); }
template <>
inline float bits_to_float<float>(uint32_t x) {
  return bits_of<float>(x);
}
// Not called: of other types and families.
void cp_async_commit();
template <int>
void cp_async_wait();
template <typename... Any>
void ldmatrix(Any&&...);
template <typename... Any>
void ldmatrix_trans(Any&&...);
template <typename... Any>
void mma_16x8x8_tf32(Any&&...);
template <typename, typename, typename... Any>
void mma_16x8x16(Any&&...);
template <typename... Any>
void mma_8x8x4_row_col(Any&&...);
template <typename... Any>
void mma_8x8x4_row_row(Any&&...);
}  // namespace ptx
}  // namespace ds4s
using ds4s::blockIdx, ds4s::gridDim, ds4s::threadIdx;

#include <cutlass/arch/arch.h>

#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "kernel_forward.h"

alignas(16) char shared[1 << 16];  // the kernel's dynamic shared memory

using Kernel = AttentionKernel<float, cutlass::arch::Sm75, /*isAligned_=*/true, 32, 32, /*kSingleValueIteration_=*/true,
                               /*kSupportsBias_=*/true, BroadcastA, BroadcastB, /*kHeadDim_=*/16>;
static_assert(Kernel::kNumThreads == 32 && Kernel::kSharedBytes <= sizeof(shared), "a block is a warp");

void test(float scale) {
  constexpr int kQueries = 40, kKeys = 50, kHeadDim = 16;
  std::mt19937 random(std::random_device{}());
  auto values = [&](int count) {
    std::vector<float> x(count);
    for (float& one : x) one = std::normal_distribution<float>()(random);
    return x;
  };
  const auto q = values(kQueries * kHeadDim), k = values(kKeys * kHeadDim), v = values(kKeys * kHeadDim);
  auto bias1 = values(kKeys), bias2 = values(kQueries * kKeys);
  std::vector<float> o(q.size(), NAN), lse(kQueries, NAN);
  Kernel::Params params;
  params.query_ptr = q.data(), params.key_ptr = k.data(), params.value_ptr = v.data(), params.output_ptr = o.data();
  params.bias1_ptr = bias1.data(), params.bias2_ptr = bias2.data(), params.logsumexp_ptr = lse.data();
  params.scale = scale, params.head_dim = kHeadDim, params.num_queries = kQueries, params.num_keys = kKeys;
  params.q_strideM = params.k_strideM = params.v_strideM = kHeadDim;

  gridDim = {(kQueries + 31) / 32, 1, 1};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 32; ++thread) {
    threads.emplace_back([=] {
      threadIdx.x = thread;
      for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
        Kernel::Params of_thread = params;
        Kernel::attention_kernel(of_thread);
        ds4s::__syncthreads();
      }
    });
  }
  for (auto& thread : threads) thread.join();

  for (int query = 0; query < kQueries; ++query) {
    double p[kKeys], sum = 0;
    for (int key = 0; key < kKeys; ++key) {
      double score = 0;
      for (int d = 0; d < kHeadDim; ++d) score += double(q[query * kHeadDim + d]) * k[key * kHeadDim + d];
      sum += p[key] = std::exp(score * scale + bias1[key] + bias2[query * kKeys + key]);
    }
    bool right = std::fabs(std::log(sum) - lse[query]) < 1e-5;
    for (int d = 0; d < kHeadDim; ++d) {
      double expected = 0;
      for (int key = 0; key < kKeys; ++key) expected += p[key] / sum * v[key * kHeadDim + d];
      right = right && std::fabs(o[query * kHeadDim + d] - expected) < 1e-5;
    }
    if (right) continue;
    std::printf("scale %g, query %d\n", scale, query);
    std::exit(1);
  }
}

int main() {
  for (float scale : {0.5f, 0.f, -0.5f}) test(scale);
  std::printf("3 calls\n");
}
