// Acceptance test of epilogue/epilogue_grad_bias.h: C += A B with K cut among several blocks, all of which add into the
// same tiles, for every family; an odd number of columns, an output that begins with something, guard elements after
// every row. Prints one line for each case; exit code 1 when one fails.
//
//   nvcc -std=c++17 -arch=sm_90 -I csrc/deepspeed4science/evoformer_attn -I <cutlass>/include epilogue_grad_bias.cu
#include <cutlass/device_kernel.h>
#include <cutlass/epilogue/thread/linear_combination.h>
#include <cutlass/gemm/kernel/default_gemm.h>
#include <cutlass/gemm/kernel/gemm.h>

#include <cmath>
#include <cstdio>
#include <random>
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

template <typename Arch, typename Output, int kElementsPerAccess, bool kAffine>
struct Case {
  using half_t = cutlass::half_t;
  using Block = cutlass::gemm::GemmShape<64, 64, 32>;
  using Warp = cutlass::gemm::GemmShape<32, 32, 32>;
  using OutputOp = cutlass::epilogue::thread::LinearCombination<Output, kElementsPerAccess, float, float>;
  using Swizzle = cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<>;
  using Default =
      cutlass::gemm::kernel::DefaultGemm<half_t, cutlass::layout::RowMajor, 8, half_t, cutlass::layout::ColumnMajor, 8,
                                         Output, cutlass::layout::RowMajor, float, cutlass::arch::OpClassTensorOp, Arch,
                                         Block, Warp, typename Family<Arch>::Instruction, OutputOp, Swizzle,
                                         Family<Arch>::kStages, false, cutlass::arch::OpMultiplyAdd>;
  using Mma = typename Default::Mma;
  using RowMajor = BiasGradEpilogue<Arch, Block, typename Mma::Operator, 1, OutputOp, kElementsPerAccess>;
  using Affine = BiasGradEpilogueAffineRankN<Arch, 2, Block, typename Mma::Operator, 1, OutputOp, kElementsPerAccess>;
  using Epilogue =
      typename cutlass::platform::conditional<kAffine, typename Affine::Epilogue, typename RowMajor::Epilogue>::type;
  using Kernel = cutlass::gemm::kernel::Gemm<Mma, Epilogue, Swizzle, /*SplitKSerial=*/false>;

  static bool run(int m, int n, int k, int parts, int pitch) {
    std::mt19937 random{std::random_device{}()};
    std::normal_distribution<float> normal;
    std::vector<half_t> a(size_t(m) * k), b(size_t(n) * k);
    for (auto& x : a) x = half_t(normal(random));
    for (auto& x : b) x = half_t(normal(random));
    const float kGuard = 77.f;
    std::vector<Output> c(size_t(m) * pitch, Output(kGuard));
    std::vector<double> expected(c.size(), kGuard);
    for (int i = 0; i < m; ++i) {
      for (int j = 0; j < n; ++j) {
        c[size_t(i) * pitch + j] = Output(0.5f);
        double sum = 0.5;
        for (int x = 0; x < k; ++x) sum += double(float(a[size_t(i) * k + x])) * double(float(b[size_t(j) * k + x]));
        expected[size_t(i) * pitch + j] = sum;
      }
    }
    half_t *d_a, *d_b;
    Output* d_c;
    cudaMalloc(&d_a, a.size() * 2), cudaMalloc(&d_b, b.size() * 2), cudaMalloc(&d_c, c.size() * sizeof(Output));
    cudaMemcpy(d_a, a.data(), a.size() * 2, cudaMemcpyHostToDevice);
    cudaMemcpy(d_b, b.data(), b.size() * 2, cudaMemcpyHostToDevice);
    cudaMemcpy(d_c, c.data(), c.size() * sizeof(Output), cudaMemcpyHostToDevice);

    cutlass::gemm::GemmCoord grid = Swizzle::get_tiled_shape({m, n, k}, {Block::kM, Block::kN, Block::kK}, parts);
    typename Kernel::Params params(cutlass::gemm::GemmCoord(m, n, k), grid, {d_a, k}, {d_b, k}, output(nullptr, pitch),
                                   output(d_c, pitch), {1.f, 0.f});
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
      if (int(x % size_t(pitch)) >= n) {
        guards &= float(c[x]) == kGuard;
        continue;
      }
      double d = double(float(c[x])) - expected[x];
      difference += d * d, norm += expected[x] * expected[x];
    }
    double error = std::sqrt(difference / norm), bound = sizeof(Output) == 2 ? 2e-3 : 1e-5;
    bool ok = status == cudaSuccess && guards && error < bound;
    std::printf("%s %s: output %d bytes, %d x %d x %d in %d parts: error %.1e, guards %s, %s\n", ok ? "ok  " : "FAIL",
                Family<Arch>::kName, int(sizeof(Output)), m, n, k, parts, error, guards ? "intact" : "written",
                kAffine ? "affine" : "row-major");
    return ok;
  }

 private:
  static auto output(Output* ptr, int pitch) {
    using Iterator = typename Epilogue::OutputTileIterator;
    if constexpr (kAffine) {
      typename Iterator::Layout::Stride stride;
      stride[0] = pitch, stride[1] = 1;
      return typename Iterator::TensorRef(ptr, typename Iterator::Layout(stride));
    } else {
      return typename Iterator::TensorRef(ptr, pitch);
    }
  }
};

template <typename Arch>
bool family() {
  bool ok = Case<Arch, float, 4, false>::run(128, 128, 256, 4, 128);
  ok &= Case<Arch, float, 4, false>::run(100, 77, 256, 2, 81);
  ok &= Case<Arch, cutlass::half_t, 8, false>::run(128, 128, 128, 2, 128);
  ok &= Case<Arch, cutlass::half_t, 8, false>::run(70, 61, 128, 2, 65);
  ok &= Case<Arch, float, 1, true>::run(100, 77, 256, 3, 80);
  return ok;
}

int main() {
  bool ok = family<cutlass::arch::Sm70>();
  ok &= family<cutlass::arch::Sm75>();
  ok &= family<cutlass::arch::Sm80>();
  return ok ? 0 : 1;
}
