// Host side: the number of blocks of a persistent kernel that are resident on the current device.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

#include "common/launch.h"

namespace ds4s::sm90 {

template <auto kKernel, int kNumThreads, int kSharedBytes, int kCluster = 1>  // blocks of a cluster
struct PersistentGrid {
  // Requests the shared memory that the blocks need, once on each device.
  static cudaError_t resident_blocks(int& blocks) {
    static std::atomic<int> known[64];
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess) return error;
    blocks = device < 64 ? known[device].load() : 0;
    if (blocks > 0) return cudaSuccess;
    error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    int multiprocessors = 0, of_each = 0;
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess) {
      error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&of_each, kKernel, kNumThreads, kSharedBytes);
    }
    if (error != cudaSuccess) return error;
    blocks = multiprocessors * of_each;
    if (kCluster > 1) error = in_clusters(blocks);
    if (error != cudaSuccess) return error;
    if (blocks == 0) return cudaErrorInvalidConfiguration;
    if (device < 64) known[device].store(blocks);
    return cudaSuccess;
  }

 private:
  // The blocks of a cluster run in one group of multiprocessors (GPC), so some multiprocessors may stay without a
  // block.
  static cudaError_t in_clusters(int& blocks) {
    Launch launch(blocks / kCluster * kCluster, kNumThreads, kSharedBytes, kCluster);
    int clusters = 0;
    cudaError_t error = cudaOccupancyMaxActiveClusters(&clusters, kKernel, launch.config());
    blocks = clusters * kCluster;
    return error;
  }
};

}  // namespace ds4s::sm90
