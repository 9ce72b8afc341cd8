// A block of queries of a row n that sees no key: O = 0, lse = -inf, nothing is read.
#pragma once

#include "../mma/tile_loader.h"

namespace ds4s {

template <typename K>
CUTLASS_DEVICE void store_unseen(const typename K::Params& p) {
  constexpr int kQueries = K::QTile::kRows;
  int thread = int(threadIdx.x), rows = p.num_queries < kQueries ? p.num_queries : kQueries;
  store_zeros<typename K::output_t, K::kNumThreads, K::kAligned>(p.output_ptr, p.o_strideM, thread, rows,
                                                                 p.head_dim_value);
  if (p.logsumexp_ptr == nullptr) return;
  for (int row = thread; row < rows; row += K::kNumThreads) p.logsumexp_ptr[row] = -infinity();
}

}  // namespace ds4s
