// Forward attention with biases for Sm70, Sm75 and Sm80:
//
//   O = softmax(scale Q K^T + bias1 - shift + bias2) V,   lse = log sum exp of the same
//
// One block computes kQueriesPerBlock rows of one (batch, head) and walks over the keys in blocks of kKeysPerBlock;
// each warp owns 32 rows and 32 keys of every block, scores and probabilities stay in its registers. Schedule, budgets
// and reasons: docs/kernels-sm80.md. The templates and names are the contract's; what follows Broadcast2_ is ours.
//
// Shared memory: Q, kStages times (K, V, bias1 row), constants of the row n, later reused for the merge of the warps
// and for O: kSharedBytes.
#pragma once

#include "epilogue/epilogue_rescale_output.h"
#include "sm80/forward/mainloop.h"
#include "sm80/forward/mainloop_buffered.h"
#include "sm80/forward/softmax.h"
#include "sm80/forward/unseen.h"
#include "transform/bias_broadcast.h"

template <typename scalar_t_,    // half_t; bfloat16_t (Sm80); float
          typename ArchTag,      // cutlass::arch::Sm70, Sm75, Sm80
          bool isAligned_,       // Q, K, V, O and matrix bias rows begin at 16 bytes, D and Dv fill 16-byte chunks
          int kQueriesPerBlock,  // 32 to 128
          int kKeysPerBlock_,    // 32 to 128
          bool kSingleValueIteration_,  // O in registers (Dv <= kHeadDimValue); else through output_accum_ptr, any Dv
          bool kSupportsBias_ = false, template <typename, typename, typename> class Broadcast1_ = BroadcastNoLoad,
          template <typename, typename, typename> class Broadcast2_ = BroadcastNoLoad,
          int kHeadDim_ = 128,                                           // tier: the largest D, a multiple of 16
          int kHeadDimValue_ = kSingleValueIteration_ ? kHeadDim_ : 64,  // tier of Dv; else columns of V at a time
          bool kTf32_ = false,  // float only: TF32 tensor cores instead of full precision
          int kStripes_ = 1,    // key blocks that arrive in shared memory together
          int kInFlight_ = 1,   // of these, whose scores a warp computes before it turns to their softmax
          // Warps to be resident on a multiprocessor, which spread over four register files: 8, 12 or 16 of them leave
          // 255, 168 or 128 registers a thread. O takes one register a lane for each column of V.
          int kWarpsWanted_ = getWarpsPerSm<scalar_t_, ArchTag>() - (kHeadDimValue_ > 32 ? 4 : 0)>
struct AttentionKernel {
  using scalar_t = scalar_t_;
  using accum_t = float;
  using lse_scalar_t = float;
  using output_t = scalar_t;
  using output_accum_t = accum_t;

  static constexpr bool kIsAligned = isAligned_;
  static constexpr bool kSupportsBias = kSupportsBias_;
  static constexpr bool kSingleValueIteration = kSingleValueIteration_;
  static constexpr int kKeysPerBlock = kKeysPerBlock_;
  static constexpr int kStripes = kStripes_;
  static constexpr int kInFlight = kInFlight_;
  static constexpr int kKeysPerStage = kKeysPerBlock * kStripes;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadDimValue = kHeadDimValue_;

  static constexpr int kWarpSize = 32;
  static constexpr int kWarpsM = kQueriesPerBlock / 32;
  static constexpr int kWarpsN = kKeysPerBlock / 32;
  static constexpr int kNumWarps = kQueriesPerBlock * kKeysPerBlock / 1024;
  static constexpr int kNumThreads = kNumWarps * kWarpSize;
  static constexpr int kMinBlocksPerSm = kWarpsWanted_ > kNumWarps ? kWarpsWanted_ / kNumWarps : 1;
  static_assert(kQueriesPerBlock % 32 == 0 && kQueriesPerBlock >= 32 && kQueriesPerBlock <= 128, "32 to 128 queries");
  static_assert(kKeysPerBlock % 32 == 0 && kKeysPerBlock >= 32 && kKeysPerBlock <= 128, "32 to 128 keys");
  static_assert(kStripes == 1 || kSingleValueIteration, "through the buffer, one key block after another");
  static_assert(kStripes % kInFlight == 0, "whole groups of key blocks");
  static_assert(kKeysPerStage <= kNumThreads, "a thread brings one element of a row bias");
  static_assert(kHeadDim % 16 == 0 && kHeadDimValue % 16 == 0, "tiers are multiples of 16");

  using Traits = ds4s::ArchTraits<ArchTag>;
  using Mma = ds4s::WarpMma<scalar_t, ArchTag, kTf32_>;
  using Softmax = ds4s::RowSoftmax<Mma>;
  using Row = typename Softmax::Row;
  static constexpr bool kExact = sizeof(scalar_t) == 4 && !kTf32_;  // full precision: fewer roundings
  // Q is multiplied by it, so that any finite bias is finite in its units (head dimensions up to 4096); half_t has no
  // such large ones.
  static constexpr bool kScalesQ = !kExact && !cutlass::platform::is_same<scalar_t, cutlass::half_t>::value;
  static constexpr float kQFactor = kScalesQ ? 1.f / 64 : 1.f;
  static constexpr bool kAsync = Traits::kHasCpAsync && kIsAligned;
  static constexpr int kStages = kAsync && kSingleValueIteration ? 2 : 1;
  static constexpr int kStepsD = kHeadDim / Mma::kStepK;
  static constexpr int kStepsKeys = 32 / Mma::kStepK;
  static constexpr int kTilesO = kHeadDimValue / 8;
  static constexpr bool kQInRegisters = kHeadDim * int(sizeof(scalar_t)) <= 64;  // 16 registers a lane

  // Biases. A row bias goes through shared memory (it is every row's), a matrix bias straight into registers.
  using TileShape = cutlass::MatrixShape<kQueriesPerBlock, kKeysPerBlock>;
  using RowShape = cutlass::MatrixShape<kNumThreads / kKeysPerStage, kKeysPerStage>;  // one element a thread
  using RowMap = ds4s::SweepThreadMap<RowShape, kNumThreads, 1>;
  using MatrixMap = ds4s::ScoreThreadMap<Mma, kWarpsM, kIsAligned>;
  template <template <typename, typename, typename> class Broadcast>
  struct Bias {
    static constexpr bool kIsRow = kSupportsBias && Broadcast<RowMap, RowShape, scalar_t>::kIsRow;
    static constexpr bool kIsMatrix = kSupportsBias && Broadcast<MatrixMap, TileShape, scalar_t>::kEnable && !kIsRow;
    using Row = Broadcast<RowMap, RowShape, scalar_t>;
    using Matrix = Broadcast<MatrixMap, TileShape, scalar_t>;
  };
  using Bias1 = Bias<Broadcast1_>;
  using Bias2 = Bias<Broadcast2_>;
  static constexpr bool kHasRowBias = Bias1::kIsRow || Bias2::kIsRow;
  // Without bias1 a row n sees all of its keys or none.
  using Keys = ds4s::VisibleKeys<kKeysPerStage, kKeysPerBlock * kInFlight, /*kSkips=*/Bias1::kIsRow>;

  using QTile = ds4s::Tile<scalar_t, kQueriesPerBlock, kHeadDim>;
  using KTile = ds4s::Tile<scalar_t, kKeysPerStage, kHeadDim>;
  using VTile = ds4s::Tile<scalar_t, kKeysPerStage, kHeadDimValue>;
  using OTile = ds4s::Tile<output_t, kQueriesPerBlock, kHeadDimValue>;
  static constexpr int kRowBiasBytes = kHasRowBias ? kKeysPerStage / 2 * 16 : 0;
  static constexpr int kStageBytes = KTile::kBytes + VTile::kBytes + kRowBiasBytes;
  static constexpr int kConstantsBytes = Bias1::kIsRow ? 32 : 0;  // of the row n
  static constexpr int kLoopBytes = QTile::kBytes + kStages * kStageBytes + kConstantsBytes;
  static constexpr int kMergeBytes = kWarpsN > 1 ? kWarpsM * 32 * (kTilesO * 8 + 2 * Mma::kSlots) * 4 : 0;
  static constexpr int kRowMaxBytes = kNumWarps * 32 * 4;
  static constexpr int kEndBytes = kMergeBytes > OTile::kBytes ? kMergeBytes : OTile::kBytes;
  // Dynamic shared memory; through the buffer everything is needed at once.
  static constexpr int kSharedBytes = !kSingleValueIteration   ? kLoopBytes + kMergeBytes + kRowMaxBytes
                                      : kLoopBytes > kEndBytes ? kLoopBytes
                                                               : kEndBytes;

  struct Params {
    // [B, N, H, L, D] in any order of memory; D has stride 1. The contract calls B * N the batch, N the length.
    const scalar_t* query_ptr = nullptr;  // [batch, H, num_queries, head_dim]
    const scalar_t* key_ptr = nullptr;    // [batch, H, num_keys, head_dim]
    const scalar_t* value_ptr = nullptr;  // [batch, H, num_keys, head_dim_value]
    scalar_t* bias1_ptr = nullptr;        // [B, N, 1, 1, num_keys]
    scalar_t* bias2_ptr = nullptr;        // [B, 1, H, num_queries, num_keys]

    output_t* output_ptr = nullptr;  // [batch, H, num_queries, head_dim_value]
    output_accum_t* output_accum_ptr =
        nullptr;                            // [batch, H, num_queries, head_dim_value], kSingleValueIteration = false
    lse_scalar_t* logsumexp_ptr = nullptr;  // [batch, H, num_queries] contiguous, or null

    accum_t scale = 1;
    int32_t head_dim = 0, head_dim_value = 0;
    int32_t num_queries = 0, num_keys = 0;
    int32_t num_heads = 1, num_batches = 1;  // num_batches = B * N
    int32_t B = 1, N = 1;
    int32_t group_log2 = 0;       // order of the blocks; the grid then counts num_batches rounded up to whole groups
    ds4s::KeyMask key_mask = {};  // [batch, ...]: what bias1 hides, and its shift; null: nothing, and 0

    // Elements. M: next query or key; H: next head; B: next of the B * N batches; Outer: added for each next of the B.
    int64_t q_strideM = 0, k_strideM = 0, v_strideM = 0, o_strideM = 0;
    int64_t q_strideH = 0, k_strideH = 0, v_strideH = 0, o_strideH = 0;
    int64_t q_strideB = 0, k_strideB = 0, v_strideB = 0, o_strideB = 0;
    int64_t q_strideOuter = 0, k_strideOuter = 0, v_strideOuter = 0, o_strideOuter = 0;
    int64_t bias1_strideB = 0, bias1_strideN = 0;
    int64_t bias2_strideB = 0, bias2_strideH = 0, bias2_strideM = 0;

    // Moves the pointers to this block's rows; num_queries becomes what is left from there. False: nothing to do.
    // The grid is (query blocks, heads, batches), or the product of the three on x (no limit of 65,535 then). With
    // group_log2 the 2^group_log2 neighbours of a batch come first, one after another: they read the same bias2 tile.
    CUTLASS_DEVICE bool advance_to_block() {
      uint32_t num_blocks = uint32_t(num_queries + kQueriesPerBlock - 1) / kQueriesPerBlock;
      uint32_t id = ds4s::ptx::block_x() + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
      uint32_t in_group = id & ((1u << group_log2) - 1);
      id >>= group_log2;
      uint32_t rest = id / num_blocks;
      int32_t row = int32_t(id - rest * num_blocks) * kQueriesPerBlock;
      uint32_t group = rest / uint32_t(num_heads);
      int64_t head = rest - group * uint32_t(num_heads);
      int64_t batch = (group << group_log2) + in_group;
      int64_t b = uint32_t(batch) / uint32_t(N);
      int64_t n = batch - b * N;
      if (batch >= num_batches) return false;

      query_ptr += batch * q_strideB + b * q_strideOuter + head * q_strideH + row * q_strideM;
      key_ptr += batch * k_strideB + b * k_strideOuter + head * k_strideH;
      value_ptr += batch * v_strideB + b * v_strideOuter + head * v_strideH;
      output_ptr += batch * o_strideB + b * o_strideOuter + head * o_strideH + row * o_strideM;
      int64_t out_row = (batch * num_heads + head) * num_queries + row;
      if (output_accum_ptr) output_accum_ptr += out_row * head_dim_value;
      if (logsumexp_ptr) logsumexp_ptr += out_row;
      bias1_ptr = to_tile<Bias1>(bias1_ptr, b, n, head, row);
      bias2_ptr = to_tile<Bias2>(bias2_ptr, b, n, head, row);
      key_mask = key_mask.from(batch);
      num_queries -= row;
      return true;
    }

   private:
    // A policy uses bias1's strides when it is a row and bias2's when it is a matrix, in whichever slot it stands.
    template <typename BiasT>
    CUTLASS_DEVICE scalar_t* to_tile(scalar_t* ptr, int64_t b, int64_t n, int64_t head, int32_t row) const {
      if constexpr (BiasT::kIsRow) {
        return BiasT::Row::advance(ptr, b, n, head, bias1_strideB, bias1_strideN, 0);
      } else if constexpr (BiasT::kIsMatrix) {
        return BiasT::Matrix::advance(ptr, b, n, head, bias2_strideB, 0, bias2_strideH) + row * bias2_strideM;
      } else {
        return ptr;
      }
    }
  };

  static CUTLASS_DEVICE void attention_kernel(Params& p) {
    extern __shared__ __align__(16) char shared[];
    if (p.key_mask.range != nullptr) {
      Params block = p;  // computed again below: held till then, it would take registers from the loop
      if (block.advance_to_block() && block.key_mask.sees_nothing(0)) return ds4s::store_unseen<AttentionKernel>(block);
    }
    Params block = p;
    if (!block.advance_to_block()) return;
    if constexpr (kSingleValueIteration) {
      ds4s::ForwardBlock<AttentionKernel>(block, shared).run(p);
    } else {
      ds4s::ForwardBlockBuffered<AttentionKernel>(block, shared).run();
    }
  }
};

// The launchable form of a kernel: grid as advance_to_block() says, kNumThreads threads, kSharedBytes of dynamic shared
// memory.
template <typename Kernel>
__global__ void __launch_bounds__(Kernel::kNumThreads, Kernel::kMinBlocksPerSm)
    attention_forward(typename Kernel::Params params) {
  Kernel::attention_kernel(params);
}
