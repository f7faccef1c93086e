// What the tile kernels of all instruction sets have in common.
#pragma once

#include "input.hpp"
#include "multiply_unpack.hpp"

namespace kvt {

// 32 outputs of up to six rows: out [rows][32], sums of all groups.
struct Tile {
  const uint8_t* weights;    // an unpacked panel
  const InputGroup* inputs;  // the block's first group
  int64_t groups;
  int zero_shift;            // for types without min
  float* out;
};

// The same for float matrices: weights float32 [count][32], inputs float32 [count][6]. With
// bfloat16 both are pairs of inputs: weights [count][2][16][2], inputs [count][6][2].
struct FloatTile {
  const void* weights;
  const void* inputs;
  int64_t count;
  float* out;
};

using TileFunction = void (*)(const Tile&);
using FloatTileFunction = void (*)(const FloatTile&);

}  // namespace kvt
