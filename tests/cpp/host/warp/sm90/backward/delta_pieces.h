// In place of sm90/backward/delta_pieces.h on the host: a piece counts how often it is computed, and checks that what
// was loaded last is its own.
#pragma once

#include <atomic>

#include "common/preprocess.h"
#include "sm90/backward/dq_range.h"

namespace ds4s::sm90 {

struct FullBarrier {
  uint32_t num_loads = 0;
};

struct DeltaArgs {
  float* negative_delta;
  PostprocessFlag flag;
  const bool* is_hidden;  // [B N]
  int* times;             // [B N H, pieces]
  std::atomic<int>* mistakes;
};

template <typename Config>
class DeltaPiece {
 public:
  struct Stage {
    int64_t loaded = -1;
  };
  struct KeyShares {
    int64_t of = -1;
  };

  DeltaPiece(const BwdParams& p, const DeltaArgs& args, const DqPair& of, int piece)
      : args_(args), of_(of), piece_(piece), bn_(of.b * p.N + of.n), bnh_(bn_ * p.H + of.h) {
    must(of.b < p.B && of.n < p.N && of.h < p.H && piece >= 0);
  }

  int first_key() const { return piece_; }
  bool has_key(int i) const { return i % 3 != 1; }
  KeyShares load_key(int) const { return {number()}; }
  void load(Stage& stage, FullBarrier& loaded) const {
    if (is_first_lane()) stage.loaded = number(), ++loaded.num_loads;
    __syncwarp();
  }
  void store_zeros(const DqRangeArgs& range) const {
    must(args_.is_hidden[bn_]);
    store(range, 0.f);
  }
  void compute(Stage& stage, FullBarrier& loaded, uint32_t phase, const DqRangeArgs& range,
               const KeyShares* first_key = nullptr) const {
    must(!args_.is_hidden[bn_] && stage.loaded == number() && (loaded.num_loads - 1) % 2 == phase);
    must(first_key == nullptr || first_key->of == (has_key(piece_) ? number() : -1));
    store(range, largest(bnh_, piece_));
  }
  // The largest size of dO in a piece.
  static float largest(int64_t bnh, int piece) { return (bnh + 7 * piece) % 5 == 0 ? 100.f : 1.f; }

 private:
  int64_t number() const { return bnh_ * 1000 + piece_; }
  bool is_first_lane() const { return threadIdx.x % 32 == 0; }
  void must(bool holds) const { *args_.mistakes += !holds; }
  void store(const DqRangeArgs& range, float of_do) const {
    must(piece_ < range.pieces);
    if (!is_first_lane()) return;
    ++args_.times[bnh_ * range.pieces + piece_];
    float* const maxima = range.maxima + (bn_ * range.pieces + piece_) * 3 * range.heads + of_.h;
    maxima[0] = of_do, maxima[range.heads] = maxima[2 * range.heads] = of_do > 0.f ? 1.f : 0.f;
  }

  const DeltaArgs& args_;
  const DqPair of_;
  const int piece_;
  const int64_t bn_, bnh_;
};

template <typename Config, int kWarps>
struct PieceStages {
  typename DeltaPiece<Config>::Stage of_warp[kWarps];
  FullBarrier loaded[kWarps];

  static inline PieceStages memory;  // a program clears it before each block
  static PieceStages& init() { return memory; }
};

}  // namespace ds4s::sm90
