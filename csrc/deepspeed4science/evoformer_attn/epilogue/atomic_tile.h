// Adds a thread's part of an output tile to memory that other blocks add to as well. Elements past the last column are
// left out one by one: rows of any length work, and nothing, not even a zero, is added to memory outside the matrix.
// CUTLASS's iterators store through it (predicated_tile_iterator_atomic.h), and so does the dbias2 kernel
// (sm80/backward/kernel_dbias2.h).
#pragma once

#include <cutlass/matrix_coord.h>

#include "../common/atomic_add.h"

namespace ds4s {

// Calls f(row, column, index of the access in the fragment) for each access of a thread; the first one is at (row,
// column). ThreadMap: CUTLASS's OutputTileThreadMap; only its Iterations and Delta are used.
template <typename ThreadMap, typename F>
CUTLASS_DEVICE void for_each_access(int row, int column, F&& f) {
  using Iterations = typename ThreadMap::Iterations;
  using Delta = typename ThreadMap::Delta;
  int index = 0;
  CUTLASS_PRAGMA_UNROLL
  for (int cluster = 0; cluster < Iterations::kCluster; ++cluster) {
    CUTLASS_PRAGMA_UNROLL
    for (int group = 0; group < Iterations::kGroup; ++group) {
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < Iterations::kRow; ++r) {
        CUTLASS_PRAGMA_UNROLL
        for (int c = 0; c < Iterations::kColumn; ++c) {
          f(row + r * Delta::kRow + group * Delta::kGroup + cluster * Delta::kCluster, column + c * Delta::kColumn,
            index++);
        }
      }
    }
  }
}

// offset_of(row, column): offset from `matrix`, in elements.
template <typename ThreadMap, typename Element, typename Offset>
CUTLASS_DEVICE void atomic_add_tile(Element* matrix, const cutlass::MatrixCoord& extent, int row, int column,
                                    const Element* fragment, Offset&& offset_of) {
  constexpr int kCount = ThreadMap::kElementsPerAccess;
  for_each_access<ThreadMap>(row, column, [&](int r, int c, int index) {
    if (r >= extent.row() || c >= extent.column()) return;
    atomic_add_access<kCount>(matrix + offset_of(r, c), fragment + index * kCount, extent.column() - c);
  });
}

}  // namespace ds4s
