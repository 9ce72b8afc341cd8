// A bias whose rows kernels read in chunks of 16 bytes: whether it is aligned as it is, and how its copy lies if not.
// Plain arithmetic, for plans; common/repack.h makes the copy.
#pragma once

#include <cstdint>

namespace ds4s {

// [outer, middle, rows, columns] with strides in elements. Of a dimension of stride 0, one slice is copied.
struct BiasRows {
  const void* ptr;
  int64_t size[4];
  int64_t stride[4];
  int element_bytes;

  int64_t elements_of_chunk() const { return 16 / element_bytes; }

  // Whether rows are aligned to 16 bytes and consist of whole 16-byte chunks.
  bool aligned() const {
    const int64_t chunk = elements_of_chunk();
    bool ok = reinterpret_cast<uintptr_t>(ptr) % 16 == 0 && size[3] % chunk == 0 && (stride[3] == 1 || size[3] == 1);
    for (int d = 0; d < 3; ++d) ok = ok && (stride[d] % chunk == 0 || size[d] == 1);
    return ok;
  }

  // The copy.
  int64_t pitch() const { return (size[3] + 31) / 32 * 32; }
  int64_t count(int d) const { return stride[d] == 0 ? 1 : size[d]; }
  int64_t num_elements() const { return count(0) * count(1) * count(2) * pitch(); }
  BiasRows copy(void* at) const {
    BiasRows rows = *this;
    rows.ptr = at, rows.stride[3] = 1;
    int64_t step = pitch();
    for (int d = 2; d >= 0; --d) {
      rows.stride[d] = count(d) == 1 ? 0 : step;
      step *= count(d);
    }
    return rows;
  }
};

}  // namespace ds4s
