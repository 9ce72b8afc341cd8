// How a plan divides the workspace: an offset for each piece, aligned to 256 bytes. Plain arithmetic; at() makes
// pointers of offsets.
#pragma once

#include "../params.h"

namespace ds4s {

constexpr int64_t kNotReserved = -1;  // the offset of a piece that is not needed

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

class WorkspaceLayout {
 public:
  int64_t reserve(bool needed, int64_t size_bytes) {
    if (!needed) return kNotReserved;
    const int64_t offset = bytes_;
    bytes_ += ceil_div(size_bytes, 256) * 256;
    return offset;
  }
  int64_t bytes() const { return bytes_; }

 private:
  int64_t bytes_ = 0;
};

// The piece at that offset; null for one that is not needed.
template <typename T>
T* at(void* workspace, int64_t offset) {
  return offset < 0 ? nullptr : reinterpret_cast<T*>(static_cast<char*>(workspace) + offset);
}

}  // namespace ds4s
