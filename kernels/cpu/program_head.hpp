// The head's best logits from unrounded activations.
//
// Rounded to int8, activations err by up to a hundredth of a logit's spread, and nothing behind the
// head averages that out: a sixth to a quarter of the whole divergence from float32 came from this
// one product (SmolLM2 Q4_1: 0.0027 with, 0.0021 without). Only the tokens that are likely to be
// chosen matter, so the best few of each row are computed once more; each row's are its own, so
// neighbours change nothing.
#pragma once

#include "program_input.hpp"

namespace kvt {

constexpr int64_t kExactLogits = 16;  // per row

inline void Runner::refine_logits(const kvt_op& op, const OpPlan& plan) {
  if (plan.forms == kFormFloat) return;
  const Sampler& sampler = model_.sampler;
  const int64_t num_parts = sampler.num_parts();
  const float* logits = model_.memory.logits.as<float>();
  for (int64_t i; (i = worker_.take(num_rows() * num_parts)) >= 0;) {
    scan_part(sampler, logits, i / num_parts, i % num_parts, false);
  }
  barrier(KVT_PROFILE_AFTER);
  for (int64_t row; (row = worker_.take(num_rows())) >= 0;) refine_row(op, row);
  barrier(KVT_PROFILE_AFTER);
}

inline void Runner::refine_row(const kvt_op& op, int64_t row) {
  const Sampler& sampler = model_.sampler;
  const PartResult* parts = sampler.parts(row);
  for (int64_t i = 0; i < sampler.num_parts(); ++i) {
    if (!parts[i].is_finite) return;  // the step will fail
  }
  const int64_t count = std::min(kExactLogits, model_.vocab_size), size = model_.hidden_size;
  int32_t ids[kExactLogits];
  float values[kExactLogits];
  float* logits = model_.memory.logits.as<float>() + row * model_.vocab_size;
  choose_top(sampler, logits, row, count, ids, values);
  thread_local std::vector<float> room;
  room.resize(static_cast<size_t>(2 * size));
  float* const weights = room.data() + size;
  const float* x = model_.buffer(KVT_RESIDUAL) + row * size;
  if (op.norm >= 0) {
    norm_row(op, x, size, room.data());
    x = room.data();
  }
  for (int64_t i = 0; i < count; ++i) {
    dequantise_row(model_.matrix(op.matrices[0]), ids[i], weights);
    logits[ids[i]] = dot(weights, x, size);
  }
}

}  // namespace kvt
