// AMX: products of 16 x 32 by 32 x 16 bfloat16 tiles; everything else is AVX-512.
//
// Tiles 0 to 3 hold a 2 x 2 block of sums, 4 and 5 the left, 6 and 7 the right operands. Operands are padded to whole
// tiles, so one configuration serves every product.
#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#include "gemm_pair.h"

namespace ds4s::cpu {

struct Amx {};

struct AmxMultiplier {
  static constexpr int kDepthAlign = 32;
  static constexpr int kChannelAlign = 32;

  // The tile configuration of one thread for the duration of one call.
  struct Session {
    Session() {
      struct alignas(64) {
        uint8_t palette = 1;
        uint8_t start_row = 0;
        uint8_t reserved[14] = {};
        uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
      } config;
      settle_memory(&config);
      _tile_loadconfig(&config);
    }
    ~Session() { _tile_release(); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
  };

  // Linux grants tile registers on request, once for the process (Documentation/arch/x86/xstate.rst).
  static int prepare() {
    static int granted = 0;
    if (__atomic_load_n(&granted, __ATOMIC_RELAXED) != 0) return 0;
    constexpr long kRequestPermission = 0x1023;
    constexpr long kTileData = 18;
    if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) return ENOTSUP;
    __atomic_store_n(&granted, 1, __ATOMIC_RELAXED);
    return 0;
  }

  template <bool kAccumulate>
  static void multiply(int m, int n, int k, Left<bfloat16_t> a, const bfloat16_t* b, int ldb, float* c, int ldc) {
    const int rows = (m + 15) / 16;
    const int cols = (n + 15) / 16;
    const int depth = (k + 31) / 32;
    settle_memory(b);
    for (int j = 0; j < cols; j += 2) {
      for (int i = 0; i < rows; i += 2) {
        const bfloat16_t* left = a.data + int64_t(i) * 16 * a.row_stride;
        const bfloat16_t* right = b + j * 32;
        float* const to = c + int64_t(i) * 16 * ldc + j * 16;
        if (i + 1 < rows) {
          if (j + 1 < cols) {
            block<true, true, kAccumulate>(depth, left, a.row_stride, right, ldb, to, ldc);
          } else {
            block<true, false, kAccumulate>(depth, left, a.row_stride, right, ldb, to, ldc);
          }
        } else if (j + 1 < cols) {
          block<false, true, kAccumulate>(depth, left, a.row_stride, right, ldb, to, ldc);
        } else {
          block<false, false, kAccumulate>(depth, left, a.row_stride, right, ldb, to, ldc);
        }
      }
    }
  }

 private:
  // GCC's tile intrinsics are not declared to read memory: without this barrier, stores to operands may be moved behind
  // them.
  static void settle_memory(const void* p) { __asm__ volatile("" : : "r"(p) : "memory"); }

  // One or two tiles of rows by one or two of columns.
  template <bool kTwoRows, bool kTwoCols, bool kAccumulate>
  static void block(int depth, const bfloat16_t* a, int64_t row_stride, const bfloat16_t* b, int64_t ldb, float* c,
                    int64_t ldc) {
    const int64_t a_bytes = row_stride * 2;
    const int64_t b_bytes = ldb * 4;
    const int64_t c_bytes = ldc * 4;
    float* const c_below = c + 16 * ldc;
    if constexpr (kAccumulate) {
      _tile_loadd(0, c, c_bytes);
      if constexpr (kTwoCols) _tile_loadd(1, c + 16, c_bytes);
      if constexpr (kTwoRows) _tile_loadd(2, c_below, c_bytes);
      if constexpr (kTwoRows && kTwoCols) _tile_loadd(3, c_below + 16, c_bytes);
    } else {
      _tile_zero(0);
      if constexpr (kTwoCols) _tile_zero(1);
      if constexpr (kTwoRows) _tile_zero(2);
      if constexpr (kTwoRows && kTwoCols) _tile_zero(3);
    }
    for (int x = 0; x < depth; ++x, a += 32, b += 32 * ldb) {
      _tile_loadd(4, a, a_bytes);
      _tile_loadd(6, b, b_bytes);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (kTwoCols) {
        _tile_loadd(7, b + 32, b_bytes);
        _tile_dpbf16ps(1, 4, 7);
      }
      if constexpr (kTwoRows) {
        _tile_loadd(5, a + 16 * row_stride, a_bytes);
        _tile_dpbf16ps(2, 5, 6);
        if constexpr (kTwoCols) _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, c, c_bytes);
    if constexpr (kTwoCols) _tile_stored(1, c + 16, c_bytes);
    if constexpr (kTwoRows) _tile_stored(2, c_below, c_bytes);
    if constexpr (kTwoRows && kTwoCols) _tile_stored(3, c_below + 16, c_bytes);
  }
};

}  // namespace ds4s::cpu
