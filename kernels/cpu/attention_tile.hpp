// One tile of 64 keys against a few rows: products, softmax, products.
#pragma once

#include "attention_arithmetic.hpp"

namespace kvt {

constexpr int32_t kTile = 64;  // keys

// Register tile: rows x columns of 16 lanes, as many as there are registers to sum in.
#if defined(__AVX512VNNI__)
constexpr int kTileRows = 6, kTileColumns = 4;
#elif defined(__AVX2__)
constexpr int kTileRows = 3, kTileColumns = 2;
#else
constexpr int kTileRows = 3, kTileColumns = 1;
#endif

// Lanes of a matrix in memory, [steps][stride].
struct Lanes {
  const float* lanes;
  int64_t stride;

  KVT_INLINE Floats load(int64_t step, int64_t column) const {
    return Floats::load(lanes + step * stride + column);
  }
};

// Factors of a product: a is [rows][steps], b is [steps][columns], a Lanes or what loads like it.
template <class Right>
struct Factors {
  Lanes a;
  Right b;
  int64_t steps;
};

// Where products go: c[rows][columns] = keep[row] c + a b, or a b where keep is null.
struct Sums {
  float* sums;
  int64_t stride;
  const float* keep;
};

// R rows, columns first .. first + 16 C - 1. A sum runs over the steps in ascending order, whatever
// R and C are.
template <class Arithmetic, int R, int C, class Right>
inline void multiply_few(const Factors<Right>& factors, int32_t first, const Sums& out) {
  Floats sums[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < C; ++i) {
      sums[r][i] = Floats::zero();
      if (!out.keep) continue;
      const float* const old = out.sums + r * out.stride + first + i * 16;
      sums[r][i] = Floats::load(old) * Floats::all(out.keep[r]);
    }
  }
  for (int64_t step = 0; step < factors.steps; ++step) {
    Floats b[C];
#pragma GCC unroll 8
    for (int i = 0; i < C; ++i) b[i] = factors.b.load(step, first + i * 16);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Floats a = Floats::all(factors.a.lanes[r * factors.a.stride + step]);
#pragma GCC unroll 8
      for (int i = 0; i < C; ++i) sums[r][i] = Arithmetic::step(sums[r][i], a, b[i]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < C; ++i) sums[r][i].store(out.sums + r * out.stride + first + i * 16);
  }
}

// As multiply_few for any number of columns, a multiple of 16.
template <class Arithmetic, int R, class Right>
inline void multiply_rows(const Factors<Right>& factors, int32_t columns, const Sums& out) {
  int32_t first = 0;
  for (; first + kTileColumns * 16 <= columns; first += kTileColumns * 16) {
    multiply_few<Arithmetic, R, kTileColumns>(factors, first, out);
  }
  for (; first < columns; first += 16) multiply_few<Arithmetic, R, 1>(factors, first, out);
}

// `rows` is at most kTileRows.
template <class Arithmetic, int R = kTileRows, class Right>
inline void multiply(const Factors<Right>& factors, int32_t rows, int32_t columns,
                     const Sums& out) {
  if constexpr (R > 1) {
    if (rows < R) return multiply<Arithmetic, R - 1>(factors, rows, columns, out);
  }
  multiply_rows<Arithmetic, R>(factors, columns, out);
}

// Scores of keys that a row does not see, and the peak of a row that has seen none: finite, so that
// differences are numbers, and so far apart that the weight of what is not seen is 0 before any
// key is seen, too.
constexpr float kHidden = -3e38f, kNoPeak = -1e30f;

// What the softmax of one row has come to over the tiles of a split so far. Scores are in units of
// log 2: weights are powers of two.
struct RowSoftmax {
  float peak = kNoPeak;
  alignas(64) float weights[16] = {};  // lane i: the weights of keys i, i + 16, ...
};

// Which of a tile's keys a row sees: bit i for key i.
struct Visible {
  int32_t window;  // 0: all

  // `ahead`: the row's position less the tile's first.
  uint64_t keys(int64_t ahead) const {
    if (ahead < 0) return 0;
    uint64_t bits = ahead >= kTile - 1 ? ~uint64_t{0} : (uint64_t{2} << ahead) - 1;
    const int64_t hidden = window ? ahead - window + 1 : 0;
    if (hidden >= kTile) return 0;
    return hidden > 0 ? bits & ~((uint64_t{1} << hidden) - 1) : bits;
  }
};

// scores[64] as they count: capped where cap is not 0, hidden where the row does not see the key.
// Returns the largest.
inline float shape_scores(float* scores, float cap, uint64_t visible) {
  const Floats hidden = Floats::all(kHidden);
  Floats peak = hidden;
  const bool is_changed = cap != 0.0f || ~visible;
#pragma GCC unroll 4
  for (int i = 0; i < kTile; i += 16) {
    Floats score = Floats::load(scores + i);
    if (is_changed) {
      if (cap != 0.0f) score = tanh_half_log2(score) * Floats::all(cap);
      score = select(static_cast<uint16_t>(visible >> i), score, hidden);
      score.store(scores + i);
    }
    peak = max(peak, score);
  }
  return largest(peak);
}

// Weights 2^(score - peak) of 64 scores as lanes of Arithmetic; adds them to the row's, of which
// `keep` is left.
template <class Arithmetic>
inline void weigh(const float* scores, float keep, RowSoftmax& row, float* lanes) {
  const Floats peak = Floats::all(row.peak);
  Floats weights[kTile / 16];
#pragma GCC unroll 4
  for (int i = 0; i < kTile / 16; ++i) weights[i] = exp2(Floats::load(scores + i * 16) - peak);
  const Floats sum = (weights[0] + weights[1]) + (weights[2] + weights[3]);
  fma(Floats::load(row.weights), Floats::all(keep), sum).store(row.weights);
  Arithmetic::put(lanes, weights[0], weights[1]);
  Arithmetic::put(lanes + 32 / Arithmetic::kPerLane, weights[2], weights[3]);
}

// One tile: keys [head_dim / kPerLane][64] and values [64 / kPerLane][width], each as Lanes or what
// loads like them.
template <class Keys, class Values>
struct KeyTile {
  Keys keys;
  Values values;
  int64_t key_steps;
  int32_t width;
  float cap;
};

// A few rows on their way through a tile: scored, then weighed, then their values summed.
struct TileRows {
  int32_t count;        // at most kTileRows
  Lanes q;              // [count]
  RowSoftmax* softmax;  // [count]
  float* sums;          // [count][width]: weighted values
  uint64_t visible[kTileRows];
  alignas(64) float scores[kTileRows * kTile];
  alignas(64) float weights[kTileRows * kTile];  // as lanes
  alignas(64) float keep[16];                    // of the old sums, per row
};

template <class Arithmetic, class Keys, class Values>
inline void score_rows(const KeyTile<Keys, Values>& tile, TileRows& rows) {
  const Factors<Keys> factors{rows.q, tile.keys, tile.key_steps};
  multiply<Arithmetic>(factors, rows.count, kTile, {rows.scores, kTile, nullptr});
}

template <class Arithmetic>
inline void weigh_rows(float cap, TileRows& rows) {
  alignas(64) float old_peaks[16] = {}, new_peaks[16] = {};
  for (int32_t r = 0; r < rows.count; ++r) {
    const float peak = shape_scores(rows.scores + r * kTile, cap, rows.visible[r]);
    old_peaks[r] = rows.softmax[r].peak;
    new_peaks[r] = rows.softmax[r].peak = peak > old_peaks[r] ? peak : old_peaks[r];
  }
  exp2(Floats::load(old_peaks) - Floats::load(new_peaks)).store(rows.keep);
  for (int32_t r = 0; r < rows.count; ++r) {
    weigh<Arithmetic>(rows.scores + r * kTile, rows.keep[r], rows.softmax[r],
                      rows.weights + r * kTile / Arithmetic::kPerLane);
  }
}

template <class Arithmetic, class Keys, class Values>
inline void sum_values(const KeyTile<Keys, Values>& tile, const TileRows& rows) {
  constexpr int kSteps = kTile / Arithmetic::kPerLane;
  const Factors<Values> factors{{rows.weights, kSteps}, tile.values, kSteps};
  multiply<Arithmetic>(factors, rows.count, tile.width, {rows.sums, tile.width, rows.keep});
}

}  // namespace kvt
