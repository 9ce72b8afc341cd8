// What the kernels of dq_range.h read and write, and its memory: plain numbers and pointers, which the host needs too.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/workspace.h"
#include "params.h"

namespace ds4s::sm90 {

struct DqRangeArgs {
  static constexpr int kKeysApart = 16;  // K and V of one key in so many have a part in the maxima
  // A warp computes delta of so many queries, and their maxima.
  static constexpr int piece_queries(int head_dim) { return head_dim <= 64 ? 32 : 16; }

  float* maxima;        // [B N, pieces, 3, H]: the largest sum of |dO|, |K| and |V| that a warp has found
  int32_t* exponents;   // [B N H] of the factors of dq
  uint32_t* largest;    // [B N H, writers]: the largest sum that a block has written, as bits of float16
  uint32_t* wrong;      // the (b, n, h) that recompute_dq computes again
  uint32_t* num_wrong;  // their number, which preprocess sets to 0
  // With a mask: the number of blocks that write dq of a (b, n, h), at most `writers` (seen_tiles.h). Or null: all do.
  const uint32_t* num_writers;
  int32_t rows, heads, pieces, writers;
  int32_t bound;  // log2 (2 scale), rounded up

  // Without memory.
  static DqRangeArgs of(const BwdParams& p, int head_dim, int64_t key_blocks) {
    DqRangeArgs args{};
    args.rows = int32_t(p.B * p.N), args.heads = int32_t(p.H), args.writers = int32_t(key_blocks);
    args.pieces = int32_t(ceil_div(p.Lq, piece_queries(head_dim)));
    args.bound = int32_t(std::ceil(std::log2(2. * p.scale)));
    return args;
  }
  int64_t bytes() const { return 4 * num_heads() * (3 * pieces + 1 + writers + 1); }
  void lie_at(void* memory, uint32_t* counter) {
    maxima = static_cast<float*>(memory), exponents = reinterpret_cast<int32_t*>(maxima + num_heads() * 3 * pieces);
    largest = reinterpret_cast<uint32_t*>(exponents + num_heads()), wrong = largest + num_heads() * writers;
    num_wrong = counter;
  }
  int64_t num_heads() const { return int64_t(rows) * heads; }
};

}  // namespace ds4s::sm90
