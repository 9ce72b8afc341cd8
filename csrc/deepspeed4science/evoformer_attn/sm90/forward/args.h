// The forward kernel's arguments, besides its tensor maps.
#pragma once

#include <cutlass/fast_math.h>

#include "common/ptx.h"

namespace ds4s::sm90 {

struct ForwardArgs {
  const void* bias1;        // [B, N, Lk], or null
  float* lse;               // [B, N, H, Lq] contiguous, or null
  int64_t bias1_stride[3];  // B, N, Lk
  bool bias1_in_vectors;    // its rows begin at 16 bytes and are whole 16-byte pieces
  const uint8_t* row_mask;  // [B, N], or null
  int64_t row_mask_stride[2];

  int32_t N, H, Lq, Lk;
  // The order of tiles. A band is some groups of kRows rows n. Its tiles are numbered groups first, then query blocks,
  // then heads; the next band follows. The last band may have fewer groups.
  int32_t num_tiles, num_bands;
  int32_t first_half;    // tiles from here on are halves (sm90/half_tiles.h)
  int32_t* parts_begun;  // parts that all blocks together have begun (sm90/pace.h); null: no block waits
  cutlass::FastDivmod by_band_tiles, by_groups, by_last_groups, by_query_blocks, by_row_groups;
  int32_t bias2_B, bias2_H;  // 1, or 0 where bias2 is the same for every b or head

  // The kernel computes s = Q' K^T + f (bias1 + bias2), Q' = q_factor Q, f = q_factor / scale, and softmax(s / f). In
  // bfloat16 q_factor is a power of two, so that Q' is exact, and f at most 1, so that no finite bias overflows. In
  // float16 q_factor is 1: no bias is near a float's limit, and Q' could become subnormal.
  float q_factor;
  float f;
  float c;  // log2(e) / f

  CUTLASS_DEVICE bool has_mask() const { return bias1 != nullptr || row_mask != nullptr; }
  CUTLASS_DEVICE bool is_read(int batch, int n) const {
    return row_mask == nullptr || row_mask[batch * row_mask_stride[0] + n * row_mask_stride[1]] != 0;
  }
};

}  // namespace ds4s::sm90
