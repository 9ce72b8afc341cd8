// Backward attention with biases for Sm70, Sm75 and Sm80: from q, k, v, the biases, o, lse and do,
//
//   P = 2^(log2e (scale Q K^T + bias1 - shift + bias2 - lse))      delta = rowsum(do * o)      dS = P * (dO V^T -
//   delta) dq = scale dS K,   dk = scale dS^T Q,   dv = P^T dO,   dbias1 = sum over h and q of dS,   dbias2 = sum over
//   n of dS
//
// Each gradient is finished by the one block that owns it, so the results have the same bits every time, or, from 9.0
// up where the order of additions is free, all of them come from one kernel:
//
//   common/key_mask.h               what bias1 and row_mask hide, and how far bias1 is shifted
//   common/preprocess.h             -delta, bias2 aligned and transposed; final sums of parts
//   sm80/backward/statistics.h      float in full precision: what takes the place of lse and delta
//   sm80/backward/kernel_dq_dkdv.h  of queries: dq;  of keys: dk, dv, dbias1, and in the one kernel for all dq and
//   dbias2 sm80/backward/dq_accumulator.h  what that one needs for dq and dbias2, by atomic additions
//   sm80/backward/kernel_dbias2.h   of tiles of bias2: dbias2
//
// In the separate kernels, only where bias gradients of several blocks meet (dbias1 over heads, dbias2 over slices of
// n) is a choice: atomic additions, or parts and a sum in a fixed order. Schedule, budgets and reasons:
// docs/kernels-sm80-backward.md and docs/kernels-sm80-backward-fused.md. Device code only; sm80/backward/plan.h decides
// what runs, sm80/backward/launch.h starts it.
#pragma once

#include "common/preprocess.h"
#include "sm80/backward/kernel_dbias2.h"
#include "sm80/backward/kernel_dq_dkdv.h"
#include "sm80/backward/statistics.h"
