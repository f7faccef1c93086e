// Latent attention as ops: rows into the cache, queries to where they are, and what heads get back.
#pragma once

#include "program_input.hpp"

namespace kvt {

// Each head's matrix of a stack on that head's part of each row: x [n, heads, cols of a part from
// `x_width`], out [n, heads, out_width].
struct HeadProducts {
  const Matrix* stack;
  const float* x;
  int64_t x_width;
  float* out;
  int64_t out_width;
};

constexpr int64_t kHeadRows = 8 * kInputRows;  // of one item

inline int64_t head_bytes(const Matrix& stack) {
  return input_bytes(kHeadRows, stack.cols, input_form(stack.type));
}

// Rows [first, first + count) of one head.
inline void multiply_head(Worker& worker, const HeadProducts& products, int64_t head, int64_t first,
                          int64_t count) {
  const Matrix& stack = *products.stack;
  const Matrix matrix = products::expert_of(stack, head);
  const int64_t x_stride = stack.stack * products.x_width, out_stride = stack.stack * products.out_width;
  Input input;
  input_bind(input, worker.scratch, count, stack.cols, input_form(stack.type));
  input_prepare(input, products.x + first * x_stride + head * products.x_width, x_stride, 0, count);
  const Product product{&matrix, nullptr, products.out + first * out_stride + head * products.out_width,
                        out_stride, nullptr, false, kNoActivation};
  const int64_t panels = num_panels(matrix.rows);
  for (int64_t panel = 0; panel < panels; ++panel)
    products::multiply_unit(input, products::Unit{&product, panel, panels, 0, count});
}

inline void Runner::latent(const kvt_op& op, const OpPlan& plan) {
  const kvt_attention& attention = model_.attention(op.attention);
  const CacheLayout& layout = model_.cache(attention).cache.layout;
  const Matrix& stack = model_.matrix(op.matrices[1]);
  const float* x = model_.buffer(KVT_RESIDUAL);
  float* keys = model_.memory.keys.as<float>();
  const Input input = prepare(op, plan, x);
  const Product product{&model_.matrix(op.matrices[0]), nullptr, keys, layout.head_dim, nullptr,
                        false, kNoActivation};
  multiply(worker_, input, &product, 1);
  barrier(KVT_PROFILE_MAIN);
  const Output output{op.matrices[0], keys, layout.head_dim};
  if (has_changes(op)) add_changes(plain_input(op, x), &output, 1);
  const int64_t query_dim = stack.cols + layout.head_dim - layout.value_dim;
  const HeadProducts products{&stack, model_.buffer(KVT_ATTENDED), query_dim,
                              model_.buffer(KVT_QUERY), layout.head_dim};
  const int64_t tiles = num_tiles(num_rows(), kHeadRows), items = tiles * attention.num_heads;
  for (int64_t i; (i = worker_.take(items + num_rows())) >= 0;) {
    if (i >= items) finish_latent(op, i - items);
    else place_queries(attention, products, i / tiles, i % tiles * kHeadRows);
  }
  pending_[0] = {model_.buffer(KVT_QUERY), query_width(model_, attention)};
  pending_[1] = {};
  barrier(KVT_PROFILE_AFTER);
}

// Queries of one head, from row `first` on, to where the cache's rows are.
inline void Runner::place_queries(const kvt_attention& attention, const HeadProducts& products,
                                  int64_t head, int64_t first) {
  const int64_t heads = attention.num_heads, count = std::min(kHeadRows, num_rows() - first);
  const int64_t latent = products.stack->rows, plain = products.stack->cols;
  multiply_head(worker_, products, head, first, count);
  for (int64_t row = first; row < first + count; ++row) {
    const float* source = products.x + (row * heads + head) * products.x_width;
    float* target = products.out + (row * heads + head) * products.out_width + latent;
    std::copy(source + plain, source + products.x_width, target);
    rotate(attention, row, target);
  }
}

// A row's latent numbers are normed, the others rotated; then the cache takes them.
inline void Runner::finish_latent(const kvt_op& op, int64_t row) {
  const kvt_attention& attention = model_.attention(op.attention);
  const LayerCache& layer = model_.cache(attention);
  const int64_t latent = layer.cache.layout.value_dim;
  float* x = model_.memory.keys.as<float>() + row * layer.cache.layout.head_dim;
  rms_norm_row(x, model_.vector(op.head_norms[0]), op.eps, latent, x);
  rotate(attention, row, x + latent);
  keep_row(layer, row, x, nullptr);
}

inline void Runner::heads(const kvt_op& op) {
  const Matrix& stack = model_.matrix(op.matrices[0]);
  const HeadProducts products{&stack, model_.buffer(KVT_ATTENDED), stack.cols,
                              model_.buffer(KVT_HIDDEN), stack.rows};
  const int64_t tiles = num_tiles(num_rows(), kHeadRows);
  for (int64_t i; (i = worker_.take(tiles * stack.stack)) >= 0;) {
    const int64_t first = i % tiles * kHeadRows;
    multiply_head(worker_, products, i / tiles, first, std::min(kHeadRows, num_rows() - first));
  }
  barrier(KVT_PROFILE_MAIN);
}

}  // namespace kvt
