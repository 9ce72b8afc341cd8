// Forward attention with biases for Sm70, Sm75 and Sm80, docs/math.md (1) to (7):
//
//   O = softmax(scale Q K^T + bias1 - shift + bias2) V,   lse = log sum exp of the same
//
// One block computes kQueriesPerBlock queries of one (batch, head) and iterates over the keys in blocks of
// kKeysPerBlock. Each warp owns 32 queries and 32 keys of every block; scores and probabilities stay in its registers.
// Schedule, budgets and reasons: docs/kernels/sm80.md. The template arguments up to Broadcast2_ are those of the
// published template; the others have defaults.
//
// Shared memory (kSharedBytes): Q, kStages times (K, V, bias1 row), bias2, constants of the block; the merge of the
// warps and O reuse it. With kSingleValueIteration = false: Q, K and V in pieces of channels, a tile of biases for each
// warp, which the merge reuses, and maxima of the rows.
//
// A caller may launch the kernel with the contract's fields of Params alone (Params::complete() fills in the others):
// grid (query blocks, heads, batch), attention_forward<Kernel><<<grid, kNumThreads, kSharedBytes>>>.
#pragma once

#include "epilogue/epilogue_rescale_output.h"
#include "sm80/forward/mainloop.h"
#include "sm80/forward/mainloop_multi_value.h"
#include "sm80/forward/params.h"
#include "sm80/forward/shared_memory.h"
#include "sm80/forward/softmax.h"
#include "sm80/forward/unseen.h"
#include "transform/bias_broadcast.h"

template <typename scalar_t_,    // half_t; bfloat16_t (Sm80); float
          typename ArchTag,      // cutlass::arch::Sm70, Sm75, Sm80
          bool isAligned_,       // Q, K, V, O and matrix bias rows begin at 16 bytes, D and Dv fill 16-byte chunks
          int kQueriesPerBlock,  // 32 to 128
          int kKeysPerBlock_,    // 32 to 128
          bool kSingleValueIteration_,  // O entirely in registers (D <= kHeadDim, Dv <= kHeadDimValue); else any D, Dv
          bool kSupportsBias_ = false, template <typename, typename, typename> class Broadcast1_ = BroadcastNoLoad,
          template <typename, typename, typename> class Broadcast2_ = BroadcastNoLoad,
          // kSingleValueIteration_: the largest D, a multiple of 16. Otherwise: the number of channels of Q and K at a
          // time. The default is the largest number that fits, up to 128.
          int kHeadDim_ =
              ds4s::default_head_dim<scalar_t_, ArchTag, kQueriesPerBlock, kKeysPerBlock_>(kSingleValueIteration_),
          // kSingleValueIteration_: the largest Dv. Otherwise: the number of columns of V at a time.
          int kHeadDimValue_ = kSingleValueIteration_ || kHeadDim_ < 64 ? kHeadDim_ : 64,
          bool kTf32_ = false,  // float only: TF32 tensor cores instead of full precision
          int kStripes_ = 1,    // key blocks that arrive in shared memory together
          // Warps resident on a multiprocessor. They share four register files: 8, 12 or 16 warps leave 255, 168 or 128
          // registers a thread. O takes one register a lane for each column of V.
          int kWarpsWanted_ = getWarpsPerSm<scalar_t_, ArchTag>(),
          // The op's host side (sm80/forward/launch.h) guarantees: every field of Params is set, scale is positive, and
          // if isAligned_ the rows of a matrix bias consist of whole 16-byte pieces.
          bool kIsComplete_ = false,
          // A matrix bias in Broadcast2_ passes through shared memory, loaded a stage ahead, instead of waiting in
          // registers; these allow another warp.
          bool kStagesBias2_ = false>
struct AttentionKernel {
  using scalar_t = scalar_t_;
  using accum_t = float;
  using lse_scalar_t = float;
  using output_t = scalar_t;
  using output_accum_t = accum_t;

  static constexpr bool kAligned = isAligned_;
  static constexpr bool kSupportsBias = kSupportsBias_;
  static constexpr bool kSingleValueIteration = kSingleValueIteration_;
  static constexpr int kKeysPerBlock = kKeysPerBlock_;
  static constexpr int kStripes = kStripes_;
  static constexpr int kKeysPerStage = kKeysPerBlock * kStripes;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadDimValue = kHeadDimValue_;
  static constexpr bool kIsComplete = kIsComplete_;

  static constexpr int kWarpSize = 32;
  static constexpr int kWarpsM = kQueriesPerBlock / 32;
  static constexpr int kWarpsN = kKeysPerBlock / 32;
  static constexpr int kNumWarps = kQueriesPerBlock * kKeysPerBlock / 1024;
  static constexpr int kNumThreads = kNumWarps * kWarpSize;
  static constexpr int kMinBlocksPerSm = kWarpsWanted_ > kNumWarps ? kWarpsWanted_ / kNumWarps : 1;
  static_assert(kQueriesPerBlock % 32 == 0 && kQueriesPerBlock >= 32 && kQueriesPerBlock <= 128, "32 to 128 queries");
  static_assert(kKeysPerBlock % 32 == 0 && kKeysPerBlock >= 32 && kKeysPerBlock <= 128, "32 to 128 keys");
  static_assert(kStripes == 1 || kSingleValueIteration, "several value iterations take one key block after another");
  static_assert(kKeysPerStage <= kNumThreads, "a thread brings one element of a row bias");
  static_assert(kHeadDim % 16 == 0 && kHeadDimValue % 16 == 0, "tiers are multiples of 16");

  using Traits = ds4s::ArchTraits<ArchTag>;
  using Mma = ds4s::WarpMma<scalar_t, ArchTag, kTf32_>;
  // Where O takes 128 registers, `huge` would lie in local memory, and its load in the loop would wait for bias2.
  using Softmax = ds4s::RowSoftmax<Mma, /*kIsWide=*/(kHeadDimValue >= 128)>;
  using Row = typename Softmax::Row;
  static constexpr bool kExact = sizeof(scalar_t) == 4 && !kTf32_;  // full precision: fewer roundings
  // Q is multiplied by kQFactor, so that every finite bias stays finite in units of the raw scores (head dimensions up
  // to 4096). Biases of half_t are never so large.
  static constexpr bool kHasQFactor = !kExact && !cutlass::platform::is_same<scalar_t, cutlass::half_t>::value;
  static constexpr float kQFactor = kHasQFactor ? 1.f / 64 : 1.f;
  static constexpr bool kScalesQ = kHasQFactor || !kIsComplete;  // an incomplete scale may be negative
  static constexpr int kStepsD = kHeadDim / Mma::kStepK;
  static constexpr int kStepsKeys = 32 / Mma::kStepK;
  static constexpr int kTilesO = kHeadDimValue / 8;
  static constexpr bool kQInRegisters = kHeadDim * int(sizeof(scalar_t)) <= 64;  // 16 registers a lane
  // The next addresses of K and V stay in registers where there are enough; elsewhere they are computed each time.
  static constexpr bool kKeepsLoaders = sizeof(scalar_t) == 2 && (kHeadDim <= 32 || kHeadDim == 64);
  // With them a thread's place in a tile, which narrow heads compute again: (1,768,768,4,32) 1.22 instead of 1.24 ms,
  // (1,256,1024,4,64) 1.06 instead of 1.05.
  static constexpr bool kKeepsPlaces = kHeadDim > 32;
  // Rows n that see all keys have a loop of their own. With two loops D = 48 would spill (36 bytes).
  static constexpr bool kHasWholeLoop = kHeadDim != 48;

  // A row bias is the same for all queries and goes through shared memory; a matrix bias goes straight into registers.
  using TileShape = cutlass::MatrixShape<kQueriesPerBlock, kKeysPerBlock>;
  using RowShape = cutlass::MatrixShape<1, kKeysPerStage>;
  using RowMap = ds4s::RowThreadMap;
  using MatrixMap = ds4s::ScoreThreadMap<Mma, kWarpsM, kAligned && kIsComplete>;
  template <template <typename, typename, typename> class Broadcast>
  struct Bias {
    static constexpr bool kIsRow = kSupportsBias && Broadcast<RowMap, RowShape, scalar_t>::kIsRow;
    static constexpr bool kIsMatrix = kSupportsBias && Broadcast<MatrixMap, TileShape, scalar_t>::kEnable && !kIsRow;
    using Row = Broadcast<RowMap, RowShape, scalar_t>;
    using Matrix = Broadcast<MatrixMap, TileShape, scalar_t>;
  };
  template <typename ThreadMap, typename Shape, typename T>
  using Broadcast1 = typename cutlass::platform::conditional<kSupportsBias, Broadcast1_<ThreadMap, Shape, T>,
                                                             BroadcastNoLoad<ThreadMap, Shape, T>>::type;
  template <typename ThreadMap, typename Shape, typename T>
  using Broadcast2 = typename cutlass::platform::conditional<kSupportsBias, Broadcast2_<ThreadMap, Shape, T>,
                                                             BroadcastNoLoad<ThreadMap, Shape, T>>::type;
  using Bias1 = Bias<Broadcast1_>;
  using Bias2 = Bias<Broadcast2_>;
  static constexpr bool kHasRowBias = Bias1::kIsRow || Bias2::kIsRow;
  // The softmax reference comes from the first keys, and a block in which it was not right repeats itself. Only where P
  // has a float's range: in float16 a row whose scores rise by ten would be repeated. (1,384,384,4,32): 0.96 of the
  // time, with bias2 alone 1.03; (1,64,1024,8,128), where O takes 128 registers: 1.09.
  static constexpr bool kFixesReference = cutlass::platform::is_same<scalar_t, cutlass::bfloat16_t>::value &&
                                          kSingleValueIteration && kHasRowBias && kHeadDimValue < 128;
  // The next elements of a matrix bias are loaded after the exponents, where that spills no registers.
  static constexpr bool kLoadsLate =
      sizeof(scalar_t) == 2 && kSingleValueIteration && kHasRowBias && kHeadDimValue < 128;
  static constexpr bool kStagesBias2 = kStagesBias2_;
  // bias2 may lie in tiles of 32 x 32 (BiasRows::tiles). Where O takes 128 registers, that would spill more.
  static constexpr bool kReadsTiles = Bias2::kIsMatrix && kAligned && kIsComplete && kSingleValueIteration &&
                                      !kStagesBias2 && Mma::kVectorsInOrder && kHeadDimValue < 128;
  static constexpr int kBias2Bytes =
      kStagesBias2 ? kStripes * kNumThreads * int(sizeof(typename Bias2::Matrix::Fragment)) : 0;
  static constexpr bool kSkips = Bias1::kIsRow;            // without bias1 a row n sees all of its keys or none
  static constexpr bool kHasMask = kSkips && kIsComplete;  // Params::key_mask is not null

  using QTile = ds4s::Tile<scalar_t, kQueriesPerBlock, kHeadDim>;
  static constexpr bool kCanCopy = Traits::kHasCpAsync && kAligned;
  using KTile = ds4s::PermutedTile<scalar_t, kKeysPerStage, kHeadDim, kCanCopy>;
  using VTile = ds4s::PermutedTile<scalar_t, kKeysPerStage, kHeadDimValue, kCanCopy>;
  using OTile = ds4s::Tile<output_t, kQueriesPerBlock, kHeadDimValue>;
  static constexpr int kRowBiasBytes = kHasRowBias && kSingleValueIteration ? kKeysPerStage / 2 * 16 : 0;
  static constexpr int kStageBytes = KTile::kBytes + VTile::kBytes + kRowBiasBytes;
  static constexpr int kConstantsBytes = kSingleValueIteration ? ds4s::kForwardConstantsBytes : 0;
  static constexpr int kMaxShared = ds4s::max_shared_bytes<ArchTag>();
  static constexpr bool kFitsTwice = QTile::kBytes + 2 * kStageBytes + kBias2Bytes + kConstantsBytes <= kMaxShared;
  static constexpr bool kAsync = kCanCopy && (kFitsTwice || !kSingleValueIteration);
  // The addresses of the first keys are computed while the mask is being loaded; their loads are issued as soon as the
  // mask says that these keys are seen.
  static constexpr bool kSendsEarly = kAsync && sizeof(scalar_t) == 2;
  static constexpr int kStages = kAsync && kSingleValueIteration ? 2 : 1;
  static constexpr int kLoopBytes = QTile::kBytes + kStages * kStageBytes + kBias2Bytes;
  static_assert(!kStagesBias2 || (kAsync && kSingleValueIteration && kIsComplete && Bias2::kIsMatrix),
                "a lane copies 16 bytes of a matrix bias at a time, for one key block after another");
  static constexpr int kMergeBytes = kWarpsN > 1 ? kWarpsM * 32 * (kTilesO * 8 + 2 * Mma::kLaneRows) * 4 : 0;
  static constexpr int kEndBytes = kMergeBytes > OTile::kBytes ? kMergeBytes : OTile::kBytes;
  using MultiValue = ds4s::MultiValueShared<kNumWarps, kWarpsM, kLoopBytes, kHeadDimValue>;
  // Dynamic shared memory.
  static constexpr int kInUseBytes = kSingleValueIteration ? kLoopBytes : MultiValue::kBytes;
  static constexpr int kSharedBytes = (kInUseBytes > kEndBytes ? kInUseBytes : kEndBytes) + kConstantsBytes;
  static_assert(ds4s::FitsInSharedMemory<kSharedBytes, kMaxShared>::kValue);

  // Pointers, sizes and strides: sm80/forward/params.h.
  using Params = ds4s::ForwardParams<scalar_t, AttentionKernel>;

  // Why a launch with these parameters is not supported; null if it is. Called on the host before the launch.
  static const char* check_supported(const Params& p) { return ds4s::forward_obstacle<AttentionKernel>(p); }

  static CUTLASS_DEVICE void attention_kernel(Params& p) {
    extern __shared__ __align__(16) char shared[];
    if constexpr (!kIsComplete) p.complete(int32_t(gridDim.y), int32_t(gridDim.z));
    const typename Params::Position at = p.position_of_block();
    if (at.batch >= p.num_batches) return;
    // The mask comes first: all other loads wait for it.
    ds4s::ptx::wait_for_kernel_before();
    const auto mask = ds4s::RowMask::load<kSkips, kHasMask>(
        kHasMask ? p.key_mask.row(at.batch) : p.key_mask.from(at.batch), p.num_keys);
    Params block = p;
    block.advance_to(at);
    if constexpr (kSingleValueIteration) {
      ds4s::ForwardBlock<AttentionKernel>(block, shared).run(mask);
    } else {
      if (mask.sees_nothing()) return ds4s::store_unseen<AttentionKernel>(block);
      ds4s::ForwardBlockMultiValue<AttentionKernel>(block, shared).run();
    }
  }
};

// The kernel as it is launched: grid (query blocks, heads, batch) or as launch.h sets it, kNumThreads threads,
// kSharedBytes of dynamic shared memory.
template <typename Kernel>
__global__ void __launch_bounds__(Kernel::kNumThreads, Kernel::kMinBlocksPerSm)
    attention_forward(typename Kernel::Params params) {
  Kernel::attention_kernel(params);
}
