// Values of a latent cache, which are the beginnings of its keys: a tile's keys, expanded already,
// turned around.
#pragma once

#include "attention_arithmetic.hpp"

namespace kvt {

// Rows become columns: four rounds of shuffling two halves of the rows into each other.
inline void transpose(Floats (&rows)[16]) {
  for (int round = 0; round < 4; ++round) {
    Floats mixed[16];
    for (int i = 0; i < 8; ++i) zip(rows[i], rows[i + 8], mixed[2 * i], mixed[2 * i + 1]);
    for (int i = 0; i < 16; ++i) rows[i] = mixed[i];
  }
}

// keys: 16 columns of [dim / kPerLane][64] lanes; values [16 / kPerLane][width], of which those
// behind a key's numbers are zero.
template <class Arithmetic>
inline void turn_keys(const float* keys, int32_t dim, int32_t width, float* values) {
  constexpr int32_t kNumbers = 16 * Arithmetic::kPerLane;  // of each key at a time
  for (int32_t first = 0; first < width; first += kNumbers) {
    Floats lanes[16];
    for (int32_t i = 0; i < 16; ++i) {
      const int32_t step = first / Arithmetic::kPerLane + i;
      lanes[i] = step * Arithmetic::kPerLane < dim ? Floats::load(keys + step * 64) : Floats::zero();
    }
    transpose(lanes);
    for (int32_t key = 0; key < 16; key += Arithmetic::kPerLane)
      Arithmetic::put_turned(lanes + key, width - first, values + key / Arithmetic::kPerLane * width + first);
  }
}

}  // namespace kvt
