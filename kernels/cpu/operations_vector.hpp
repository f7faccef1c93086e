// Parts of vectors, for rows whose length is no multiple of 16.
#pragma once

#include <cstdint>
#include <cstring>

#include "vector_math.hpp"

namespace kvt {

constexpr int64_t kWidth = 16;  // floats in one Floats

// The first `count` of a vector (all, if it is more), the rest zero.
inline Floats load_some(const float* from, int64_t count, float other = 0.0f) {
  if (count >= kWidth) return Floats::load(from);
  float buffer[kWidth];
  for (int64_t i = 0; i < kWidth; ++i) buffer[i] = i < count ? from[i] : other;
  return Floats::load(buffer);
}

inline void store_some(float* to, Floats values, int64_t count) {
  if (count >= kWidth) return values.store(to);
  float buffer[kWidth];
  values.store(buffer);
  std::memcpy(to, buffer, sizeof(float) * static_cast<size_t>(count));
}

}  // namespace kvt
