// The ops with products, and attention.
#pragma once

#include "program_experts.hpp"
#include "program_head.hpp"
#include "program_input.hpp"
#include "program_latent.hpp"
#include "program_recurrent.hpp"

namespace kvt {

inline Product plain_product(const Matrix& matrix, const float* bias, float* out) {
  return Product{&matrix, nullptr, out, matrix.rows, bias, false, kNoActivation};
}

inline void Runner::qkv(const kvt_op& op, const OpPlan& plan) {
  const kvt_attention& attention = model_.attention(op.attention);
  float* const queries =
      attention.is_gated ? model_.memory.mixed.as<float>() : model_.buffer(KVT_QUERY);
  float* const parts[3] = {queries, model_.memory.keys.as<float>(),
                           model_.memory.values.as<float>()};
  const float* x = model_.buffer(KVT_RESIDUAL);
  const Input input = prepare(op, plan, x);
  Product products[3];
  Output outputs[3];
  for (int i = 0; i < 3; ++i) {
    const Matrix& matrix = model_.matrix(op.matrices[i]);
    products[i] = plain_product(matrix, model_.vector(op.biases[i]), parts[i]);
    outputs[i] = Output{op.matrices[i], parts[i], matrix.rows};
  }
  multiply(worker_, input, products, 3);
  barrier(KVT_PROFILE_MAIN);
  if (has_changes(op)) add_changes(plain_input(op, x), outputs, 3);
  // A strip of the cache is written by one thread, where there is enough for all.
  const int64_t height = num_rows() >= 2 * kStrip * worker_.num_threads ? kStrip : 1;
  for (int64_t i; (i = worker_.take(num_tiles(num_rows(), height))) >= 0;) {
    const int64_t end = std::min((i + 1) * height, num_rows());
    for (int64_t row = i * height; row < end; ++row) finish_qkv(op, row, parts);
  }
  const int64_t width = query_width(model_, attention);
  pending_[0] = {model_.buffer(KVT_QUERY), width};
  pending_[1] = {model_.memory.gates.as<float>(), attention.is_gated ? width : 0};
  barrier(KVT_PROFILE_AFTER);
}

// A head of q where attention reads it. With gates it comes from the product's own place, and its
// gate from behind it.
inline float* Runner::place_query(const kvt_op& op, int64_t row, int64_t head) {
  const kvt_attention& attention = model_.attention(op.attention);
  const int64_t size = model_.cache(attention).cache.layout.head_dim;
  const int64_t place = row * attention.num_heads + head;
  float* query = model_.buffer(KVT_QUERY) + place * size;
  if (attention.is_gated) {
    const float* source = model_.memory.mixed.as<float>() + place * 2 * size;
    std::copy(source, source + size, query);
    std::copy(source + size, source + 2 * size, model_.memory.gates.as<float>() + place * size);
  }
  return query;
}

// Norms of heads, rope, cache: q stays, k and v go.
inline void Runner::finish_qkv(const kvt_op& op, int64_t row, float* const* parts) {
  const kvt_attention& attention = model_.attention(op.attention);
  const LayerCache& layer = model_.cache(attention);
  const CacheLayout& layout = layer.cache.layout;
  const int64_t heads[2] = {attention.num_heads, layout.kv_heads};
  if (attention.has_joint_norms) norm_joint(op, row, parts);
  const float warmth = temperature_at(attention, plan_.positions[static_cast<size_t>(row)]);
  for (int i = 0; i < 2; ++i) {
    const float* norm = attention.has_joint_norms ? nullptr : model_.vector(op.head_norms[i]);
    for (int64_t head = 0; head < heads[i]; ++head) {
      float* x = i == 0 ? place_query(op, row, head)
                        : parts[i] + (row * heads[i] + head) * layout.head_dim;
      if (norm) rms_norm_row(x, norm, op.eps, layout.head_dim, x);
      rotate(attention, row, x);
      for (int64_t k = 0; i == 0 && warmth != 1.0f && k < layout.head_dim; ++k) x[k] *= warmth;
    }
  }
  keep_row(layer, row, parts[1] + row * heads[1] * layout.head_dim,
           parts[2] + row * heads[1] * layout.value_dim);
}

// q and k, which is not gated, each as one row.
inline void Runner::norm_joint(const kvt_op& op, int64_t row, float* const* parts) const {
  const CacheLayout& layout = model_.cache(model_.attention(op.attention)).cache.layout;
  const int64_t heads[2] = {model_.attention(op.attention).num_heads, layout.kv_heads};
  for (int i = 0; i < 2; ++i) {
    const float* norm = model_.vector(op.head_norms[i]);
    const int64_t size = heads[i] * layout.head_dim;
    float* x = parts[i] + row * size;
    if (norm) rms_norm_row(x, norm, op.eps, size, x);
  }
}

// One head, by the row's angles.
inline void Runner::rotate(const kvt_attention& attention, int64_t row, float* x) const {
  if (attention.rope < 0) return;
  const Rope& rope = model_.ropes[static_cast<size_t>(attention.rope)];
  const int64_t first = row * rope.num_pairs;
  rotate_head(x, model_.cosines(attention.rope) + first, model_.sines(attention.rope) + first,
              rope.num_pairs, rope.style);
}

// K and V of one row of all rows, in the place of its position.
inline void Runner::keep_row(const LayerCache& layer, int64_t row, const float* k,
                             const float* v) const {
  const int32_t block_size = layer.cache.layout.block_size;
  const auto group = static_cast<size_t>(layer.group);
  const auto chunk = static_cast<size_t>(plan_.chunks[static_cast<size_t>(row)]);
  const int64_t position = plan_.positions[static_cast<size_t>(row)];
  const int64_t block = plan_.all.views[group][chunk].blocks[position / block_size];
  cache_write(layer.cache, block, static_cast<int32_t>(position % block_size), k, v);
}

inline void Runner::attend_rows(const kvt_op& op) {
  const kvt_attention& spec = model_.attention(op.attention);
  const LayerCache& layer = model_.cache(spec);
  const std::vector<ChunkView>& views = rows_->views[static_cast<size_t>(layer.group)];
  Attention attention{};
  attention.cache = &layer.cache;
  attention.q = model_.buffer(KVT_QUERY);
  attention.out = model_.buffer(KVT_ATTENDED);
  attention.chunks = views.data();
  attention.num_chunks = static_cast<int32_t>(views.size());
  attention.num_heads = spec.num_heads;
  attention.scale = spec.scale;
  attention.softcap = spec.softcap;
  attention.window = spec.window;
  attention.sinks = model_.vector(spec.sinks);
  attention.shared = model_.memory.attention.data();
  attention.shared_bytes = static_cast<int64_t>(model_.memory.attention.bytes());
  attend(worker_, attention);
  pending_[0] = pending_[1] = {};
  barrier(KVT_PROFILE_MAIN);
  if (spec.is_gated) gate_attended(query_width(model_, spec));
}

// ATTENDED *= sigmoid(gates).
inline void Runner::gate_attended(int64_t width) {
  const float* gates = model_.memory.gates.as<float>();
  float* out = model_.buffer(KVT_ATTENDED);
  for (int64_t row; (row = worker_.take(num_rows())) >= 0;)
    sigmoid_gate(out + row * width, gates + row * width, width);
  barrier(KVT_PROFILE_AFTER);
}

inline void Runner::linear(const kvt_op& op, const OpPlan& plan) {
  const float* x = model_.buffer(op.input);
  const Input input = prepare(op, plan, x);
  float* out = model_.buffer(op.output);
  Product product = plain_product(model_.matrix(op.matrices[0]), model_.vector(op.biases[0]), out);
  product.accumulate = op.output == KVT_RESIDUAL;
  multiply(worker_, input, &product, 1);
  if (op.input == KVT_ATTENDED) pending_[0] = {};
  barrier(KVT_PROFILE_MAIN);
  const Output output{op.matrices[0], out, product.stride};
  if (has_changes(op)) add_changes(plain_input(op, x), &output, 1);
}

// Where adapters change gate or up, the activation has to wait for them.
inline void Runner::gated(const kvt_op& op, const OpPlan& plan) {
  const Matrix& gate = model_.matrix(op.matrices[0]);
  const Matrix& up = model_.matrix(op.matrices[1]);
  float* out = model_.buffer(KVT_HIDDEN);
  const float* x = model_.buffer(KVT_RESIDUAL);
  const Input input = prepare(op, plan, x);
  if (!has_changes(op)) {
    const Product product{&up, &gate, out, up.rows, nullptr, false, op.activation};
    multiply(worker_, input, &product, 1);
    barrier(KVT_PROFILE_MAIN);
    return;
  }
  float* gates = model_.memory.gates.as<float>();
  const Product products[2] = {plain_product(gate, nullptr, gates), plain_product(up, nullptr, out)};
  multiply(worker_, input, products, 2);
  barrier(KVT_PROFILE_MAIN);
  const Output outputs[2] = {{op.matrices[0], gates, gate.rows}, {op.matrices[1], out, up.rows}};
  add_changes(plain_input(op, x), outputs, 2);
  for (int64_t row; (row = worker_.take(num_rows())) >= 0;) {
    gate_values(out + row * up.rows, gates + row * up.rows, up.rows, op.activation);
  }
  barrier(KVT_PROFILE_AFTER);
}

// The same without a gate.
inline void Runner::plain(const kvt_op& op, const OpPlan& plan) {
  float* out = model_.buffer(KVT_HIDDEN);
  const float* x = model_.buffer(KVT_RESIDUAL);
  const Input input = prepare(op, plan, x);
  Product product = plain_product(model_.matrix(op.matrices[0]), model_.vector(op.biases[0]), out);
  const bool is_late = has_changes(op);
  if (!is_late) product.activation = op.activation;
  multiply(worker_, input, &product, 1);
  barrier(KVT_PROFILE_MAIN);
  if (!is_late) return;
  const Output output{op.matrices[0], out, product.stride};
  add_changes(plain_input(op, x), &output, 1);
  for (int64_t row; (row = worker_.take(num_rows())) >= 0;)
    activate_values(out + row * product.stride, product.stride, op.activation);
  barrier(KVT_PROFILE_AFTER);
}

inline void Runner::logits(const kvt_op& op, const OpPlan& plan) {
  const float* x = model_.buffer(KVT_RESIDUAL);
  const Input input = prepare(op, plan, x);
  float* out = model_.memory.logits.as<float>();
  const Product product = plain_product(model_.matrix(op.matrices[0]), nullptr, out);
  multiply(worker_, input, &product, 1);
  barrier(KVT_PROFILE_MAIN);
  refine_logits(op, plan);
  const Output output{op.matrices[0], out, model_.vocab_size};
  if (has_changes(op)) add_changes(plain_input(op, x), &output, 1);
  if (op.softcap > 0.0f || op.scale != 1.0f) finish_logits(op);
}

inline void Runner::finish_logits(const kvt_op& op) {
  constexpr int64_t kTile = 4096;
  const int64_t size = model_.vocab_size;
  const int64_t num_tiles = (size + kTile - 1) / kTile;
  for (int64_t i; (i = worker_.take(num_rows() * num_tiles)) >= 0;) {
    const int64_t first = i % num_tiles * kTile;
    float* tile = model_.memory.logits.as<float>() + i / num_tiles * size + first;
    const int64_t count = std::min(kTile, size - first);
    if (op.softcap > 0.0f) softcap_values(tile, count, op.softcap);
    for (int64_t k = 0; k < count; ++k) tile[k] *= op.scale;
  }
  barrier(KVT_PROFILE_AFTER);
}

}  // namespace kvt
