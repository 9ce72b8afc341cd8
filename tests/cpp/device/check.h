// What the programs here have in common: memory on the device, random numbers, a line for each result.
#pragma once

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

inline int failures = 0;

inline void report(const char* name, bool ok) {
  std::printf("%s %s\n", ok ? "ok  " : "FAIL", name);
  failures += !ok;
}
inline void report(const char* name, double error, double limit) {
  bool ok = error <= limit;  // false for NaN
  std::printf("%s %s: error %.2e, limit %.2e\n", ok ? "ok  " : "FAIL", name, error, limit);
  failures += !ok;
}

inline void check(cudaError_t error, const char* what) {
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
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
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
