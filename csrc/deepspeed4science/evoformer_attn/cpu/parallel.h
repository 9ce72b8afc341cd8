// Threads and scratch memory.
#pragma once

#include <cstdint>
#include <cstdlib>

#include "gemm_fma.h"

// What gcc makes of `#pragma omp parallel` and `barrier`, called by name: libgomp, libomp and libiomp5 all have these
// functions, while clang would ask for names that libgomp, which PyTorch brings, does not have.
extern "C" {
void GOMP_parallel(void (*body)(void*), void* data, unsigned num_threads, unsigned flags);
void GOMP_barrier();
int omp_get_thread_num();
int omp_get_num_threads();
}

namespace ds4s::cpu {

// Waking threads costs microseconds: below this many floating-point operations a thread, fewer threads.
constexpr double kFlopsPerThread = 0x1p17;

inline int useful_threads(int64_t limit, double flops, int64_t items) {
  int64_t threads = limit < items ? limit : items;
  if (flops < double(threads) * kFlopsPerThread) threads = int64_t(flops / kFlopsPerThread);
  return threads < 1 ? 1 : int(threads);
}

// body(thread, team): once for each thread of a team that may turn out smaller than asked for.
template <typename Body>
inline void in_parallel(int threads, const Body& body) {
  if (threads <= 1) return body(0, 1);
  const auto call = [](void* data) { (*static_cast<const Body*>(data))(omp_get_thread_num(), omp_get_num_threads()); };
  GOMP_parallel(call, const_cast<Body*>(&body), unsigned(threads), /*flags=*/0);
}

// Only inside in_parallel, reached by every thread.
inline void barrier(int team) {
  if (team > 1) GOMP_barrier();
}

// Hands out consecutive items in runs, first come first served. Runs are an eighth of a thread's share of what is left,
// so that the last ones are short: items differ where keys are hidden. Which thread does an item never changes its
// result.
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

// Lays arrays out one after the other, each on its own cache line. First pass with a null base: `bytes()` is the
// size needed; second pass with the memory: the same calls return the arrays.
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

// Memory on a cache line that frees itself; null where there is none to be had.
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
