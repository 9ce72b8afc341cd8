// Acceptance test of epilogue/epilogue_grad_bias.h: C += A B with K cut among several blocks, all of which add into the
// same tiles, for every family; an odd number of columns, an output that begins with something, guard elements after
// every row; outputs of rank 4, and K cut among the warps of a block. Prints one line for each case; exit code 1 when
// one fails.
//
//   nvcc -std=c++17 -arch=sm_90 -I csrc/deepspeed4science/evoformer_attn -I <cutlass>/include epilogue_grad_bias.cu
#include <cutlass/device_kernel.h>
#include <cutlass/epilogue/thread/linear_combination.h>
#include <cutlass/gemm/kernel/default_gemm.h>
#include <cutlass/gemm/kernel/gemm.h>

#include <cmath>
#include <cstdio>
#include <random>
#include <type_traits>
#include <utility>
#include <vector>

#include "epilogue/epilogue_grad_bias.h"

template <typename Arch>
struct Family;
template <>
struct Family<cutlass::arch::Sm70> {
  using Instruction = cutlass::gemm::GemmShape<8, 8, 4>;
  static constexpr int kStages = 2;
  static constexpr const char* kName = "Sm70";
};
template <>
struct Family<cutlass::arch::Sm75> {
  using Instruction = cutlass::gemm::GemmShape<16, 8, 8>;
  static constexpr int kStages = 2;
  static constexpr const char* kName = "Sm75";
};
template <>
struct Family<cutlass::arch::Sm80> {
  using Instruction = cutlass::gemm::GemmShape<16, 8, 16>;
  static constexpr int kStages = 3;
  static constexpr const char* kName = "Sm80";
};

template <typename Arch, typename Output, int kElementsPerAccess,
          int kRank = 0,         // 0: row-major, by BiasGradEpilogue
          int kPartitionsK = 1>  // warps that share a part of the output
struct Case {
  using half_t = cutlass::half_t;
  static constexpr int kAffineRank = kRank == 0 ? 2 : kRank;
  static constexpr int kInnerM = 20, kInnerN = 7;  // rank 4: i = i0 + kInnerM i1, j = j0 + kInnerN j1
  using Block = cutlass::gemm::GemmShape<64, 64, 32 * kPartitionsK>;
  using Warp = cutlass::gemm::GemmShape<32, 32, 32>;
  using OutputOp = cutlass::epilogue::thread::LinearCombination<Output, kElementsPerAccess, float, float>;
  using Swizzle = cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<>;
  using Default =
      cutlass::gemm::kernel::DefaultGemm<half_t, cutlass::layout::RowMajor, 8, half_t, cutlass::layout::ColumnMajor, 8,
                                         Output, cutlass::layout::RowMajor, float, cutlass::arch::OpClassTensorOp, Arch,
                                         Block, Warp, typename Family<Arch>::Instruction, OutputOp, Swizzle,
                                         Family<Arch>::kStages, false, cutlass::arch::OpMultiplyAdd>;
  using Mma = typename Default::Mma;
  using RowMajor = BiasGradEpilogue<Arch, Block, typename Mma::Operator, kPartitionsK, OutputOp, kElementsPerAccess>;
  using Affine = BiasGradEpilogueAffineRankN<Arch, kAffineRank, Block, typename Mma::Operator, kPartitionsK, OutputOp,
                                             kElementsPerAccess>;
  using Epilogue =
      typename cutlass::platform::conditional<kRank == 0, typename RowMajor::Epilogue, typename Affine::Epilogue>::type;
  using Kernel = cutlass::gemm::kernel::Gemm<Mma, Epilogue, Swizzle, /*SplitKSerial=*/false>;
  // A base's operator would leave the atomic iterator where it is.
  using RowMajorIterator = typename RowMajor::OutputTileIterator;
  static_assert(std::is_same<decltype(std::declval<RowMajorIterator&>() += 1), RowMajorIterator&>::value,
                "stream-K products move it by several fragments");

  // Where element (i, j) is; rank 4: the outer index of a column runs slowest, then both of a row.
  static size_t at(int m, int pitch, int i, int j) {
    if (kRank < 4) return size_t(i) * pitch + j;
    return (size_t(j / kInnerN) * m + size_t(i % kInnerM) * (m / kInnerM) + i / kInnerM) * pitch + j % kInnerN;
  }

  static bool run(int m, int n, int k, int parts, int pitch) {
    std::mt19937 random{std::random_device{}()};
    std::normal_distribution<float> normal;
    std::vector<half_t> a(size_t(m) * k), b(size_t(n) * k);
    for (auto& x : a) x = half_t(normal(random));
    for (auto& x : b) x = half_t(normal(random));
    const float kGuard = 77.f;
    std::vector<Output> c(size_t(m) * pitch * (kRank < 4 ? 1 : n / kInnerN), Output(kGuard));
    std::vector<double> expected(c.size(), NAN);  // NaN: not the matrix's
    for (int i = 0; i < m; ++i) {
      for (int j = 0; j < n; ++j) {
        double sum = 0.5;
        for (int x = 0; x < k; ++x) sum += double(float(a[size_t(i) * k + x])) * double(float(b[size_t(j) * k + x]));
        c[at(m, pitch, i, j)] = Output(0.5f);
        expected[at(m, pitch, i, j)] = sum;
      }
    }
    half_t *d_a, *d_b;
    Output* d_c;
    cudaMalloc(&d_a, a.size() * 2), cudaMalloc(&d_b, b.size() * 2), cudaMalloc(&d_c, c.size() * sizeof(Output));
    cudaMemcpy(d_a, a.data(), a.size() * 2, cudaMemcpyHostToDevice);
    cudaMemcpy(d_b, b.data(), b.size() * 2, cudaMemcpyHostToDevice);
    cudaMemcpy(d_c, c.data(), c.size() * sizeof(Output), cudaMemcpyHostToDevice);

    cutlass::gemm::GemmCoord grid = Swizzle::get_tiled_shape({m, n, k}, {Block::kM, Block::kN, Block::kK}, parts);
    typename Kernel::Params params(cutlass::gemm::GemmCoord(m, n, k), grid, {d_a, k}, {d_b, k},
                                   output(nullptr, m, n, pitch), output(d_c, m, n, pitch), {1.f, 0.f});
    if constexpr (kRank == 4) {
      using Iterator = typename Epilogue::OutputTileIterator;
      auto extent = cutlass::make_Coord(kInnerM, m / kInnerM, kInnerN, n / kInnerN);
      params.params_D = typename Iterator::Params(extent, params.ref_D.layout());
    }
    int shared = int(sizeof(typename Kernel::SharedStorage));
    if (shared > 48 * 1024) {
      cudaFuncSetAttribute(cutlass::Kernel<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    }
    cutlass::Kernel<Kernel><<<Swizzle::get_grid_shape(grid), Kernel::kThreadCount, shared>>>(params);
    cudaError_t status = cudaDeviceSynchronize();
    cudaMemcpy(c.data(), d_c, c.size() * sizeof(Output), cudaMemcpyDeviceToHost);
    cudaFree(d_a), cudaFree(d_b), cudaFree(d_c);

    double difference = 0, norm = 0;
    bool guards = true;
    for (size_t x = 0; x < c.size(); ++x) {
      if (std::isnan(expected[x])) {
        guards &= float(c[x]) == kGuard;
        continue;
      }
      double d = double(float(c[x])) - expected[x];
      difference += d * d, norm += expected[x] * expected[x];
    }
    double error = std::sqrt(difference / norm), bound = sizeof(Output) == 4 ? 1e-5 : kIsHalf ? 2e-3 : 6e-3;
    bool ok = status == cudaSuccess && guards && error < bound;
    std::printf("%s %s: output %d bytes, %d x %d x %d in %d parts, %d in a block: error %.1e, guards %s, rank %d\n",
                ok ? "ok  " : "FAIL", Family<Arch>::kName, int(sizeof(Output)), m, n, k, parts, kPartitionsK, error,
                guards ? "intact" : "written", kRank);
    return ok;
  }

 private:
  static constexpr bool kIsHalf = cutlass::platform::is_same<Output, half_t>::value;
  static auto output(Output* ptr, int m, int n, int pitch) {
    using Iterator = typename Epilogue::OutputTileIterator;
    if constexpr (kRank == 0) {
      return typename Iterator::TensorRef(ptr, pitch);
    } else {
      typename Iterator::Layout::Stride stride;
      if constexpr (kRank == 2) {
        stride[0] = pitch, stride[1] = 1;
      } else {
        stride[0] = int64_t(m / kInnerM) * pitch, stride[1] = pitch, stride[2] = 1, stride[3] = int64_t(m) * pitch;
      }
      return typename Iterator::TensorRef(ptr, typename Iterator::Layout(stride));
    }
  }
};

template <typename Arch>
bool family() {
  using cutlass::half_t;
  bool ok = Case<Arch, float, 4>::run(128, 128, 256, 4, 128);
  ok &= Case<Arch, float, 4>::run(100, 77, 256, 2, 81);
  ok &= Case<Arch, half_t, 8>::run(128, 128, 128, 2, 128);
  ok &= Case<Arch, half_t, 8>::run(70, 61, 128, 2, 65);
  ok &= Case<Arch, float, 1, /*kRank=*/2>::run(100, 77, 256, 3, 80);
  ok &= Case<Arch, float, 1, /*kRank=*/4>::run(100, 77, 256, 3, 9);
  if constexpr (Arch::kMinComputeCapability >= 75) {  // CUTLASS's Volta main loop does not cut K among warps
    ok &= Case<Arch, float, 4, /*kRank=*/0, /*kPartitionsK=*/2>::run(100, 77, 256, 2, 81);
    ok &= Case<Arch, float, 1, /*kRank=*/4, /*kPartitionsK=*/2>::run(100, 77, 256, 2, 9);
  }
  if constexpr (Arch::kMinComputeCapability >= 80) ok &= Case<Arch, cutlass::bfloat16_t, 8>::run(70, 61, 128, 2, 65);
  return ok;
}

int main() {
  bool ok = family<cutlass::arch::Sm70>();
  ok &= family<cutlass::arch::Sm75>();
  ok &= family<cutlass::arch::Sm80>();
  return ok ? 0 : 1;
}
