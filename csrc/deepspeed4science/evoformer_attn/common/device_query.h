// Fills common/device_facts.h from the current device.
#pragma once

#include <cuda_runtime.h>

#include "common/device_facts.h"

namespace ds4s {

inline cudaError_t query_device(DeviceFacts& facts) {
  int device = 0;
  cudaError_t status = cudaGetDevice(&device);
  auto query = [&](int& value, cudaDeviceAttr attribute) {
    if (status == cudaSuccess) status = cudaDeviceGetAttribute(&value, attribute, device);
  };
  query(facts.num_multiprocessors, cudaDevAttrMultiProcessorCount);
  query(facts.shared_bytes_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  query(facts.shared_bytes_per_multiprocessor, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  return status;
}

}  // namespace ds4s
