// Host side: the launch configuration of a kernel; from compute capability 9.0 up with clusters, or beside the previous
// kernel.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/arch.h"

namespace ds4s {

// The configuration points to the attributes, so a Launch is neither copied nor moved.
class Launch {
 public:
  // cluster: the number of blocks in a cluster.
  Launch(int64_t blocks, int threads, int shared_bytes, int cluster, cudaStream_t stream = nullptr) {
    config_.gridDim = dim3(uint32_t(blocks)), config_.blockDim = dim3(uint32_t(threads));
    config_.dynamicSmemBytes = size_t(shared_bytes), config_.stream = stream, config_.attrs = attributes_;
    if (cluster == 1) return;
    cudaLaunchAttribute& attribute = add(cudaLaunchAttributeClusterDimension);
    attribute.val.clusterDim.x = uint32_t(cluster), attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  }
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;

  // Starts beside the last blocks of the previous kernel. The kernel itself must wait for that one
  // (ptx::wait_for_kernel_before) before it touches memory that that one writes or reads, and before it ends, so that
  // waiting for this kernel includes all earlier ones.
  void overlap() {
    add(cudaLaunchAttributeProgrammaticStreamSerialization).val.programmaticStreamSerializationAllowed = 1;
  }

  // Starts when all blocks fit on the device at a time, for kernels whose blocks wait for each other whatever other
  // streams run.
  void cooperate() { add(cudaLaunchAttributeCooperative).val.cooperative = 1; }

  const cudaLaunchConfig_t* config() const { return &config_; }

 private:
  cudaLaunchAttribute& add(cudaLaunchAttributeID id) {
    cudaLaunchAttribute& attribute = attributes_[config_.numAttrs++];
    attribute.id = id;
    return attribute;
  }
  cudaLaunchAttribute attributes_[2]{};
  cudaLaunchConfig_t config_{};
};

// Starts a kernel that overlaps with the previous one, where the GPUs of this unit can do that.
template <typename Kernel, typename... Args>
cudaError_t launch_overlapping(Kernel* kernel, int64_t blocks, int threads, int shared_bytes, cudaStream_t stream,
                               const Args&... args) {
  Launch launch(blocks, threads, shared_bytes, /*cluster=*/1, stream);
  if (has_dependent_launch()) launch.overlap();
  return cudaLaunchKernelEx(launch.config(), kernel, args...);
}

}  // namespace ds4s
