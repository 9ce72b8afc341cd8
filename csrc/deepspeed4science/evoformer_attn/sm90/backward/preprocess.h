// Before the passes of the Hopper backward: -delta of every query, and beside it the lists of rows n of the bias pass,
// which are ready long before.
#pragma once

#include "common/preprocess.h"

namespace ds4s::sm90 {

// As common/preprocess.h wants it: rows on 16 bytes, as the tensor memory accelerator needs them.
template <typename Element, int kHeadDim_>
struct PrepareConfig {
  using scalar_t = Element;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kIsAligned = true, kTf32 = false;
};

// The first blocks list what sees each tile of `keys` keys of the bias pass, the others have queries.
template <typename Config>
__global__ void __launch_bounds__(kPrepareThreads)
    prepare(const __grid_constant__ ds4s::BackwardArgs args, float* negative_delta,
            const __grid_constant__ RowLists lists, int num_lists, int keys) {
  ptx::wait_for_kernel_before();
  if (int(blockIdx.x) < num_lists) {
    list_visible_rows<kPrepareThreads>(args.mask, lists, keys, int(blockIdx.x));
  } else {
    PrepareRows<Config>::run(args, negative_delta, blockIdx.x - uint32_t(num_lists));
  }
}

}  // namespace ds4s::sm90
