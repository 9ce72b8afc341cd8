// sm90/backward/preprocess.h and later_delta.h: `delta_pieces SEED` computes delta of random calls, block by block, and
// prints a line for each that went wrong, and at the end how many there were. Each piece of each (b, n, h) is computed
// once, by the kernel that has it; so is each exponent; a (b, n, h) is complete after both, and only once.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "common/ptx.h"
#include "sm90/backward/later_delta.h"
#include "sm90/backward/preprocess.h"

using namespace ds4s;
using namespace ds4s::sm90;

struct Config {
  using scalar_t = cutlass::bfloat16_t;
};

std::function<void(int*, int)> on_release;
void ptx::store_release(int* flag, int value) { on_release(flag, value); }

// Runs blocks one after another.
void run(int threads, int64_t blocks, const std::function<void()>& kernel) {
  block.threads = threads;
  std::vector<std::thread> all;
  for (int thread = 0; thread < threads; ++thread) {
    all.emplace_back([&, thread] {
      threadIdx.x = thread;
      for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
        block.wait();
        PieceStages<Config, kPieceWarps>::memory = {}, PieceStages<Config, kLaterDeltaWarps>::memory = {};
        block.wait();
        kernel();
      }
    });
  }
  for (std::thread& thread : all) thread.join();
}

int main(int, char** argv) {
  std::mt19937 random(uint32_t(std::atoi(argv[1])));
  auto up_to = [&](int most) { return 1 + int(random() % uint32_t(most)); };
  constexpr int kCalls = 15, kNotFound = 12345;
  for (int call = 0; call < kCalls; ++call) {
    const int B = up_to(3), N = up_to(6), H = up_to(3), pairs = B * N * H, pieces = up_to(9);
    const int first = random() % 2 ? pairs : up_to(pairs), later = pairs - first, later_blocks = up_to(3);
    const auto is_hidden = std::make_unique<bool[]>(B * N);
    std::vector<int2> visible(B * N);
    for (int bn = 0; bn < B * N; ++bn) {
      is_hidden[bn] = random() % 3 == 0;
      visible[bn] = is_hidden[bn] ? make_int2(0x7fffffff, 0) : make_int2(16, 48);
    }
    std::vector<int> times(pairs * pieces), exponents(pairs, kNotFound), complete(later + 1);
    std::vector<float> maxima(3 * pairs * pieces);
    std::atomic<int> mistakes{0};

    PreprocessArgs of_first{};
    of_first.rows.p.B = B, of_first.rows.p.N = N, of_first.rows.p.H = H;
    of_first.rows.mask.range = visible.data();
    of_first.delta.is_hidden = is_hidden.get(), of_first.delta.times = times.data();
    of_first.delta.mistakes = &mistakes;
    DqRangeArgs& range = of_first.dq_range;
    range.rows = B * N, range.heads = H, range.pieces = pieces;
    range.maxima = maxima.data(), range.exponents = exponents.data();
    of_first.num_later_pairs = later;
    const LaterDeltaArgs of_later{of_first.rows, of_first.delta, range, first, later, complete.data()};
    auto number_of = [&](int pair) {
      const DqPair at = DqPair::at(pair, N, H);
      return (at.b * N + at.n) * H + at.h;
    };
    on_release = [&](int* flag, int value) {
      const int bnh = number_of(first + int(flag - complete.data()));
      bool is_complete = exponents[bnh] != kNotFound && value == 1 && *flag == 0;
      for (int piece = 0; piece < pieces; ++piece) is_complete &= times[bnh * pieces + piece] == 1;
      mistakes += !is_complete, *flag = value;
    };

    run(kPrepareThreads, num_piece_blocks(of_first, first),
        [&] { compute_delta_pieces<Config, false>(of_first, uint32_t(blockIdx.x)); });
    run(kPrepareThreads, ceil_div(first, kPrepareThreads / 32), [&] { find_exponents_and_tiles(range, N, first, {}); });
    for (int pair = 0; pair < pairs; ++pair) mistakes += (exponents[number_of(pair)] == kNotFound) != (pair >= first);
    if (later > 0) run(32 * kLaterDeltaWarps, later_blocks, [&] { LaterDelta<Config>(of_later, later_blocks).run(); });

    for (int pair = 0; pair < pairs; ++pair) {
      const int bnh = number_of(pair);
      float largest = 1.f;
      for (int piece = 0; piece < pieces; ++piece) {
        mistakes += times[bnh * pieces + piece] != 1;
        largest = max(largest, DeltaPiece<Config>::largest(bnh, piece));
      }
      const int exponent = is_hidden[bnh / H] ? DqRange::kNone : 13 - DqRange::above(largest);
      mistakes += exponents[bnh] != exponent || (pair >= first && complete[pair - first] != 1);
    }
    if (mistakes > 0) std::printf("wrong: B = %d, N = %d, H = %d, %d pieces, %d first\n", B, N, H, pieces, first);
  }
  std::printf("%d calls\n", kCalls);
}
