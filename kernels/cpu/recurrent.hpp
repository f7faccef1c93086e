// Recurrent layers: what stands in for attention where a request keeps a state of fixed size.
//
// Between the matrix before and the matrix after such a layer all is float32. Mathematics:
// kernels/reference_recurrent.py, reference_delta_net.py, reference_mamba2.py. In one notation, a
// head keeps S [key, value], and row t with decay a_t, key k_t, query q_t and change u_t does
//
//   S = a_t S + k_t^T u_t,   y_t = q_t S
//
// 1. Delta net: u_t = beta_t (v_t - a_t k_t S). State space: u_t = dt_t x_t, k_t = B_t, q_t = C_t.
// 2. Several rows are computed together in pieces, whose borders are at multiples of kPiece
//    positions; a single row goes by the recurrence as it stands.
// 3. A row's numbers depend on the state at its piece's first row and on the rows from there, on
//    no other requests and not on how rows are shared out to threads.
// 4. A state: history [width - 1, channels], the convolution's inputs before; then S of each head,
//    its rows padded with zeros to whole vectors.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "attention.hpp"
#include "kvt.h"
#include "operations_vector.hpp"
#include "team.hpp"

namespace kvt {

constexpr int64_t kPiece = 64;  // rows that are computed together

inline int64_t whole_vectors(int64_t count) { return (count + kWidth - 1) / kWidth * kWidth; }

// A recurrent layer: kvt_recurrent with its vectors. Sizes of a short convolution without heads: 0.
struct Mixer {
  int32_t kind;
  int32_t state;  // index
  int64_t width, channels, num_heads, num_groups, key_dim, value_dim;
  bool is_tiled, has_fused_gates;
  const float* conv;       // [width, channels]
  const float* conv_bias;  // [channels] or null
  const float* dt_bias;    // [num_heads]
  const float* decay;      // [num_heads]
  const float* skip;       // [num_heads] or null
  const float* norm;       // delta net [value_dim], state space [num_heads * value_dim]

  bool is_delta() const { return kind == KVT_DELTA_NET; }
  bool has_heads() const { return kind != KVT_SHORT_CONV; }
  int64_t inner() const { return has_heads() ? num_heads * value_dim : channels; }
  int64_t heads_per_group() const { return num_heads / num_groups; }

  // Of a state, in floats.
  int64_t padded_values() const { return whole_vectors(value_dim); }
  int64_t history_values() const { return whole_vectors((width - 1) * channels); }
  int64_t head_values() const { return key_dim * padded_values(); }
  int64_t state_values() const { return history_values() + num_heads * head_values(); }

  // Of a row as the products leave it: short convolution b, c, x; delta net q, k, v, z, gates;
  // state space z, x, B, C, dt.
  int64_t num_gates() const { return is_delta() ? 2 * num_heads : num_heads; }
  int64_t row_values() const {
    return has_heads() ? channels + inner() + num_gates() : 3 * channels;
  }
  int64_t conv_at() const { return is_delta() ? 0 : inner(); }
  int64_t z_at() const { return is_delta() ? channels : 0; }
  int64_t gates_at() const { return channels + inner(); }
  int64_t values_at() const { return conv_at() + (is_delta() ? 2 * num_groups * key_dim : 0); }
  int64_t keys_at() const { return conv_at() + (is_delta() ? num_groups * key_dim : inner()); }
  int64_t queries_at() const {
    return conv_at() + (is_delta() ? 0 : inner() + num_groups * key_dim);
  }

  // The `index`-th head that reads a group's keys.
  int64_t head_of(int64_t group, int64_t index) const {
    return is_tiled ? group + index * num_groups : group * heads_per_group() + index;
  }
};

// One layer's work in a step. The slot of a chunk is the first entry of its view's `blocks`.
struct Mixing {
  const Mixer* mixer;
  float* states;  // slot s at states + s * stride
  int64_t stride;
  float eps;
  const ChunkView* chunks;
  int32_t num_chunks;
  int64_t num_rows;
  float* mixed;  // [num_rows, row_values]: changed
  float* out;    // [num_rows, inner]

  float* state(const ChunkView& chunk) const { return states + chunk.blocks[0] * stride; }
  float* row(int64_t index) const { return mixed + index * mixer->row_values(); }
};

// What a head's gates say of one row.
struct RowGates {
  float log_decay;
  float beta;  // delta net: how much is corrected; state space: dt
};

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// row: of the products.
inline RowGates gates_of(const Mixer& mixer, const float* row, int64_t head) {
  const float* gates = row + mixer.gates_at();
  if (!mixer.is_delta()) {
    const float dt = softplus(gates[head] + mixer.dt_bias[head]);
    return {dt * mixer.decay[head], dt};
  }
  // One behind the other: all betas and all alphas, or of each group.
  const int64_t size = mixer.has_fused_gates ? mixer.heads_per_group() : mixer.num_heads;
  const float* own = gates + head / size * 2 * size + head % size;
  const float dt = softplus(own[size] + mixer.dt_bias[head]);
  return {dt * mixer.decay[head], 1.0f / (1.0f + std::exp(-own[0]))};
}

// A stage with barriers inside and none behind it. Uses mix_scratch() bytes of worker.scratch.
inline void mix(Worker& worker, const Mixing& mixing);

inline int64_t mix_scratch(const Mixer& mixer);

}  // namespace kvt

#include "recurrent_stage.hpp"  // the definitions
