// Quantising weights at load, for types that have no packed form.
#pragma once

#include "input.hpp"

namespace kvt {

inline void quantise_q8_0(const float* values, int64_t count, uint8_t* target) {
  for (int64_t i = 0; i < count; i += 32, target += 34) {
    int8_t q[32];
    const float scale = input::quantise(values + i, q);
    store(target, to_f16(scale));
    std::memcpy(target + 2, q, sizeof q);
  }
}

}  // namespace kvt
