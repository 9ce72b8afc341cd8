// What bounds an attention kernel, measured alone: exponentials, fused multiply-adds, reads out of
// L2 and fp32 sums into it. Every kernel writes something that depends on all its work, under a
// condition that the host never meets but the compiler cannot know.
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kThreads = 256;
constexpr int kChains = 8;  // independent operations of a thread in flight

// kChains ex2.approx for each of the iterations; 2^x of 0 <= x <= 1 stays between 1 and 2, so
// that the addition brings it back.
__global__ void exp2_chains(float* out, int iterations, float minus_one) {
  float x[kChains];
  for (int c = 0; c < kChains; ++c) x[c] = 0.01f * c + 1e-5f * threadIdx.x;
  for (int i = 0; i < iterations; ++i) {
#pragma unroll
    for (int c = 0; c < kChains; ++c) {
      asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x[c]));
      x[c] += minus_one;
    }
  }
  float sum = 0.f;
  for (int c = 0; c < kChains; ++c) sum += x[c];
  if (sum == -1e30f) out[threadIdx.x] = sum;
}

__global__ void fma_chains(float* out, int iterations, float factor, float summand) {
  float x[kChains];
  for (int c = 0; c < kChains; ++c) x[c] = 0.01f * c + 1e-5f * threadIdx.x;
  for (int i = 0; i < iterations; ++i) {
#pragma unroll
    for (int c = 0; c < kChains; ++c) x[c] = fmaf(x[c], factor, summand);
  }
  float sum = 0.f;
  for (int c = 0; c < kChains; ++c) sum += x[c];
  if (sum == -1e30f) out[threadIdx.x] = sum;
}

// Every block reads the whole buffer `iterations` times: from another place on than the others, or
// (`together`) all of them the same lines at about the same time, as blocks read keys or a bias.
__global__ void read_l2(const float4* buffer, int64_t count, bool together, int iterations, float* out) {
  float sum = 0.f;
  const int64_t start = together ? 0 : count / gridDim.x * blockIdx.x;
  for (int i = 0; i < iterations; ++i) {
#pragma unroll 8
    for (int64_t j = threadIdx.x; j < count; j += kThreads) {
      const int64_t k = start + j;
      const float4 v = __ldcg(buffer + (k < count ? k : k - count));
      sum += v.x + v.y + v.z + v.w;
    }
  }
  if (sum == -1e30f) out[threadIdx.x] = sum;
}

// As read_l2, adding into the buffer: red.global.add.v4.f32 where there is one (from 9.0 on).
__global__ void reduce_l2(float4* buffer, int64_t count, int iterations) {
  const int64_t start = count / gridDim.x * blockIdx.x;
  for (int i = 0; i < iterations; ++i) {
    for (int64_t j = threadIdx.x; j < count; j += kThreads) {
      const int64_t k = start + j;
      float* at = reinterpret_cast<float*>(buffer + (k < count ? k : k - count));
#if __CUDA_ARCH__ >= 900
      asm volatile("red.global.add.v4.f32 [%0], {%1, %1, %1, %1};" ::"l"(at), "f"(1.f) : "memory");
#else
      for (int c = 0; c < 4; ++c) atomicAdd(at + c, 1.f);
#endif
    }
  }
}

}  // namespace

// Other symbols are hidden.
#define CEILING_API extern "C" __attribute__((visibility("default")))

// Each launches on `stream` and returns cudaGetLastError(); work of a launch:
//   exp2, fma   blocks * kThreads * iterations * kChains operations
//   read, reduce   blocks * iterations * bytes
CEILING_API int ceiling_exp2(float* out, int blocks, int iterations, void* stream) {
  exp2_chains<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(out, iterations, -1.f);
  return cudaGetLastError();
}

CEILING_API int ceiling_fma(float* out, int blocks, int iterations, void* stream) {
  fma_chains<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(out, iterations, 0.5f, 0.25f);
  return cudaGetLastError();
}

CEILING_API int ceiling_read_l2(float* buffer, int64_t bytes, int together, float* out, int blocks, int iterations,
                                void* stream) {
  read_l2<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(reinterpret_cast<const float4*>(buffer),
                                                                      bytes / 16, together != 0, iterations, out);
  return cudaGetLastError();
}

CEILING_API int ceiling_reduce_l2(float* buffer, int64_t bytes, int blocks, int iterations, void* stream) {
  reduce_l2<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(reinterpret_cast<float4*>(buffer), bytes / 16,
                                                                        iterations);
  return cudaGetLastError();
}
