// Low-rank changes of adapters: out += ((x A^T) * factor) B^T. Definition and order of additions:
// kernels/reference_adapters.py, backends/torch_adapters.py; all in float32.
//
// 1. A row's numbers do not depend on other rows: each inner value is one dot product in a fixed
//    order, each output adds the ranks in ascending order, then is added to the product.
// 2. A row's adapters are added one after the other, in the order of the step's uses.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "memory.hpp"
#include "operations_vector.hpp"

namespace kvt {

constexpr int64_t kOutputTile = 32;  // outputs that one panel of B covers

// Change of one matrix. A is padded to whole vectors of inputs; B is kept as panels of 32 outputs,
// [panel][rank][32], padded with zeros, so that both are read in one stream.
struct LowRank {
  int64_t rank = 0, rows = 0, cols = 0;
  float scaling = 0;
  float* values = nullptr;  // [num_values()], aligned to 64 bytes

  int64_t padded_cols() const { return (cols + kWidth - 1) / kWidth * kWidth; }
  int64_t num_panels() const { return (rows + kOutputTile - 1) / kOutputTile; }
  float* a() const { return values; }
  float* b() const { return a() + rank * padded_cols(); }
  int64_t num_values() const { return rank * padded_cols() + num_panels() * rank * kOutputTile; }
};

// `values` from a [rank, cols] and b [rows, rank]; it is all zeros before.
inline void fill_low_rank(const LowRank& part, const float* a, const float* b) {
  for (int64_t r = 0; r < part.rank; ++r) {
    std::memcpy(part.a() + r * part.padded_cols(), a + r * part.cols,
                sizeof(float) * static_cast<size_t>(part.cols));
  }
  for (int64_t o = 0; o < part.rows; ++o) {
    float* panel = part.b() + o / kOutputTile * part.rank * kOutputTile + o % kOutputTile;
    for (int64_t r = 0; r < part.rank; ++r) panel[r * kOutputTile] = b[o * part.rank + r];
  }
}

// Memory for the values of all `parts`, which are set to point into it; without data: there is none.
inline Region place_low_rank(const std::vector<LowRank*>& parts) {
  int64_t count = 0;
  for (const LowRank* part : parts) count += part->num_values();
  Region memory(sizeof(float) * static_cast<size_t>(count));
  float* next = memory.as<float>();
  for (LowRank* part : parts) {
    part->values = next;
    if (next) next += part->num_values();
  }
  return memory;
}

// Dot products of R rows of x with K rows of A: inner[row * inner_stride + k] = factor * sum.
template <int R, int K>
inline void shrink_tile(const LowRank& part, int64_t first_rank, const float* x, int64_t stride,
                        float factor, float* inner, int64_t inner_stride) {
  const int64_t padded = part.padded_cols();
  const float* a = part.a() + first_rank * padded;
  Floats sums[R][K];
  for (int r = 0; r < R; ++r) {
    for (int k = 0; k < K; ++k) sums[r][k] = Floats::zero();
  }
  for (int64_t i = 0; i < padded; i += kWidth) {
    Floats weights[K];
    for (int k = 0; k < K; ++k) weights[k] = Floats::load(a + k * padded + i);
    for (int r = 0; r < R; ++r) {
      const Floats value = load_some(x + r * stride + i, part.cols - i);
      for (int k = 0; k < K; ++k) sums[r][k] = fma(value, weights[k], sums[r][k]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int k = 0; k < K; ++k) inner[r * inner_stride + k] = sum(sums[r][k]) * factor;
  }
}

constexpr int64_t kShrinkRanks = 4;
constexpr int64_t kShrinkRows = 4;

// Up to 4 ranks from first_rank on, for num_rows rows; factor: scaling times the use's scale.
inline void shrink(const LowRank& part, int64_t first_rank, const float* x, int64_t num_rows,
                   float factor, float* inner) {
  const int64_t num_ranks = std::min(kShrinkRanks, part.rank - first_rank);
  const int64_t cols = part.cols, rank = part.rank;
  int64_t row = 0;
  if (num_ranks == kShrinkRanks) {
    for (; row + kShrinkRows <= num_rows; row += kShrinkRows) {
      shrink_tile<4, 4>(part, first_rank, x + row * cols, cols, factor,
                        inner + row * rank + first_rank, rank);
    }
    for (; row < num_rows; ++row) {
      shrink_tile<1, 4>(part, first_rank, x + row * cols, cols, factor,
                        inner + row * rank + first_rank, rank);
    }
    return;
  }
  for (int64_t k = first_rank; k < part.rank; ++k) {
    for (row = 0; row < num_rows; ++row) {
      shrink_tile<1, 1>(part, k, x + row * cols, cols, factor, inner + row * rank + k, rank);
    }
  }
}

// R rows of one panel: out[row * stride + o] += sum over ranks of inner * B.
template <int R>
inline void expand_tile(const float* panel, int64_t rank, const float* inner, float* out,
                        int64_t stride, int64_t num_outputs) {
  Floats sums[R][2];
  for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = Floats::zero();
  for (int64_t k = 0; k < rank; ++k) {
    const Floats low = Floats::load(panel + k * kOutputTile);
    const Floats high = Floats::load(panel + k * kOutputTile + kWidth);
    for (int r = 0; r < R; ++r) {
      const Floats value = Floats::all(inner[r * rank + k]);
      sums[r][0] = fma(value, low, sums[r][0]);
      sums[r][1] = fma(value, high, sums[r][1]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int64_t half = 0; half < 2; ++half) {
      float* target = out + r * stride + half * kWidth;
      const int64_t left = std::min(kWidth, num_outputs - half * kWidth);
      if (left > 0) store_some(target, load_some(target, left) + sums[r][half], left);
    }
  }
}

// Add one panel's outputs for num_rows rows; out: output 0 of the first row.
inline void expand(const LowRank& part, int64_t panel, const float* inner, int64_t num_rows,
                   float* out, int64_t stride) {
  const float* b = part.b() + panel * part.rank * kOutputTile;
  const int64_t first = panel * kOutputTile;
  const int64_t num_outputs = std::min(kOutputTile, part.rows - first);
  int64_t row = 0;
  for (; row + 4 <= num_rows; row += 4) {
    expand_tile<4>(b, part.rank, inner + row * part.rank, out + row * stride + first, stride,
                   num_outputs);
  }
  for (; row < num_rows; ++row) {
    expand_tile<1>(b, part.rank, inner + row * part.rank, out + row * stride + first, stride,
                   num_outputs);
  }
}

}  // namespace kvt
