// What the tensor memory accelerator is told for each kernel of the backward.
#pragma once

#include "sm90/mma/tensor_map.h"

namespace ds4s::sm90 {

// Tensor maps of kernel_dq_dkdv; results over the owned tiles.
struct DqDkdvMaps {
  CUtensorMap owned_first, owned_second, streamed_first, streamed_second, bias2, result_first, result_second;
  CUtensorMap dq;                         // kDqInShared
  TensorView<5> first_rows, second_rows;  // the results again, for kReleasesEarly
  TensorView<5> dq_rows;                  // kDqInGlobal
  CUtensorMap dbias2;                     // rounded, where the keys of a (b, n, h) are split
};

struct Dbias2Maps {
  CUtensorMap q, k, v, do_;
};

}  // namespace ds4s::sm90
