// A tile of rows in shared memory in the layout that TMA writes and wgmma reads: boxes of up to 64 columns, whose
// 16-byte chunks are permuted by the row's number (the hardware's 32, 64 and 128-byte swizzles).
#pragma once

#include <cute/arch/mma_sm90_desc.hpp>
#include <cute/arch/util.hpp>

namespace ds4s::sm90 {

template <int kRows_, int kColumns>  // columns of 16-bit elements
struct SwizzledTile {
  static constexpr int kRows = kRows_;
  static constexpr int kBoxColumns = kColumns <= 16 ? 16 : kColumns <= 32 ? 32 : 64;
  static constexpr int kNumBoxes = (kColumns + kBoxColumns - 1) / kBoxColumns;
  static constexpr int kRowBytes = 2 * kBoxColumns;
  static constexpr int kBoxBytes = kRows * kRowBytes;
  static constexpr int kBytes = kNumBoxes * kBoxBytes;
  static_assert(kRows % 8 == 0, "a swizzle pattern has 8 rows");

  // Byte offset of 8 elements, from column 8 chunk on.
  CUTLASS_DEVICE static int offset(int row, int chunk) {
    constexpr int kChunks = kBoxColumns / 8;
    int box = chunk / kChunks, in_box = chunk % kChunks;
    return box * kBoxBytes + row * kRowBytes + ((in_box ^ (row * kRowBytes / 128 % kChunks)) << 4);
  }

  // Matrix descriptors (PTX ISA 9.7.15.5.1). The high word is constant; the low word is linear in the address, so that
  // one addition advances a descriptor.
  static constexpr uint64_t kDescriptorHigh =
      uint64_t(uint32_t(8 * kRowBytes >> 4) | uint32_t(kRowBytes == 128  ? cute::SM90::GMMA::LayoutType::B128
                                                       : kRowBytes == 64 ? cute::SM90::GMMA::LayoutType::B64
                                                                         : cute::SM90::GMMA::LayoutType::B32)
                                                  << 30)
      << 32;
  CUTLASS_DEVICE static uint32_t descriptor_low(uint32_t address) {
    return uint32_t(kBoxBytes >> 4) << 16 | (address & 0x3ffff) >> 4;
  }
  // The same from a start address, in units of 16 bytes, so that constant offsets of addresses stay constants.
  CUTLASS_DEVICE static uint64_t descriptor(uint32_t start) {
    return kDescriptorHigh | uint64_t((uint32_t(kBoxBytes >> 4) << 16) + start);
  }
  // Offset of columns 16 step .. 16 step + 15 as the contracted index; rows are N.
  CUTLASS_HOST_DEVICE static constexpr uint32_t columns_step(int step) {
    return uint32_t(32 * step / kRowBytes * kBoxBytes + 32 * step % kRowBytes) >> 4;
  }
  // Offset of rows 16 step .. 16 step + 15 as the contracted index; columns are N.
  CUTLASS_HOST_DEVICE static constexpr uint32_t rows_step(int step) { return uint32_t(16 * step * kRowBytes) >> 4; }
};

CUTLASS_DEVICE uint32_t shared_address(const void* pointer) { return cute::cast_smem_ptr_to_uint(pointer); }
CUTLASS_DEVICE uint32_t start_address(const void* pointer) { return shared_address(pointer) >> 4; }

// Four 8x8 matrices of 16-bit elements, lanes 8i..8i+7 giving the rows of matrix i: ldmatrix (9.7.14.5.15) by the
// address in shared memory, which is in a register already.
CUTLASS_DEVICE void ldmatrix(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// The same, each matrix transposed.
CUTLASS_DEVICE void ldmatrix_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// The inverse of that: stmatrix (9.7.14.5.16), each matrix transposed.
CUTLASS_DEVICE void stmatrix_trans(uint32_t address, const uint32_t* r) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

}  // namespace ds4s::sm90
