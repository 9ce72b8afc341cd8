// Host side of the tensor memory accelerator: one map for each tensor, made at every call (a microsecond for all).
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>
#include <cutlass/numeric_types.h>

#include <cstdint>

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

// A tensor of 16-bit elements, innermost dimension first; strides in elements, that of the innermost is 1.
template <int kRank>
struct TensorView {
  const void* ptr;
  int64_t size[kRank];
  int64_t stride[kRank];
};

// What the accelerator asks of a tensor (PTX ISA 5.5.8): 16-byte base and strides, no repeated elements.
template <int kRank>
bool has_tensor_map(const TensorView<kRank>& t) {
  bool ok = reinterpret_cast<uintptr_t>(t.ptr) % 16 == 0 && (t.stride[0] == 1 || t.size[0] == 1);
  for (int d = 1; d < kRank; ++d) {
    ok = ok && (t.size[d] == 1 || (t.stride[d] > 0 && t.stride[d] % 8 == 0 && t.stride[d] < (int64_t(1) << 39)));
  }
  return ok;
}

// Boxes of box0 x box1 elements and one in every further dimension, their rows swizzled over their whole width. What
// lies outside of the tensor is read as 0 and not written.
template <int kRank>
cudaError_t make_tensor_map(CUtensorMap& map, CUtensorMapDataType type, const TensorView<kRank>& t, int box0,
                            int box1) {
  auto encode = tensor_map_encoder();
  if (encode == nullptr) return cudaErrorInsufficientDriver;
  cuuint64_t size[kRank], stride_bytes[kRank - 1];
  cuuint32_t box[kRank], step[kRank];
  for (int d = 0; d < kRank; ++d) {
    size[d] = cuuint64_t(t.size[d]);
    box[d] = d == 0 ? box0 : d == 1 ? box1 : 1;
    step[d] = 1;
    if (d > 0) stride_bytes[d - 1] = t.size[d] == 1 ? 16 : 2 * cuuint64_t(t.stride[d]);
  }
  CUtensorMapSwizzle swizzle = box0 == 64   ? CU_TENSOR_MAP_SWIZZLE_128B
                               : box0 == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
                                            : CU_TENSOR_MAP_SWIZZLE_32B;
  CUresult result =
      encode(&map, type, kRank, const_cast<void*>(t.ptr), size, stride_bytes, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
             swizzle, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// The same with boxes of one tile (smem_tile.h).
template <typename Element, typename Tile>
cudaError_t make_tile_map(CUtensorMap& map, const TensorView<5>& tensor) {
  constexpr auto kType = cutlass::platform::is_same<Element, cutlass::half_t>::value ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                                                     : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return make_tensor_map(map, kType, tensor, Tile::kBoxColumns, Tile::kRows);
}

// [B, N, L, H, D] by its strides over B, N, L and H.
template <typename Params>
TensorView<5> tensor_view(const Params& p, const void* ptr, const int64_t (&stride)[4], int64_t L, int64_t D) {
  return {ptr, {D, L, p.H, p.N, p.B}, {1, stride[2], stride[3], stride[1], stride[0]}};
}

}  // namespace ds4s::sm90
