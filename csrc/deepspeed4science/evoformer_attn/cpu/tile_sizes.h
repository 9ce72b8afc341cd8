// Tile sizes of the CPU kernels, with measurements at (1, 64, 384, 4, 32). The register tiles of an instruction set are
// in its isa_*.h.
#pragma once

namespace ds4s::cpu {

// Keys of a tile, a multiple of 32 and of every vector. The forward works on each row of a tile (maximum, sum,
// rescaling), so few long tiles are best: 96 keys took 13.4 ms, 192 take 11.7, 384 no less (AMX). The backward keeps a
// strip of tiles of any length and pads keys to whole tiles, so its tiles are short.
constexpr int kForwardKeys = 192;
constexpr int kBackwardKeys = 96;

// Queries of a tile of the pair engine. 32 x 192 scores are half of the first-level cache: 64 took 4 % longer. In the
// backward 32 took 15 % longer than 64.
template <int kKeys>
constexpr int kPairQueries = kKeys == kForwardKeys ? 32 : 64;

// Queries of a tile of the FMA engine: a multiple of every instruction set's kTileRows. 24 and 96 run within 3 % of it.
constexpr int kFmaQueries = 48;

}  // namespace ds4s::cpu
