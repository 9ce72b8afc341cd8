// What the host sides of the backwards do alike: plan a workspace, start kernels, add parts up. Once something has gone
// wrong, nothing more is started, and `status_` says what it was.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "common/key_mask_buffers.h"
#include "common/preprocess.h"

namespace ds4s {

class BackwardHost {
 protected:
  explicit BackwardHost(const BwdParams& params) : p_(params) {}

  static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

  // Workspace: parts on 256 bytes each, offsets from its beginning; -1 for what is not needed.
  int64_t reserve(bool needed, int64_t size) {
    if (!needed) return -1;
    int64_t offset = bytes_;
    bytes_ += ceil_div(size, 256) * 256;
    return offset;
  }
  template <typename T>
  T* at(int64_t offset) const {
    return offset < 0 ? nullptr : reinterpret_cast<T*>(static_cast<char*>(p_.workspace) + offset);
  }

  // Into how many slices, `least` or more, of at least eight n a bias pass of so many tiles is cut so that its blocks
  // fill the device evenly: the fewest waves for each slice, a slice counting as 2 % of a wave (it reads bias2 and adds
  // dbias2 once more).
  int64_t choose_slices(int64_t tiles, int64_t resident_blocks, int64_t least = 1) const {
    if (resident_blocks < 1) resident_blocks = 1;
    int64_t most = std::max(std::min(p_.N / 8, int64_t(16)), int64_t(1)), first = std::min(least, most), best = first;
    double best_cost = 0;
    for (int64_t slices = first; slices <= most; ++slices) {
      double waves = double(ceil_div(tiles * slices, resident_blocks));
      double cost = waves / double(slices) * (1.0 + 0.02 * double(slices));
      if (slices == first || cost < best_cost) best = slices, best_cost = cost;
    }
    return best;
  }

  void check(cudaError_t status) {
    if (status_ == cudaSuccess) status_ = status;
  }
  template <typename Kernel, typename... Args>
  void start(Kernel* kernel, int64_t blocks, int threads, int shared, Args... args) {
    if (status_ != cudaSuccess) return;
    if (shared > 48 * 1024) {
      check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
      if (status_ != cudaSuccess) return;
    }
    kernel<<<dim3(uint32_t(blocks)), dim3(uint32_t(threads)), size_t(shared), stream_>>>(args...);
    check(cudaGetLastError());
  }
  void zero(float* x, int64_t count) { check(cudaMemsetAsync(x, 0, size_t(count) * 4, stream_)); }
  // Parts that lie one after another in the workspace, in a fixed order.
  void sum(float* out, int64_t parts, int64_t outer, int64_t num_parts, int64_t inner) {
    int64_t blocks = ceil_div(outer * inner, kPrepareThreads);
    start(sum_parts, blocks < 4096 ? blocks : 4096, kPrepareThreads, 0, out, at<const float>(parts), outer, num_parts,
          inner);
  }

  // Arguments about bias1, from offsets of the workspace: its copy if there is one, and what it hides.
  BackwardArgs arguments(int64_t bias1, int64_t key_mask) const {
    BackwardArgs args{};
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
  int64_t bytes_ = 0;
};

}  // namespace ds4s
