// dk and dv of a tile of keys where the queries come in parts (Config::kHasQueryParts): between one part and the next,
// the sums so far lie in the memory of dk and dv, in pieces that only the thread that stores them reads. They are
// float16 times a power of two for each warp, which takes the largest one to 2^14, so that they keep three bits more
// than a bfloat16. An infinity stays one, NaN stays NaN.
#pragma once

#include "sm90/backward/maps.h"
#include "sm90/backward/step_products.h"

namespace ds4s::sm90 {

template <typename Config>
class PartialSums {
  using Coordinates = typename Config::Coordinates;
  using Result = typename StepProducts<Config>::Result;
  static constexpr int kWords = Config::kHeadDim / 8;  // of a lane's piece of a row, two columns each
  using Words = uint32_t[2][kWords];                   // of both rows

 public:
  // key: the tile's first one.
  CUTLASS_DEVICE PartialSums(const BackwardArgs& args, const DqDkdvMaps& maps, const Coordinates& block, int key,
                             const ConsumerCoord& at)
      : dk_(maps.first_rows, block, key, at), dv_(maps.second_rows, block, key, at) {
    const int tiles = args.by_blocks.divisor * Config::kTiles;
    exponents_ = args.part_exponents + (int64_t(blockIdx.x) * tiles + key / Config::kOwned) * kTileExponents + at.warp;
  }

  CUTLASS_DEVICE void store(const Result& dk, const Result& dv) const {
    const uint32_t of_dk = exponent_of(dk), of_dv = exponent_of(dv);
    *exponents_ = uint16_t(of_dk | of_dv << 8);
    dk_.store(dk, of_dk), dv_.store(dv, of_dv);
  }
  CUTLASS_DEVICE void add_to(Result& dk, Result& dv) const {
    Words of_dk = {}, of_dv = {};
    const uint32_t exponents = *exponents_;
    dk_.load(of_dk), dv_.load(of_dv);
    add(dk, of_dk, exponents & 0xff), add(dv, of_dv, exponents >> 8);
  }

 private:
  // This lane's pieces of two rows of one result. The four lanes that share a row have a quarter of it each: 16 bytes
  // at D = 32, 8 at D = 16.
  class Pieces {
    using Piece = cutlass::AlignedArray<uint32_t, kWords>;

   public:
    CUTLASS_DEVICE Pieces(const TensorView<5>& out, const Coordinates& block, int key, const ConsumerCoord& at) {
      const int row = key + 16 * at.warp + at.lane / 4;
      const int64_t offset =
          row * out.stride[1] + block.head * out.stride[2] + block.row * out.stride[3] + block.batch * out.stride[4];
      words_ = out.ptr == nullptr ? 0 : int(out.size[0]) / 8, rows_left_ = int(out.size[1]) - row;
      first_ = reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(const_cast<void*>(out.ptr)) + offset) +
               at.lane % 4 * words_;
      second_ = first_ + 4 * out.stride[1];
    }
    CUTLASS_DEVICE void store(const Result& x, uint32_t exponent) const {
      // 2^(141 - exponent), which takes a number with this exponent to 2^14.
      const float scale = __uint_as_float((268 - exponent) << 23);
      Words words;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2 * kWords; ++i) {
        words[i % 2][i / 2] = ptx::pack<cutlass::half_t>(x[2 * i] * scale, x[2 * i + 1] * scale);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2; ++r) {
        if (rows_left_ <= 8 * r) continue;
        if (words_ == kWords) {
          *reinterpret_cast<Piece*>(row(r)) = reinterpret_cast<const Piece&>(words[r]);
        } else {
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < kWords - 1; ++i) {
            if (i < words_) row(r)[i] = words[r][i];
          }
        }
      }
    }
    CUTLASS_DEVICE void load(Words& words) const {
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2; ++r) ptx::load_if(words_ == kWords && rows_left_ > 8 * r, row(r), words[r]);
      if (words_ == kWords) return;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2 * (kWords - 1); ++i) {
        if (rows_left_ > 8 * (i % 2) && i / 2 < words_) words[i % 2][i / 2] = row(i % 2)[i / 2];
      }
    }

   private:
    CUTLASS_DEVICE uint32_t* row(int r) const { return r == 0 ? first_ : second_; }

    uint32_t *first_, *second_;
    int words_, rows_left_;
  };

  CUTLASS_DEVICE static void add(Result& x, const Words& words, uint32_t exponent) {
    const float inverse_scale = __uint_as_float((exponent - 14) << 23);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2 * kWords; ++i) {
      const float2 old = ptx::unpack<cutlass::half_t>(words[i % 2][i / 2]);
      x[2 * i] = fmaf(old.x, inverse_scale, x[2 * i]), x[2 * i + 1] = fmaf(old.y, inverse_scale, x[2 * i + 1]);
    }
  }
  // The exponent bits of the largest finite value of a warp, at least 15.
  CUTLASS_DEVICE static uint32_t exponent_of(const Result& x) {
    uint32_t exponent = exponent_of_largest(x, [](float value) { return fabsf(value); });
    // NaN in place of an infinity.
    if (exponent == 255) exponent = exponent_of_largest(x, [](float value) { return fmaf(value, 0.f, fabsf(value)); });
    return max(exponent, 15u);
  }
  // Of NaN, 0.
  template <typename Size>
  CUTLASS_DEVICE static uint32_t exponent_of_largest(const Result& x, Size&& size) {
    constexpr int kChains = 4;  // of instructions that depend on each other
    float largest[kChains] = {};
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < int(sizeof(Result) / sizeof(float)); ++i) {
      largest[i % kChains] = fmaxf(largest[i % kChains], size(x[i]));
    }
    const float all = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
    return __reduce_max_sync(~0u, __float_as_uint(all)) >> 23;
  }

  const Pieces dk_, dv_;
  uint16_t* exponents_;
};

}  // namespace ds4s::sm90
