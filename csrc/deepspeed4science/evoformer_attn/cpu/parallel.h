// Threads and scratch memory.
#pragma once

#include <cstdint>
#include <cstdlib>

#include "gemm_fma.h"

// The functions that gcc calls for `#pragma omp parallel` and `barrier`, called by name: libgomp, libomp and libiomp5
// all have them. clang would call others, which libgomp, the runtime that PyTorch brings, does not have.
extern "C" {
void GOMP_parallel(void (*body)(void*), void* data, unsigned num_threads, unsigned flags);
void GOMP_barrier();
int omp_get_thread_num();
int omp_get_num_threads();
}

namespace ds4s::cpu {

// Waking threads costs microseconds: no thread gets fewer floating-point operations than this.
constexpr double kFlopsPerThread = 0x1p17;

inline int useful_threads(int64_t limit, double flops, int64_t items) {
  int64_t threads = limit < items ? limit : items;
  if (flops < double(threads) * kFlopsPerThread) threads = int64_t(flops / kFlopsPerThread);
  return threads < 1 ? 1 : int(threads);
}

// Calls body(thread, team) once in each thread of a team, which may be smaller than requested.
template <typename Body>
inline void in_parallel(int threads, const Body& body) {
  if (threads <= 1) return body(0, 1);
  const auto call = [](void* data) { (*static_cast<const Body*>(data))(omp_get_thread_num(), omp_get_num_threads()); };
  GOMP_parallel(call, const_cast<Body*>(&body), unsigned(threads), /*flags=*/0);
}

// To be called inside in_parallel only, by every thread.
inline void barrier(int team) {
  if (team > 1) GOMP_barrier();
}

// A queue of items, from which threads take runs of consecutive items. A run is an eighth of a thread's share of the
// remaining items, so the last ones are short: items differ in cost where keys are hidden. The result of an item does
// not depend on the thread that computes it.
class Queue {
 public:
  Queue(int64_t items, int threads) : items_(items), runs_(int64_t(threads) * 8) {}

  // The next run [first, last); false when there is none.
  bool take(int64_t& first, int64_t& last) {
    first = __atomic_load_n(&next_, __ATOMIC_RELAXED);
    do {
      if (first >= items_) return false;
      const int64_t run = (items_ - first) / runs_;
      last = first + (run < 1 ? 1 : run);
    } while (!__atomic_compare_exchange_n(&next_, &first, last, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return true;
  }

 private:
  int64_t items_;
  int64_t runs_;
  int64_t next_ = 0;
};

// Lays arrays out one after another, each aligned to a cache line. In a first pass with a null base, bytes() becomes
// the size needed; in a second pass with the memory, the same calls return the arrays.
class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<char*>(base)) {}

  template <typename T>
  T* take(int64_t count) {
    T* const array = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + bytes_);
    bytes_ += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
    return array;
  }
  int64_t bytes() const { return bytes_; }

 private:
  char* base_;
  int64_t bytes_ = 0;
};

// Memory aligned to a cache line, freed by the destructor; null where the system has none.
class Memory {
 public:
  explicit Memory(int64_t bytes) {
    if (posix_memalign(&data_, 64, size_t(bytes < 64 ? 64 : bytes)) != 0) data_ = nullptr;
  }
  ~Memory() { std::free(data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  char* data() const { return static_cast<char*>(data_); }

 private:
  void* data_ = nullptr;
};

}  // namespace ds4s::cpu
