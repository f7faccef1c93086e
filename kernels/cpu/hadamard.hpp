// The fast Walsh-Hadamard transform, normalised: its own inverse, and lengths stay.
#pragma once

#include <cmath>
#include <cstdint>

namespace kvt {

// Largest power of two that divides `dim`.
inline int32_t rotation_size(int32_t dim) { return dim & -dim; }

// Rotate each run of `size` numbers of row[dim] in place, in one fixed order of operations.
// Rotating q and k alike leaves q k as it is; what is summed rotated is rotated back.
inline void hadamard(float* row, int32_t dim, int32_t size) {
  for (int32_t width = 1; width < size; width *= 2) {
    for (int32_t first = 0; first < dim; first += 2 * width) {
      float* const low = row + first;
      float* const high = low + width;
      for (int32_t i = 0; i < width; ++i) {
        const float a = low[i], b = high[i];
        low[i] = a + b;
        high[i] = a - b;
      }
    }
  }
  const float norm = 1.0f / std::sqrt(static_cast<float>(size));
  for (int32_t i = 0; i < dim; ++i) row[i] *= norm;
}

}  // namespace kvt
