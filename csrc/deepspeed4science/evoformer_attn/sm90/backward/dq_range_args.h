// What the kernels of dq_range.h read and write, and its memory: plain numbers and pointers, which the host needs too.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/workspace.h"
#include "params.h"

namespace ds4s::sm90 {

// Queries and heads of a block of preprocess: up to D = 64, and above.
constexpr int64_t preprocess_rows(int head_dim) { return head_dim <= 64 ? 64 : 32; }

struct DqRangeArgs {
  static constexpr int kMostHeads = 64;  // of more heads, dq has a kernel of its own in place of float16 sums
  static constexpr int kKeysApart = 16, kKeyRows = 128;

  float* do_maxima;     // [B N, do_blocks, H]: the largest sum of |dO| that a block of preprocess has found,
  float* key_maxima;    // [B N, key_blocks, 2, H]: the largest |K| and |V|
  int32_t* exponents;   // [B N H] of the factors of dq
  uint32_t* largest;    // [B N H, writers]: the largest sum that a block has written, as bits of float16
  uint32_t* wrong;      // the (b, n, h) that recompute_dq computes again
  uint32_t* num_wrong;  // their number, which preprocess sets to 0
  int32_t rows, heads, do_blocks, key_blocks, writers;
  int32_t num_key_blocks;  // of all rows n
  int32_t bound;           // log2 (2 scale), rounded up

  // Without memory.
  static DqRangeArgs of(const BwdParams& p, int head_dim, int64_t key_blocks) {
    DqRangeArgs args{};
    args.rows = int32_t(p.B * p.N), args.heads = int32_t(p.H), args.writers = int32_t(key_blocks);
    args.do_blocks = int32_t(ceil_div(p.Lq * p.H, preprocess_rows(head_dim)));
    args.key_blocks = int32_t(ceil_div(ceil_div(p.Lk, kKeysApart) * p.H, kKeyRows));
    args.num_key_blocks = args.rows * args.key_blocks;
    args.bound = int32_t(std::ceil(std::log2(2. * p.scale)));
    return args;
  }
  int64_t bytes() const { return 4 * num_heads() * (do_blocks + 2 * key_blocks + 1 + writers + 1); }
  void lie_at(void* memory, uint32_t* counter) {
    do_maxima = static_cast<float*>(memory), key_maxima = do_maxima + num_heads() * do_blocks;
    exponents = reinterpret_cast<int32_t*>(key_maxima + num_heads() * 2 * key_blocks);
    largest = reinterpret_cast<uint32_t*>(exponents + num_heads()), wrong = largest + num_heads() * writers;
    num_wrong = counter;
  }
  int64_t num_heads() const { return int64_t(rows) * heads; }
};

}  // namespace ds4s::sm90
