// Products of small float32 matrices that lie in a core's caches.
//
// Each number of the result adds its terms in ascending order, wherever its tile begins.
#pragma once

#include "operations_vector.hpp"

namespace kvt {

// As many sums as registers hold beside what is multiplied.
#if defined(__AVX512F__)
constexpr int kProductRows = 8, kProductVectors = 2;
#elif defined(__AVX2__)
constexpr int kProductRows = 4, kProductVectors = 1;
#else
constexpr int kProductRows = 2, kProductVectors = 1;
#endif

enum class Part {
  kAll,
  kLowerInput,   // what row i of a has behind its place i is zero
  kLowerOutput,  // what row i of c has behind its place i is not needed
};

// c [rows, cols] = keep * c + a [rows, depth] b [depth, cols]. Where `keep` is 0, c need not be set.
// cols is a multiple of 16; strides are floats between rows.
struct SmallProduct {
  const float* a;
  int64_t a_stride;
  const float* b;
  int64_t b_stride;
  float* c;
  int64_t c_stride;
  int64_t rows, cols, depth;
  float keep;
  Part part;
};

template <int kRows, int kVectors>
inline void product_tile(const SmallProduct& p, int64_t row, int64_t col, int64_t depth) {
  const float* a = p.a + row * p.a_stride;
  const float* b = p.b + col;
  float* c = p.c + row * p.c_stride + col;
  Floats sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      sums[r][v] = p.keep == 0.0f ? Floats::zero()
                                  : Floats::load(c + r * p.c_stride + v * kWidth) * Floats::all(p.keep);
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    Floats values[kVectors];
    for (int v = 0; v < kVectors; ++v) values[v] = Floats::load(b + k * p.b_stride + v * kWidth);
    for (int r = 0; r < kRows; ++r) {
      const Floats factor = Floats::all(a[r * p.a_stride + k]);
      for (int v = 0; v < kVectors; ++v) sums[r][v] = fma(factor, values[v], sums[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) sums[r][v].store(c + r * p.c_stride + v * kWidth);
  }
}

template <int kRows>
inline void product_rows(const SmallProduct& p, int64_t row) {
  const int64_t end = row + kRows;
  const int64_t depth = p.part == Part::kLowerInput ? std::min(p.depth, end) : p.depth;
  const int64_t cols =
      p.part == Part::kLowerOutput ? std::min(p.cols, (end + kWidth - 1) / kWidth * kWidth) : p.cols;
  int64_t col = 0;
  for (; col + kProductVectors * kWidth <= cols; col += kProductVectors * kWidth)
    product_tile<kRows, kProductVectors>(p, row, col, depth);
  for (; col < cols; col += kWidth) product_tile<kRows, 1>(p, row, col, depth);
}

inline void small_product(const SmallProduct& p) {
  int64_t row = 0;
  for (; row + kProductRows <= p.rows; row += kProductRows) product_rows<kProductRows>(p, row);
  for (; row < p.rows; ++row) product_rows<1>(p, row);
}

}  // namespace kvt
