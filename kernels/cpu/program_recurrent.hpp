// Recurrent layers as ops: products, then what kvt_recurrent says.
#pragma once

#include "program_input.hpp"

namespace kvt {

inline void Runner::recurrent(const kvt_op& op, const OpPlan& plan) {
  const Mixer& mixer = model_.mixer(op.recurrent);
  const LayerState& state = model_.state(mixer);
  const float* x = model_.buffer(KVT_RESIDUAL);
  float* const mixed = model_.memory.mixed.as<float>();
  const Input input = prepare(op, plan, x);
  Product products[kMaxProducts];
  Output outputs[kMaxProducts];
  const int count = num_products(op);
  int64_t place = 0;
  for (int i = 0; i < count; ++i) {
    const Matrix& matrix = model_.matrix(op.matrices[i]);
    outputs[i] = Output{op.matrices[i], mixed + place, mixer.row_values()};
    products[i] = Product{&matrix, nullptr, mixed + place, mixer.row_values(),
                          nullptr, false,   kNoActivation};
    place += matrix.rows;
  }
  multiply(worker_, input, products, count);
  barrier(KVT_PROFILE_MAIN);
  if (has_changes(op)) add_changes(plain_input(op, x), outputs, count);
  const std::vector<ChunkView>& views = rows_->views[static_cast<size_t>(state.group)];
  float* const out = model_.buffer(KVT_ATTENDED);
  mix(worker_, {&mixer, state.data, state.stride, op.eps, views.data(),
                static_cast<int32_t>(views.size()), num_rows(), mixed, out});
  pending_[0] = {out, mixer.inner()};
  barrier(KVT_PROFILE_AFTER);
}

}  // namespace kvt
