// One row of a request: the recurrence as it stands.
#pragma once

#include "recurrent_piece.hpp"

namespace kvt {

constexpr int kRowVectors = 4;  // of a head's values that one run through its keys computes

// One head's row; what a group's heads share is in a Desk.
struct HeadRow {
  const float *query, *key;  // [key_dim]
  const float* values;       // [value_dim]
  float product;             // of query and key
  float decay, beta, skip;   // RowGates; skip: 0 for none
  float* state;              // [key_dim, padded values]
  float* out;                // [value_dim]
};

// u = beta (v - a k S), S = a S + k^T u, y = q S: the last without another run through S.
template <int kVectors>
inline void delta_columns(const Mixer& mixer, const HeadRow& head, int64_t column) {
  const int64_t width = mixer.padded_values();
  float* state = head.state + column;
  Floats by_key[kVectors], by_query[kVectors];
  for (int v = 0; v < kVectors; ++v) by_key[v] = by_query[v] = Floats::zero();
  for (int64_t c = 0; c < mixer.key_dim; ++c) {
    const Floats key = Floats::all(head.key[c]), query = Floats::all(head.query[c]);
    for (int v = 0; v < kVectors; ++v) {
      const Floats values = Floats::load(state + c * width + v * kWidth);
      by_key[v] = fma(key, values, by_key[v]);
      by_query[v] = fma(query, values, by_query[v]);
    }
  }
  const Floats decay = Floats::all(head.decay);
  Floats changes[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    const int64_t place = column + v * kWidth, count = mixer.value_dim - place;
    const Floats wanted = load_some(head.values + place, count) - by_key[v] * decay;
    changes[v] = wanted * Floats::all(head.beta);
    const Floats result = fma(Floats::all(head.product), changes[v], by_query[v] * decay);
    store_some(head.out + place, result, count);
  }
  for (int64_t c = 0; c < mixer.key_dim; ++c) {
    const Floats key = Floats::all(head.key[c]);
    for (int v = 0; v < kVectors; ++v) {
      float* place = state + c * width + v * kWidth;
      fma(key, changes[v], Floats::load(place) * decay).store(place);
    }
  }
}

// S = a S + B^T (dt x), y = C S + D x.
template <int kVectors>
inline void space_columns(const Mixer& mixer, const HeadRow& head, int64_t column) {
  const int64_t width = mixer.padded_values();
  const Floats decay = Floats::all(head.decay);
  float* state = head.state + column;
  Floats values[kVectors], changes[kVectors], sums[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    const int64_t place = column + v * kWidth;
    values[v] = load_some(head.values + place, mixer.value_dim - place);
    changes[v] = values[v] * Floats::all(head.beta);
    sums[v] = Floats::zero();
  }
  for (int64_t c = 0; c < mixer.key_dim; ++c) {
    const Floats key = Floats::all(head.key[c]), query = Floats::all(head.query[c]);
    for (int v = 0; v < kVectors; ++v) {
      float* place = state + c * width + v * kWidth;
      const Floats next = fma(key, changes[v], Floats::load(place) * decay);
      next.store(place);
      sums[v] = fma(query, next, sums[v]);
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    const int64_t place = column + v * kWidth;
    store_some(head.out + place, fma(values[v], Floats::all(head.skip), sums[v]),
               mixer.value_dim - place);
  }
}

template <int kVectors>
inline void head_columns(const Mixer& mixer, const HeadRow& head, int64_t column) {
  if (mixer.is_delta()) delta_columns<kVectors>(mixer, head, column);
  else space_columns<kVectors>(mixer, head, column);
}

// The row's query and key are in the desk.
inline void compute_row(const Mixing& mixing, const Desk& desk, int64_t row, int64_t head,
                        float* state) {
  const Mixer& mixer = *mixing.mixer;
  const RowGates gates = gates_of(mixer, mixing.row(row), head);
  HeadRow work;
  work.query = desk.queries;
  work.key = desk.keys;
  work.values = mixing.row(row) + mixer.values_at() + head * mixer.value_dim;
  work.product = desk.query_scores[0];
  work.decay = std::exp(gates.log_decay);
  work.beta = gates.beta;
  work.skip = mixer.skip ? mixer.skip[head] : 0.0f;
  work.state = state;
  work.out = mixing.out + row * mixer.inner() + head * mixer.value_dim;
  const int64_t width = mixer.padded_values();
  int64_t column = 0;
  for (; column + kRowVectors * kWidth <= width; column += kRowVectors * kWidth)
    head_columns<kRowVectors>(mixer, work, column);
  for (; column < width; column += kWidth) head_columns<1>(mixer, work, column);
}

}  // namespace kvt
