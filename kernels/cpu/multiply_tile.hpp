// What the tile kernels of all instruction sets have in common.
//
// A tile is the product of one panel (32 outputs) with up to six rows of activations. It reads the
// panel as it is packed and unpacks in registers: that costs processors with wide vectors next to
// nothing, since the units that multiply are not those that shift, and it leaves the first cache to
// the packed panel, which later blocks of rows find there.
#pragma once

#include "formats_scales.hpp"
#include "input.hpp"

namespace kvt {

constexpr int kGroupVectors = 8;

// Memory to bring into the cache meanwhile: so many lines of 64 bytes with every step of a tile.
struct Fetch {
  const uint8_t* next;
  const uint8_t* end;
  int lines;
  bool once;  // no other tile reads it

  KVT_INLINE void step() {
    for (int i = 0; i < lines && next < end; ++i, next += kLine) fetch_line(next, once);
  }
};

struct Tile {
  const uint8_t* panel;
  const void* inputs;  // of the first row: InputGroup, or float or bfloat16 pairs [cols][6]
  int64_t cols;
  float* out;          // [rows][32]
  Fetch fetch;         // a step is 32 inputs
};

using TileFunction = void (*)(const Tile&);

}  // namespace kvt
