// The TMA tensor maps of the backward's kernels.
#pragma once

#include "sm90/mma/tensor_map.h"

namespace ds4s::sm90 {

// Maps of kernel_dq_dkdv. Results have the shape of owned tiles.
struct DqDkdvMaps {
  CUtensorMap owned_first, owned_second, streamed_first, streamed_second, bias2, result_first, result_second;
  CUtensorMap dq;                         // kDqInShared
  CUtensorMap delta_o, delta_do;          // kComputesDelta
  TensorView<5> first_rows, second_rows;  // the results for stores from registers (kReleasesEarly)
  TensorView<5> dq_rows;                  // kDqInGlobal
  CUtensorMap dbias2;                     // rounded, where the blocks of a cluster divide the keys (kClusterFused)
};

struct Dbias2Maps {
  CUtensorMap q, k, v, do_;
};

}  // namespace ds4s::sm90
