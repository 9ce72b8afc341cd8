// Runs before the fused kernel: delta of each query, math.md (9), and zeros in the memory to which blocks add.
#pragma once

#include "common/preprocess.h"

namespace ds4s {

// Memory to be cleared, in 16-byte pieces, aligned to 16 bytes.
struct ZeroPieces {
  uint4* ptr;
  int64_t count;
};

struct FusedZeros {
  static constexpr int kRanges = 4;
  ZeroPieces ranges[kRanges];  // counters and accumulators in the workspace; accumulators in dk; in dv; dbias2
};

// Each block clears its share of the memory, while the previous kernel (find_visible_keys) may still run, and then
// computes delta of its queries.
template <typename Config>
__global__ void __launch_bounds__(kPrepareThreads, 8)
    prepare_fused(const __grid_constant__ BackwardInputs args, const __grid_constant__ FusedZeros zeros,
                  PostprocessFlag flag) {
  CUTLASS_PRAGMA_UNROLL
  for (int range = 0; range < FusedZeros::kRanges; ++range) {
    const ZeroPieces& pieces = zeros.ranges[range];
    CUTLASS_PRAGMA_NO_UNROLL
    for (int64_t i = int64_t(blockIdx.x) * kPrepareThreads + threadIdx.x; i < pieces.count;
         i += int64_t(gridDim.x) * kPrepareThreads) {
      pieces.ptr[i] = make_uint4(0, 0, 0, 0);
    }
  }
  ptx::wait_for_kernel_before();
  PrepareRows<Config>::run(args, /*negative_delta=*/nullptr, blockIdx.x, flag);
}

}  // namespace ds4s
