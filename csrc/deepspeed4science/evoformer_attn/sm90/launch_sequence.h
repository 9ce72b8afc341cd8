// Host side: the kernels of one call, one after another on a stream. After an error no further kernel is started, and
// status() returns the error.
#pragma once

#include "common/launch.h"
#include "common/preprocess.h"

namespace ds4s::sm90 {

class LaunchSequence {
 public:
  explicit LaunchSequence(cudaStream_t stream) : stream_(stream) {}

  cudaError_t status() const { return status_; }
  cudaStream_t stream() const { return stream_; }
  void check(cudaError_t status) {
    if (status_ == cudaSuccess) status_ = status;
  }

  // cluster: the number of blocks in a cluster.
  template <typename Kernel, typename... Args>
  void start_overlapping(Kernel* kernel, int64_t blocks, int threads, int shared_bytes, int cluster,
                         const Args&... args) {
    if (status_ != cudaSuccess) return;
    Launch launch(blocks, threads, shared_bytes, cluster, stream_);
    launch.overlap();
    check(cudaLaunchKernelEx(launch.config(), kernel, args...));
  }
  template <typename Kernel, typename... Args>
  void start_cooperative(Kernel* kernel, int64_t blocks, int threads, int shared_bytes, int cluster,
                         const Args&... args) {
    if (status_ != cudaSuccess) return;
    Launch launch(blocks, threads, shared_bytes, cluster, stream_);
    launch.cooperate();
    check(cudaLaunchKernelEx(launch.config(), kernel, args...));
  }
  // Sums parts that lie one after another, in a fixed order.
  void sum(float* out, const float* parts, int64_t outer, int64_t num_parts, int64_t inner) {
    if (status_ != cudaSuccess) return;
    const int64_t blocks = (outer * inner + kPrepareThreads - 1) / kPrepareThreads;
    sum_parts<<<unsigned(blocks < 4096 ? blocks : 4096), kPrepareThreads, 0, stream_>>>(out, parts, outer, num_parts,
                                                                                        inner);
    check(cudaGetLastError());
  }

 private:
  cudaStream_t stream_;
  cudaError_t status_ = cudaSuccess;
};

}  // namespace ds4s::sm90
