// Host side: copies bias2 into padded rows where bias2_view.h asks for a copy.
#pragma once

#include "common/repack.h"
#include "sm90/bias2_view.h"
#include "sm90/mma/tensor_map.h"

namespace ds4s::sm90 {

template <typename scalar_t>
cudaError_t copy_bias2_rows(const Bias2View& bias2, void* copy, cudaStream_t stream) {
  if (!bias2.copied) return cudaSuccess;
  if (copy == nullptr) return cudaErrorInvalidValue;
  const TensorView<5>& view = bias2.view;
  const RepackParams p{view.ptr,
                       copy,
                       {view.stride[4], view.stride[2], view.stride[1], view.stride[0]},
                       view.size[2],
                       view.size[1],
                       view.size[0],
                       bias2.pitch(),
                       bias2.num_rows() * bias2.pitch() / 8};
  const int64_t blocks = (p.num_vectors + 255) / 256;
  repack_rows<scalar_t><<<unsigned(blocks < 65536 ? blocks : 65536), 256, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace ds4s::sm90
