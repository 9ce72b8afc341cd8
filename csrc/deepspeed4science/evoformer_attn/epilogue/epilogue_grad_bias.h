// CUTLASS's tensor-op epilogue with atomic additions: many blocks add their products to one bias gradient, math.md
// (16), without a workspace and in any order. The accesses and additions are those of the dbias2 kernel (atomic_tile.h,
// sm80/backward/kernel_dbias2.h); this form serves a CUTLASS threadblock GEMM.
//
// Sm70 has one partition of K only. The swizzle of CUTLASS's Volta operands has a period of eight steps of 4, and each
// warp of its main loop counts its own steps from 0 (mma_tensor_op_tile_iterator_sm70.h), so warps of later partitions
// would read wrong elements.
#pragma once

#include <cutlass/epilogue/threadblock/default_epilogue_tensor_op.h>
#include <cutlass/epilogue/threadblock/default_epilogue_volta_tensor_op.h>

#include "predicated_tile_iterator_atomic.h"

namespace ds4s {

// The epilogue of Default (one of CUTLASS's DefaultEpilogue...TensorOp), writing through another iterator.
template <typename Default, typename OutputTileIterator>
using EpilogueWithIterator = cutlass::epilogue::threadblock::Epilogue<
    typename Default::Shape, typename Default::WarpMmaTensorOp, Default::kPartitionsK, OutputTileIterator,
    typename Default::AccumulatorFragmentIterator, typename Default::WarpTileIterator,
    typename Default::SharedLoadIterator, typename Default::OutputOp, typename Default::Padding,
    Default::Epilogue::kFragmentsPerIteration>;

}  // namespace ds4s

template <typename Arch_,             // cutlass::arch::Sm70, Sm75, Sm80
          typename Shape_,            // threadblock tile
          typename WarpMmaTensorOp_,  // warp-level product that gives the accumulators
          int PartitionsK, typename OutputOp_, int ElementsPerAccess, bool ScatterD = false,
          typename PermuteDLayout = cutlass::layout::NoPermute>
struct BiasGradEpilogue {
  using Default =
      cutlass::epilogue::threadblock::DefaultEpilogueTensorOp<Shape_, WarpMmaTensorOp_, PartitionsK, OutputOp_,
                                                              ElementsPerAccess, ScatterD, PermuteDLayout>;
  using OutputTileIterator =
      ds4s::PredicatedTileIteratorAtomic<typename Default::OutputTileThreadMap, typename OutputOp_::ElementOutput,
                                         ScatterD, PermuteDLayout>;
  using Epilogue = ds4s::EpilogueWithIterator<Default, OutputTileIterator>;
};

template <typename Shape_, typename WarpMmaTensorOp_, int PartitionsK, typename OutputOp_, int ElementsPerAccess,
          bool ScatterD, typename PermuteDLayout>
struct BiasGradEpilogue<cutlass::arch::Sm70, Shape_, WarpMmaTensorOp_, PartitionsK, OutputOp_, ElementsPerAccess,
                        ScatterD, PermuteDLayout> {
  static_assert(PartitionsK == 1, "CUTLASS's main loop for Sm70 does not cut K among the warps of a block");
  using Default =
      cutlass::epilogue::threadblock::DefaultEpilogueVoltaTensorOp<Shape_, WarpMmaTensorOp_, PartitionsK, OutputOp_,
                                                                   ElementsPerAccess, ScatterD, PermuteDLayout>;
  using OutputTileIterator =
      ds4s::PredicatedTileIteratorAtomic<typename Default::OutputTileThreadMap, typename OutputOp_::ElementOutput,
                                         ScatterD, PermuteDLayout>;
  using Epilogue = ds4s::EpilogueWithIterator<Default, OutputTileIterator>;
};

template <typename Arch_, int Rank, typename Shape_, typename WarpMmaTensorOp_, int PartitionsK, typename OutputOp_,
          int ElementsPerAccess>
struct BiasGradEpilogueAffineRankN {
  using Default =
      cutlass::epilogue::threadblock::DefaultEpilogueTensorOpAffineRankN<Rank, Shape_, WarpMmaTensorOp_, PartitionsK,
                                                                         OutputOp_, ElementsPerAccess>;
  using OutputTileIterator = ds4s::PredicatedTileIteratorAffineRankNAtomic<typename Default::OutputTileThreadMap,
                                                                           typename OutputOp_::ElementOutput, Rank>;
  using Epilogue = ds4s::EpilogueWithIterator<Default, OutputTileIterator>;
};

template <int Rank, typename Shape_, typename WarpMmaTensorOp_, int PartitionsK, typename OutputOp_,
          int ElementsPerAccess>
struct BiasGradEpilogueAffineRankN<cutlass::arch::Sm70, Rank, Shape_, WarpMmaTensorOp_, PartitionsK, OutputOp_,
                                   ElementsPerAccess> {
  static_assert(PartitionsK == 1, "CUTLASS's main loop for Sm70 does not cut K among the warps of a block");
  using Default = cutlass::epilogue::threadblock::DefaultEpilogueVoltaTensorOpAffineRankN<
      Rank, Shape_, WarpMmaTensorOp_, PartitionsK, OutputOp_, ElementsPerAccess>;
  using OutputTileIterator = ds4s::PredicatedTileIteratorAffineRankNAtomic<typename Default::OutputTileThreadMap,
                                                                           typename OutputOp_::ElementOutput, Rank>;
  using Epilogue = ds4s::EpilogueWithIterator<Default, OutputTileIterator>;
};
