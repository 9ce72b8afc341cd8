// What the forward kernel needs beside its tensor maps.
#pragma once

#include "common/key_mask.h"

namespace ds4s::sm90 {

struct ForwardArgs {
  const void* bias1;        // [B, N, Lk], or null
  float* lse;               // [B, N, H, Lq] contiguous, or null
  int64_t bias1_stride[3];  // B, N, Lk
  KeyMask mask;

  int32_t N, H, Lq, Lk;
  int32_t num_query_blocks;  // per row n and head
  int32_t num_row_groups;    // N in groups of kRows
  int32_t num_tiles;         // num_query_blocks * H * num_row_groups * B
  int32_t bias2_B, bias2_H;  // 1, or 0 where bias2 is the same for every b or head

  // Scores are kept as s = Q' K^T + f (bias1 + bias2), Q' = q_factor Q, f = q_factor / scale; softmax(s / f) is what is
  // wanted. For bfloat16, q_factor is a power of two, so that Q' is exact, and f at most 1, so that no finite bias
  // overflows; float16's range leaves room, but has few subnormals, and Q is left as it is.
  float q_factor;
  float f;
  float c;  // log2(e) / f

  // The index of a row n among all B N.
  CUTLASS_DEVICE int64_t row_index(int batch, int n) const { return int64_t(batch) * N + n; }
};

}  // namespace ds4s::sm90
