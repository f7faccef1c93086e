// Whether descriptions of recurrent layers fit together. Each check returns null or what is wrong.
#pragma once

#include "program.hpp"

namespace kvt {

constexpr int64_t kMostValues = int64_t{1} << 24;  // of a size: products of two fit

inline bool is_size(int64_t value) { return value > 0 && value <= kMostValues; }

inline const char* check_sizes(const kvt_recurrent& layer) {
  if (layer.kind < KVT_SHORT_CONV || layer.kind > KVT_STATE_SPACE) return "recurrent: kind";
  if (layer.width < 2 || layer.width > kMaxConvWidth) return "recurrent: width";
  if (!is_size(layer.channels)) return "recurrent: channels";
  if (layer.kind == KVT_SHORT_CONV) {
    const bool are_zero = !layer.num_heads && !layer.num_groups && !layer.key_dim && !layer.value_dim;
    return are_zero ? nullptr : "recurrent: a convolution with heads";
  }
  const bool are_sizes = is_size(layer.num_heads) && is_size(layer.num_groups) &&
                         is_size(layer.key_dim) && is_size(layer.value_dim);
  if (!are_sizes || layer.num_heads % layer.num_groups) return "recurrent: heads";
  const int64_t values = int64_t{layer.num_heads} * layer.value_dim;
  const int64_t keys = int64_t{layer.num_groups} * layer.key_dim;
  if (layer.channels != values + 2 * keys) return "recurrent: channels";
  return is_size(values) && is_size(keys) && is_size(int64_t{layer.key_dim} * layer.value_dim)
             ? nullptr
             : "recurrent: too large";
}

inline const char* check_state(const kvt_state& state, int32_t num_groups) {
  if (!state.data || reinterpret_cast<uintptr_t>(state.data) % 64)
    return "state: missing or not aligned to 64 bytes";
  if (state.num_slots < 1 || state.stride < 1 || state.stride % kWidth) return "state: slots";
  return state.group < 0 || state.group >= num_groups ? "state: no such group" : nullptr;
}

// The vectors of a layer: a table of `count`.
inline const char* check_vectors(const kvt_recurrent& layer, const kvt_vector* vectors,
                                 int32_t count) {
  const auto has = [&](int32_t index, int64_t size, bool may_miss) {
    if (index == -1) return may_miss;
    return index >= 0 && index < count && vectors[index].size == size;
  };
  if (!has(layer.conv, int64_t{layer.width} * layer.channels, false) ||
      !has(layer.conv_bias, layer.channels, true))
    return "recurrent: convolution";
  if (layer.kind == KVT_SHORT_CONV) return nullptr;
  const bool is_delta = layer.kind == KVT_DELTA_NET;
  const int64_t norm = is_delta ? layer.value_dim : int64_t{layer.num_heads} * layer.value_dim;
  const bool are_there = has(layer.dt_bias, layer.num_heads, false) &&
                         has(layer.decay, layer.num_heads, false) &&
                         has(layer.skip, layer.num_heads, true) && has(layer.norm, norm, false);
  return are_there ? nullptr : "recurrent: a vector";
}

inline Mixer mixer_of(const kvt_recurrent& layer, const kvt_vector* vectors) {
  const auto vector = [&](int32_t index) { return index < 0 ? nullptr : vectors[index].data; };
  Mixer mixer{};
  mixer.kind = layer.kind;
  mixer.state = layer.state;
  mixer.width = layer.width;
  mixer.channels = layer.channels;
  mixer.num_heads = layer.num_heads;
  mixer.num_groups = layer.num_groups;
  mixer.key_dim = layer.key_dim;
  mixer.value_dim = layer.value_dim;
  mixer.is_tiled = layer.is_tiled != 0;
  mixer.has_fused_gates = layer.has_fused_gates != 0;
  mixer.conv = vector(layer.conv);
  mixer.conv_bias = vector(layer.conv_bias);
  if (!mixer.has_heads()) return mixer;
  mixer.dt_bias = vector(layer.dt_bias);
  mixer.decay = vector(layer.decay);
  mixer.skip = vector(layer.skip);
  mixer.norm = vector(layer.norm);
  return mixer;
}

inline const char* check_recurrent(const kvt_model_desc& desc, const kvt_recurrent& layer) {
  if (const char* fault = check_sizes(layer)) return fault;
  if (const char* fault = check_vectors(layer, desc.vectors, desc.num_vectors)) return fault;
  if (layer.state < 0 || layer.state >= desc.num_states) return "recurrent: no such state";
  const int64_t needed = mixer_of(layer, desc.vectors).state_values();
  return desc.states[layer.state].stride < needed ? "recurrent: a state is too small" : nullptr;
}

// The matrices of a layer, one behind the other, make up its rows.
inline const char* check_recurrent_op(const kvt_model& model, const kvt_op& op) {
  if (op.recurrent < 0 || static_cast<size_t>(op.recurrent) >= model.mixers.size())
    return "recurrent: none such";
  int64_t rows = 0;
  for (int i = 0; i < kMaxProducts && op.matrices[i] >= 0; ++i) {
    if (static_cast<size_t>(op.matrices[i]) >= model.matrices.size() ||
        model.matrix(op.matrices[i]).cols != model.hidden_size)
      return "recurrent: a matrix";
    rows += model.matrix(op.matrices[i]).rows;
  }
  return rows == model.mixer(op.recurrent).row_values() ? nullptr : "recurrent: matrices";
}

}  // namespace kvt
