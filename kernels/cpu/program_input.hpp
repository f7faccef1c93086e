// Inputs of products: norm and conversion of rows.
#pragma once

#include "program_run.hpp"

namespace kvt {

constexpr int64_t kItemRows = 6;  // a multiple of the rows that share cache lines in an Input

// Adapters read the normed input in float32, so it is kept where they change one of the op's
// matrices.
inline Input Runner::prepare(const kvt_op& op, const OpPlan& plan, const float* x) {
  const bool is_small = num_rows() <= kPrivateRows && num_rows() * plan.cols <= kPrivateValues;
  const bool is_kept = op.norm >= 0 && has_changes(op);
  return is_small && !is_kept ? prepare_own(op, plan, x) : prepare_shared(op, plan, x);
}

// The op's own norm.
inline void Runner::norm_row(const kvt_op& op, const float* x, int64_t size, float* out) const {
  const float* weight = model_.vector(op.norm);
  if (op.is_centred) layer_norm_row(x, weight, model_.vector(op.norm_bias), op.eps, size, out);
  else rms_norm_row(x, weight, op.eps, size, out);
}

// What adapters read: [n, cols].
inline const float* Runner::plain_input(const kvt_op& op, const float* x) const {
  return op.norm < 0 ? x : model_.memory.normed.as<float>();
}

inline Input Runner::prepare_own(const kvt_op& op, const OpPlan& plan, const float* x) {
  const Memory& memory = model_.memory;
  std::byte* mine = memory.own_inputs.data() + memory.own_bytes * worker_.id;
  auto* normed = reinterpret_cast<float*>(mine);
  Input input;
  input_bind(input, mine + kPrivateRows * memory.own_row_bytes, num_rows(), plan.cols, plan.forms);
  if (op.norm < 0) {
    input_prepare(input, x, plan.cols, 0, num_rows());
  } else {
    const int64_t stride = memory.own_row_bytes / 4;
    for (int64_t row = 0; row < num_rows(); ++row) {
      norm_row(op, x + row * plan.cols, plan.cols, normed + row * stride);
    }
    input_prepare(input, normed, stride, 0, num_rows());
  }
  meter_.mark(KVT_PROFILE_PREPARE);
  return input;
}

inline Input Runner::prepare_shared(const kvt_op& op, const OpPlan& plan, const float* x) {
  Input input;
  input_bind(input, model_.memory.inputs.data(), num_rows(), plan.cols, plan.forms);
  auto* normed = model_.memory.normed.as<float>();
  // Items are blocks of rows that share cache lines of the input.
  const float* source = plain_input(op, x);
  for (int64_t i; (i = worker_.take(num_tiles(num_rows(), kItemRows))) >= 0;) {
    const int64_t first = i * kItemRows;
    const int64_t count = std::min(kItemRows, num_rows() - first);
    for (int64_t row = first; op.norm >= 0 && row < first + count; ++row) {
      norm_row(op, x + row * plan.cols, plan.cols, normed + row * plan.cols);
    }
    input_prepare(input, source, plan.cols, first, count);
  }
  barrier(KVT_PROFILE_PREPARE);
  return input;
}

}  // namespace kvt
