// Host side of TMA: encodes a tensor map for each tensor, at every call (a microsecond for all of them).
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>
#include <cutlass/numeric_types.h>

#include "sm90/mma/tensor_view.h"

namespace ds4s::sm90 {

// The driver's encoder, found at run time so that nothing is linked to libcuda. Null on a driver that lacks it.
inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static const auto encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaError_t error =
#if CUDART_VERSION >= 12050
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
#else
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
    bool ok = error == cudaSuccess && found == cudaDriverEntryPointSuccess;
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(ok ? function : nullptr);
  }();
  return encoder;
}

// Boxes of box0 x box1 elements, box3 in dimension 3, 1 in every other. Elements outside the tensor are read as 0 and
// not written.
template <int kRank>
cudaError_t encode_tensor_map(CUtensorMap& map, CUtensorMapDataType type, int element_bytes, CUtensorMapSwizzle swizzle,
                              const TensorView<kRank>& t, int box0, int box1, int box3) {
  auto encode = tensor_map_encoder();
  if (encode == nullptr) return cudaErrorInsufficientDriver;
  cuuint64_t size[kRank], stride_bytes[kRank - 1];
  cuuint32_t box[kRank], step[kRank];
  for (int d = 0; d < kRank; ++d) {
    size[d] = cuuint64_t(t.size[d]);
    box[d] = d == 0 ? box0 : d == 1 ? box1 : d == 3 ? box3 : 1;
    step[d] = 1;
    if (d > 0) stride_bytes[d - 1] = t.size[d] == 1 ? 16 : element_bytes * cuuint64_t(t.stride[d]);
  }
  auto run = [&] {
    return encode(&map, type, kRank, const_cast<void*>(t.ptr), size, stride_bytes, box, step,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult result = run();
  // The driver wants a current context. A thread whose first call this is has none: cudaGetDevice makes none.
  if (result == CUDA_ERROR_INVALID_CONTEXT && cudaFree(nullptr) == cudaSuccess) result = run();
  return cudaError_t(result);  // the same number in both APIs; it may be the error of an earlier kernel
}

// Of 16-bit elements, rows swizzled over their whole width.
template <int kRank>
cudaError_t make_tensor_map(CUtensorMap& map, CUtensorMapDataType type, const TensorView<kRank>& t, int box0, int box1,
                            int box3 = 1) {
  CUtensorMapSwizzle swizzle = box0 == 64   ? CU_TENSOR_MAP_SWIZZLE_128B
                               : box0 == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
                                            : CU_TENSOR_MAP_SWIZZLE_32B;
  return encode_tensor_map(map, type, /*element_bytes=*/2, swizzle, t, box0, box1, box3);
}

// make_tensor_map with boxes of one tile (smem_tile.h), of num_rows rows n.
template <typename scalar_t, typename Tile>
cudaError_t make_tile_map(CUtensorMap& map, const TensorView<5>& tensor, int num_rows = 1) {
  constexpr auto kType = cutlass::platform::is_same<scalar_t, cutlass::half_t>::value
                             ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                             : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return make_tensor_map(map, kType, tensor, Tile::kBoxColumns, Tile::kRows, num_rows);
}

}  // namespace ds4s::sm90
