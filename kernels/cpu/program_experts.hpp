// Experts as an op: the router's product, then what experts_stage.hpp does.
#pragma once

#include "experts_stage.hpp"
#include "program_input.hpp"

namespace kvt {

inline void Runner::experts(const kvt_op& op, const OpPlan& plan) {
  const Experts experts = experts_of(model_, op);
  const float* residual = model_.buffer(KVT_RESIDUAL);
  const float* x = plain_input(op, residual);
  const Matrix& router = model_.matrix(op.matrices[0]);
  ExpertsRun run{&experts, {}, x, num_rows(), model_.buffer(KVT_BRANCH), nullptr};
  experts_bind(experts, num_rows(), model_.memory.experts.data(), &run.memory);
  // All threads read each row as float32, normed.
  const Input input = prepare_shared(op, plan, residual);
  const Product product{&router, nullptr, run.memory.logits, router.rows, model_.vector(op.biases[0]),
                        false, kNoActivation};
  multiply(worker_, input, &product, 1);
  barrier(KVT_PROFILE_PREPARE);
  const Output output{op.matrices[0], run.memory.logits, router.rows};
  if (has_changes(op)) add_changes(x, &output, 1);
  if (op.is_shared) run.factors = weigh_shared(op, x);
  apply_experts(worker_, run);
  barrier(KVT_PROFILE_MAIN);
}

// How often each row's shared expert counts.
inline const float* Runner::weigh_shared(const kvt_op& op, const float* x) {
  float* factors = model_.memory.factors.as<float>();
  const float* gate = model_.vector(op.shared_gate);
  for (int64_t row; (row = worker_.take(num_rows())) >= 0;) {
    factors[row] = 1.0f;
    if (!gate) continue;
    const float power = dot(x + row * model_.hidden_size, gate, model_.hidden_size);
    sigmoid_gate(factors + row, &power, 1);
  }
  barrier(KVT_PROFILE_PREPARE);
  return factors;
}

}  // namespace kvt
