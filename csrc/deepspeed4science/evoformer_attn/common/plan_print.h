// A plan as one line of text of `name=value` pairs: ds4s_plan returns it (DS4S_VERBOSE=1 shows it), and host tests
// compare it.
#pragma once

#include <cstdint>
#include <cstdio>

namespace ds4s {

// Writes text up to the buffer's size, always terminated by 0, and counts the length of the whole text.
class PlanText {
 public:
  PlanText(char* text, int64_t size) : text_(text), size_(size) {
    if (size_ > 0) text_[0] = '\0';
  }

  void add(const char* name, int64_t value) { append("%s%s=%lld", name, static_cast<long long>(value)); }
  void add(const char* name, const char* value) { append("%s%s=%s", name, value); }
  // Rows x columns of a tile.
  void add(const char* name, int64_t rows, int64_t columns) {
    append("%s%s=%lldx%lld", name, static_cast<long long>(rows), static_cast<long long>(columns));
  }
  // The offset of a piece of the workspace; prints nothing where the piece is not needed.
  void add_offset(const char* name, int64_t offset) {
    if (offset >= 0) append("%s%s@%lld", name, static_cast<long long>(offset));
  }

  int64_t length() const { return length_; }

 private:
  template <typename... Values>
  void append(const char* format, Values... values) {
    const bool fits = length_ < size_;
    const int written = std::snprintf(fits ? text_ + length_ : nullptr, fits ? size_t(size_ - length_) : 0, format,
                                      length_ > 0 ? " " : "", values...);
    if (written > 0) length_ += written;
  }

  char* text_;
  int64_t size_;
  int64_t length_ = 0;
};

}  // namespace ds4s
