// Host side: a kernel that starts beside the last blocks of the previous one, from compute capability 9.0 up.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/arch.h"

namespace ds4s {

// The kernel itself must wait for the end of the previous one (ptx::wait_for_kernel_before) before it touches memory
// that that one writes or reads, and before it ends, so that waiting for this kernel includes all earlier ones.
template <typename Kernel, typename... Args>
cudaError_t launch_overlapping(Kernel* kernel, int64_t blocks, int threads, int shared, cudaStream_t stream,
                               const Args&... args) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(uint32_t(blocks)), config.blockDim = dim3(uint32_t(threads));
  config.dynamicSmemBytes = size_t(shared), config.stream = stream;
  config.attrs = &overlap, config.numAttrs = has_dependent_launch();
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace ds4s
