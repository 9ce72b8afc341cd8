// A bias whose rows kernels read in chunks of 16 bytes: whether it is aligned as it is, and how its copies lie, row by
// row or in tiles of 32 x 32. Plain arithmetic, for plans; common/repack.h makes the copies.
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
    // Kernels compute offsets within 32 rows, in chunks, by 32 bits.
    return ok && stride[2] < int64_t(1) << 30;
  }

  // The copy by rows.
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

  // The copy in tiles. The tiles of 32 rows lie one after another, a tile row by row: element (row, column) is at
  // (row & ~31) pitch + (column & ~31) 32 + (row & 31) 32 + (column & 31).
  static constexpr int64_t kTile = 32;
  int64_t tiles_of_matrix() const { return (size[2] + kTile - 1) / kTile * (pitch() / kTile); }
  // Whether 31 bits count the blocks of the copy, and the elements of 32 rows and one more tile.
  bool fits_in_tiles() const { return num_tiles() < int64_t(1) << 31 && size[3] < int64_t(1) << 25; }
  int64_t num_tiles() const { return count(0) * count(1) * tiles_of_matrix(); }
  // With one more tile, which kernels read, and ignore, past the last.
  int64_t elements_of_tiles() const { return (num_tiles() + 1) * kTile * kTile; }
  BiasRows tiles(void* at) const {
    BiasRows rows = *this;
    const int64_t matrix = tiles_of_matrix() * kTile * kTile;
    rows.ptr = at, rows.stride[3] = 1, rows.stride[2] = pitch();
    rows.stride[1] = count(1) == 1 ? 0 : matrix;
    rows.stride[0] = count(0) == 1 ? 0 : count(1) * matrix;
    return rows;
  }
};

}  // namespace ds4s
