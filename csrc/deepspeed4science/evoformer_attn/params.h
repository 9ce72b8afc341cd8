// The parameters of one launch, as plain data: shared by every backend, free of torch, CUDA and host-only headers.
//
// Python fills these structs in deepspeed4science/params.py, in the same order (a test compares every offset).
// Strides count elements. The channel dimension (D, Dv) always has stride 1; a broadcast dimension has stride 0.
// A unit writes every element of every output it is given (they arrive uninitialised); a null output is not wanted.
#pragma once

#if defined(__CUDACC_RTC__)
#include <cuda/std/cstdint>
#else
#include <cstdint>
#endif

// Raised whenever a struct below or the meaning of a field changes; checked when a library is loaded.
#define DS4S_ABI_VERSION 5

namespace ds4s {

enum DType : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

// Shift, math.md (1a): a softmax does not change when a constant is subtracted from a row of scores. In both
// directions, kernels subtract shift[b, n], the largest finite bias1 of that row n (0 where there is none), from bias1
// before they add it to scores: a large finite mask on all keys of a row then leaves the scores their digits. lse is
// that of the shifted scores.
//
// Hidden keys, math.md (6a): bias1 is -inf, or finite and at least kMaskThreshold below the largest of its row, so that
// no score of usual size compensates it. Tiles without a visible key are neither read nor computed. A row n without a
// visible key (row_mask is 0, or all its bias1 is -inf) gives 0 and zero gradients.
constexpr float kMaskThreshold[] = {1e8f, 1e4f, 1e8f};  // by the DType in which bias1 is read

// The forward, math.md (1) to (6): O = softmax(scale * Q K^T + bias1 + bias2) V; lse = log(sum(exp(scores - shift))),
// -inf without a visible key.
struct FwdParams {
  const void* q;            // [B, N, Lq, H, D]
  const void* k;            // [B, N, Lk, H, D]
  const void* v;            // [B, N, Lk, H, Dv]
  const void* bias1;        // [B, N, Lk], or null
  const void* bias2;        // [B, H, Lq, Lk], or null
  const uint8_t* row_mask;  // [B, N], 0 for a row n whose result is not read (padding); or null
  void* o;                  // [B, N, Lq, H, Dv]
  float* lse;               // [B, N, H, Lq] contiguous, or null
  void* workspace;          // ds4s_workspace_bytes() bytes on the device, 256-byte aligned; null when that is 0

  int64_t B, N, Lq, Lk, H, D, Dv;
  int64_t q_stride[4];         // B, N, L, H
  int64_t k_stride[4];         // B, N, L, H
  int64_t v_stride[4];         // B, N, L, H
  int64_t o_stride[4];         // B, N, L, H
  int64_t bias1_stride[3];     // B, N, Lk
  int64_t bias2_stride[4];     // B, H, Lq, Lk
  int64_t row_mask_stride[2];  // B, N

  int32_t bias1_dtype;  // DType; CPU units read any, CUDA units want the type of q
  int32_t bias2_dtype;
  int32_t num_threads;    // CPU only: at most this many threads
  int32_t deterministic;  // 1: bit-identical results run to run
  float scale;            // positive; 1 / sqrt(D) by default
  int32_t reserved;
};

// The backward, math.md (8) to (16): dS = P * (dP - delta), delta = rowsum(do * o); dq = scale dS K, dk = scale dS^T Q,
// dv = P^T do, dbias1 = sum over h and q of dS, dbias2 = sum over n of dS.
struct BwdParams {
  const void* q;            // [B, N, Lq, H, D]
  const void* k;            // [B, N, Lk, H, D]
  const void* v;            // [B, N, Lk, H, Dv]
  const void* bias1;        // [B, N, Lk], or null
  const void* bias2;        // [B, H, Lq, Lk], or null
  const uint8_t* row_mask;  // as in FwdParams
  const void* o;            // [B, N, Lq, H, Dv]
  const float* lse;         // [B, N, H, Lq] contiguous
  const void* do_;          // [B, N, Lq, H, Dv]
  void* dq;                 // [B, N, Lq, H, D], or null
  void* dk;                 // [B, N, Lk, H, D], or null
  void* dv;                 // [B, N, Lk, H, Dv], or null
  float* dbias1;            // [B, N, Lk] contiguous, or null
  float* dbias2;            // [B, H, Lq, Lk], contiguous but for dbias2_stride; or null
  void* rounded_dbias1;     // the same in the type of q, in place of dbias1, which is null then; or null. CUDA only
  void* rounded_dbias2;
  void* workspace;  // as in FwdParams

  int64_t B, N, Lq, Lk, H, D, Dv;
  int64_t q_stride[4];         // B, N, L, H
  int64_t k_stride[4];         // B, N, L, H
  int64_t v_stride[4];         // B, N, L, H
  int64_t o_stride[4];         // B, N, L, H
  int64_t do_stride[4];        // B, N, L, H
  int64_t dq_stride[4];        // B, N, L, H
  int64_t dk_stride[4];        // B, N, L, H
  int64_t dv_stride[4];        // B, N, L, H
  int64_t bias1_stride[3];     // B, N, Lk
  int64_t bias2_stride[4];     // B, H, Lq, Lk
  int64_t row_mask_stride[2];  // B, N
  int64_t dbias2_stride;  // from a row of dbias2 to the next: Lk; Sm90 also more, unless ds4s_workspace_bytes is -1

  int32_t bias1_dtype;
  int32_t bias2_dtype;
  int32_t num_threads;
  int32_t deterministic;
  float scale;
  int32_t partial_keys;  // 1: o and lse are of more keys than k and v are; gradients are the part of these
};

}  // namespace ds4s

// What every shared library exports, one kernel each (the bodies are written by op_builder/ops/instantiations.py):
//   int     ds4s_abi_version(void);                            DS4S_ABI_VERSION of this header
//   const char* ds4s_name(void);                               the unit's name
//   int64_t ds4s_workspace_bytes(const Params*);               0 when none is needed; -1: not with this dbias2_stride
//   int     ds4s_run(const Params*, void* stream);             0, or a status for ds4s_status_string
//   const char* ds4s_status_string(int);
// and where a kernel chooses what it runs:
//   int64_t ds4s_plan(const Params*, char* text, int64_t size) the choice as text, ended by 0 and cut to `size`;
//                                                              returns the length of the whole text
#define DS4S_EXPORT extern "C" __attribute__((visibility("default")))
