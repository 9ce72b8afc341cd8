// CUTLASS's output tile iterators with atomic additions instead of stores; types, loads and construction are inherited.
// CUTLASS predicates whole accesses, atomic_tile.h every element.
#pragma once

#include <cutlass/epilogue/threadblock/predicated_tile_iterator.h>
#include <cutlass/epilogue/threadblock/predicated_tile_iterator_affine.h>

#include "atomic_tile.h"

namespace ds4s {

// Iterates over the rows that a thread of an OutputTileThreadMap visits, one tile after another.
template <typename ThreadMap>
class OutputTilePosition {
  using Shape = typename ThreadMap::Shape;
  using Count = typename ThreadMap::Count;

 public:
  int row, column;

  CUTLASS_DEVICE OutputTilePosition(int thread, const cutlass::MatrixCoord& block_offset) {
    cutlass::MatrixCoord start = ThreadMap::initial_offset(thread) + block_offset;
    row = start.row(), column = start.column();
  }

  CUTLASS_DEVICE void advance() {
    row += Shape::kRow;
    if (++tile_row_ < Count::kRow) return;
    tile_row_ = 0;
    row += (Shape::kGroup - 1) * Shape::kRow * Count::kRow;
    if (++tile_group_ < Count::kGroup) return;
    tile_group_ = 0;
    row += Count::kGroup * Shape::kGroup * Count::kRow * Shape::kRow;
  }

 private:
  int tile_row_ = 0, tile_group_ = 0;
};

// Row-major, optionally with rows scattered through an index list, or permuted.
template <typename ThreadMap, typename Element, bool ScatterD = false,
          typename PermuteDLayout = cutlass::layout::NoPermute>
class PredicatedTileIteratorAtomic
    : public cutlass::epilogue::threadblock::PredicatedTileIterator<ThreadMap, Element, ScatterD, PermuteDLayout> {
 public:
  using Base = cutlass::epilogue::threadblock::PredicatedTileIterator<ThreadMap, Element, ScatterD, PermuteDLayout>;
  using typename Base::AccessType;
  using typename Base::Fragment;
  using typename Base::LongIndex;
  using typename Base::TensorCoord;
  using Params = typename Base::Params;

  CUTLASS_DEVICE PredicatedTileIteratorAtomic(
      cutlass::epilogue::threadblock::PredicatedTileIteratorParams const& params, Element* pointer, TensorCoord extent,
      int thread, TensorCoord block_offset = TensorCoord(), int const* indices = nullptr)
      : Base(params, pointer, extent, thread, block_offset, indices),
        position_(thread, block_offset),
        pointer_(pointer),
        stride_(params.stride / LongIndex(sizeof(Element))),
        extent_(extent),
        indices_(indices),
        permute_(cutlass::PitchLinearCoord(extent.column(), extent.row()), stride_) {}

  CUTLASS_DEVICE void add_pointer_offset(LongIndex offset) {
    Base::add_pointer_offset(offset);
    pointer_ += offset;
  }

  CUTLASS_DEVICE void store(Fragment const& fragment) const { store_with_byte_offset(fragment, 0); }

  CUTLASS_DEVICE void store_with_byte_offset(Fragment const& fragment, int64_t byte_offset) const {
    if (!pointer_ || (ScatterD && !indices_)) return;
    Element* matrix = reinterpret_cast<Element*>(reinterpret_cast<char*>(pointer_) + byte_offset);
    auto offset_of = [&](int row, int column) {
      if (Base::PermuteD) return LongIndex(permute_(cutlass::PitchLinearCoord(column, row)));
      return LongIndex(ScatterD ? indices_[row] : row) * stride_ + column;
    };
    atomic_add_tile<ThreadMap>(matrix, extent_, position_.row, position_.column,
                               reinterpret_cast<Element const*>(&fragment), offset_of);
  }

  CUTLASS_DEVICE PredicatedTileIteratorAtomic& operator++() {
    Base::operator++();
    position_.advance();
    return *this;
  }
  // To the fragment that a block of a stream-K product reduces.
  CUTLASS_DEVICE PredicatedTileIteratorAtomic& operator+=(int increment) {
    for (; increment > 0; --increment) ++*this;
    return *this;
  }

 private:
  OutputTilePosition<ThreadMap> position_;
  Element* pointer_;
  LongIndex stride_;  // elements
  TensorCoord extent_;
  int const* indices_;
  PermuteDLayout permute_;
};

// Any strides for each of Rank / 2 row modes and Rank / 2 column modes.
template <typename ThreadMap, typename Element, int Rank>
class PredicatedTileIteratorAffineRankNAtomic
    : public cutlass::epilogue::threadblock::PredicatedTileIteratorAffineRankN<ThreadMap, Element, Rank> {
 public:
  using Base = cutlass::epilogue::threadblock::PredicatedTileIteratorAffineRankN<ThreadMap, Element, Rank>;
  using typename Base::Fragment;
  using typename Base::LongIndex;
  using Params = typename Base::Params;

  CUTLASS_DEVICE PredicatedTileIteratorAffineRankNAtomic(Params const& params, Element* pointer,
                                                         cutlass::MatrixCoord extent, int thread,
                                                         cutlass::MatrixCoord block_offset = cutlass::MatrixCoord(),
                                                         int const* indices = nullptr)
      : Base(params, pointer, extent, thread, block_offset, indices),
        position_(thread, block_offset),
        params_(params),
        pointer_(reinterpret_cast<char*>(pointer)),
        extent_(extent) {}

  CUTLASS_DEVICE void add_pointer_offset(LongIndex offset) {
    Base::add_pointer_offset(offset);
    pointer_ += offset * LongIndex(sizeof(Element));
  }

  CUTLASS_DEVICE void store(Fragment const& fragment) { store_with_byte_offset(fragment, 0); }

  CUTLASS_DEVICE void store_with_byte_offset(Fragment const& fragment, int64_t byte_offset) {
    constexpr int kCount = ThreadMap::kElementsPerAccess;
    if (!pointer_) return;
    for_each_access<ThreadMap>(position_.row, position_.column, [&](int row, int column, int index) {
      if (row >= extent_.row()) return;
      char* row_pointer = pointer_ + byte_offset + offset_of(row, params_.stride_m, params_.divmod_m);
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < kCount; ++e) {
        if (column + e >= extent_.column()) return;
        Element* dst =
            reinterpret_cast<Element*>(row_pointer + offset_of(column + e, params_.stride_n, params_.divmod_n));
        atomic_add_access<1>(dst, reinterpret_cast<Element const*>(&fragment) + index * kCount + e, 1);
      }
    });
  }

  CUTLASS_DEVICE PredicatedTileIteratorAffineRankNAtomic& operator++() {
    Base::operator++();
    position_.advance();
    return *this;
  }

 private:
  // The first mode varies fastest.
  template <typename Strides, typename DivMods>
  CUTLASS_DEVICE static LongIndex offset_of(int index, Strides const& strides, DivMods const& divmods) {
    LongIndex offset = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int mode = 0; mode < Rank / 2 - 1; ++mode) {
      int quotient, remainder;
      divmods[mode](quotient, remainder, index);
      offset += remainder * strides[mode];
      index = quotient;
    }
    return offset + index * strides[Rank / 2 - 1];
  }

  OutputTilePosition<ThreadMap> position_;
  Params params_;
  char* pointer_;
  cutlass::MatrixCoord extent_;
};

}  // namespace ds4s
