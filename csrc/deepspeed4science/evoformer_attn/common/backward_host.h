// Common parts of the host side of a backward: starts kernels and sums parts. After an error no further kernel is
// started, and `status_` holds the error.
#pragma once

#include <cuda_runtime.h>

#include "common/launch.h"
#include "common/postprocess_host.h"
#include "common/preprocess.h"
#include "common/workspace.h"

namespace ds4s {

class BackwardHost {
 protected:
  explicit BackwardHost(const BwdParams& params) : p_(params) {}

  // The piece of the workspace at that offset.
  template <typename T>
  T* at(int64_t offset) const {
    return ds4s::at<T>(p_.workspace, offset);
  }

  void check(cudaError_t status) {
    if (status_ == cudaSuccess) status_ = status;
  }
  // Whether the kernel may be started with that much shared memory.
  template <typename Kernel>
  bool allow_shared(Kernel* kernel, int shared) {
    if (status_ == cudaSuccess && shared > 48 * 1024) {
      check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    }
    return status_ == cudaSuccess;
  }
  template <typename Kernel, typename... Args>
  void start(Kernel* kernel, int64_t blocks, int threads, int shared, Args... args) {
    if (!allow_shared(kernel, shared)) return;
    kernel<<<dim3(uint32_t(blocks)), dim3(uint32_t(threads)), size_t(shared), stream_>>>(args...);
    check(cudaGetLastError());
  }
  template <typename Kernel, typename... Args>
  void start_overlapping(Kernel* kernel, int64_t blocks, int threads, int shared, const Args&... args) {
    if (allow_shared(kernel, shared)) check(launch_overlapping(kernel, blocks, threads, shared, stream_, args...));
  }
  // Starts clusters of two blocks, rounding the number of blocks up.
  template <typename Kernel, typename... Args>
  void start_pairs(Kernel* kernel, int64_t blocks, int threads, int shared, const Args&... args) {
    if (!allow_shared(kernel, shared)) return;
    const Launch launch(ceil_div(blocks, 2) * 2, threads, shared, /*cluster=*/2, stream_);
    check(cudaLaunchKernelEx(launch.config(), kernel, args...));
  }
  void zero(float* x, int64_t count) { check(cudaMemsetAsync(x, 0, size_t(count) * 4, stream_)); }
  // Parts that lie one after another in the workspace, in a fixed order.
  void sum(float* out, int64_t parts, int64_t outer, int64_t num_parts, int64_t inner) {
    int64_t blocks = ceil_div(outer * inner, kPrepareThreads);
    start(sum_parts, blocks < 4096 ? blocks : 4096, kPrepareThreads, 0, out, at<const float>(parts), outer, num_parts,
          inner);
  }

  // Arguments for bias1, from offsets of the workspace: its copy if there is one, and its hidden keys.
  BackwardInputs arguments(int64_t bias1, int64_t key_mask) const {
    BackwardInputs args{};
    args.p = p_;
    args.bias1 = bias1 < 0 ? p_.bias1 : at<void>(bias1);
    args.bias1_stride[0] = bias1 < 0 ? p_.bias1_stride[0] : p_.N * p_.Lk;
    args.bias1_stride[1] = bias1 < 0 ? p_.bias1_stride[1] : p_.Lk;
    args.mask = KeyMaskBuffers<BwdParams>(p_).at(at<void>(key_mask));
    return args;
  }

  BwdParams p_;
  cudaStream_t stream_ = nullptr;
  cudaError_t status_ = cudaSuccess;
};

}  // namespace ds4s
