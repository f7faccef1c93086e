// The interpreter: every thread of the team runs the whole program; between two ops, and between
// what an op writes and reads itself, lies a barrier.
#pragma once

#include <chrono>

#include "program_step.hpp"

namespace kvt {

// Worker 0's clock: what passed since the last mark goes to a column of the op's profile.
class Meter {
 public:
  explicit Meter(int64_t* profile) : row_(profile) {
    if (row_) last_ = now();
  }
  void mark(int column) {
    if (!row_) return;
    const int64_t time = now();
    row_[column] += time - last_;
    last_ = time;
  }
  void next_op() {
    if (row_) row_ += KVT_PROFILE_COLUMNS;
  }

 private:
  static int64_t now() {
    const auto time = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
  }
  int64_t* row_;
  int64_t last_ = 0;
};

inline int64_t num_tiles(int64_t count, int64_t size) { return (count + size - 1) / size; }

// What all threads share in one step.
struct StepContext {
  const kvt_model& model;
  const kvt_step& step;
  const StepPlan& plan;
};

// One product of an op: its matrix's index and where its values go.
struct Output {
  int32_t matrix;
  float* out;
  int64_t stride;
};

struct HeadProducts;

// One thread's run through the program.
class Runner {
 public:
  Runner(Worker& worker, const StepContext& context)
      : worker_(worker),
        model_(context.model),
        step_(context.step),
        plan_(context.plan),
        rows_(&context.plan.all),
        meter_(worker.id == 0 ? context.step.profile : nullptr) {}

  void run();

 private:
  int64_t num_rows() const { return rows_->num_rows; }

  // All threads have done what stands before; it took the time since the last mark.
  void barrier(int column) {
    meter_.mark(column);
    worker_.barrier();
    meter_.mark(KVT_PROFILE_WAIT);
  }

  // program_run.hpp
  void copy_blocks();
  void copy_states(const LayerState& state);
  void embed(const kvt_op& op);
  void narrow();
  void add(const kvt_op& op);
  // program_ops.hpp
  void qkv(const kvt_op& op, const OpPlan& plan);
  void finish_qkv(const kvt_op& op, int64_t row, float* const* parts);
  float* place_query(const kvt_op& op, int64_t row, int64_t head);
  void norm_joint(const kvt_op& op, int64_t row, float* const* parts) const;
  void keep_row(const LayerCache& layer, int64_t row, const float* k, const float* v) const;
  void rotate(const kvt_attention& attention, int64_t row, float* x) const;
  void attend_rows(const kvt_op& op);
  void gate_attended(int64_t width);
  void linear(const kvt_op& op, const OpPlan& plan);
  void gated(const kvt_op& op, const OpPlan& plan);
  void plain(const kvt_op& op, const OpPlan& plan);
  void logits(const kvt_op& op, const OpPlan& plan);
  void finish_logits(const kvt_op& op);
  // program_experts.hpp
  void experts(const kvt_op& op, const OpPlan& plan);
  const float* weigh_shared(const kvt_op& op, const float* x);
  // program_latent.hpp
  void latent(const kvt_op& op, const OpPlan& plan);
  void place_queries(const kvt_attention& attention, const HeadProducts& products, int64_t head,
                     int64_t first);
  void finish_latent(const kvt_op& op, int64_t row);
  void heads(const kvt_op& op);
  // program_recurrent.hpp
  void recurrent(const kvt_op& op, const OpPlan& plan);
  // program_head.hpp
  void refine_logits(const kvt_op& op, const OpPlan& plan);
  void refine_row(const kvt_op& op, int64_t row);
  // program_input.hpp
  Input prepare(const kvt_op& op, const OpPlan& plan, const float* x);
  Input prepare_own(const kvt_op& op, const OpPlan& plan, const float* x);
  Input prepare_shared(const kvt_op& op, const OpPlan& plan, const float* x);
  const float* plain_input(const kvt_op& op, const float* x) const;
  void norm_row(const kvt_op& op, const float* x, int64_t size, float* out) const;
  // lora_run.hpp
  bool has_changes(const kvt_op& op) const;
  void add_changes(const float* x, const Output* outputs, int num_outputs);

  Worker& worker_;
  const kvt_model& model_;
  const kvt_step& step_;
  const StepPlan& plan_;
  const RowSet* rows_;       // the rows that ops work on
  // What waits for the next op, of all rows: q and its gates, or a recurrent layer's values.
  struct Pending {
    float* values;
    int64_t width;
  } pending_[2] = {};
  Meter meter_;
};

// One layer's blocks per item: copies of one layer run in order, layers beside each other.
inline void Runner::copy_blocks() {
  if (step_.num_copies == 0) return;
  const auto num_caches = static_cast<int64_t>(model_.caches.size());
  const auto num_states = static_cast<int64_t>(model_.states.size());
  for (int64_t i; (i = worker_.take(num_caches + num_states)) >= 0;) {
    if (i >= num_caches) {
      copy_states(model_.states[static_cast<size_t>(i - num_caches)]);
      continue;
    }
    const LayerCache& layer = model_.caches[static_cast<size_t>(i)];
    for (int32_t k = 0; k < step_.num_copies; ++k) {
      const kvt_copy& copy = step_.copies[k];
      if (copy.group == layer.group && copy.source != copy.target)
        cache_copy(layer.cache, copy.source, copy.target, copy.num_tokens);
    }
  }
  barrier(KVT_PROFILE_PREPARE);
}

inline void Runner::copy_states(const LayerState& state) {
  for (int32_t k = 0; k < step_.num_copies; ++k) {
    const kvt_copy& copy = step_.copies[k];
    if (copy.group != state.group || copy.source == copy.target) continue;
    std::memcpy(state.data + copy.target * state.stride, state.data + copy.source * state.stride,
                sizeof(float) * static_cast<size_t>(state.stride));
  }
}

// Embeddings, and beside them the rotations of all kinds of rope.
inline void Runner::embed(const kvt_op& op) {
  const Matrix& table = model_.matrix(op.matrices[0]);
  const int64_t width = model_.hidden_size;
  const int64_t num_kinds = 1 + static_cast<int64_t>(model_.ropes.size());
  for (int64_t i; (i = worker_.take(num_rows() * num_kinds)) >= 0;) {
    const int64_t row = i / num_kinds;
    const auto kind = static_cast<int32_t>(i % num_kinds) - 1;
    if (kind >= 0) {
      const Rope& rope = model_.ropes[static_cast<size_t>(kind)];
      const int64_t first = row * rope.num_pairs;
      rope_row(rope, plan_.positions[static_cast<size_t>(row)], model_.cosines(kind) + first,
               model_.sines(kind) + first);
      continue;
    }
    float* out = model_.buffer(KVT_RESIDUAL) + row * width;
    dequantise_row(table, step_.token_ids[row], out);
    if (op.scale != 1.0f) {
      for (int64_t k = 0; k < width; ++k) out[k] *= op.scale;
    }
  }
  barrier(KVT_PROFILE_MAIN);
}

// Rows move to lower places, in ascending order, so one thread can do it in place; they are few.
inline void Runner::narrow() {
  rows_ = &plan_.sampled;
  if (plan_.sampled.num_rows == plan_.all.num_rows) return;
  if (worker_.id == 0) {
    const Pending residual{model_.buffer(KVT_RESIDUAL), model_.hidden_size};
    for (const Pending& part : {residual, pending_[0], pending_[1]}) {
      for (int64_t i = 0; part.width && i < num_rows(); ++i) {
        std::memmove(part.values + i * part.width,
                     part.values + plan_.sampled_rows[static_cast<size_t>(i)] * part.width,
                     sizeof(float) * static_cast<size_t>(part.width));
      }
    }
  }
  barrier(KVT_PROFILE_MAIN);
}

inline void Runner::add(const kvt_op& op) {
  const int64_t width = model_.hidden_size;
  for (int64_t row; (row = worker_.take(num_rows())) >= 0;) {
    const float* branch = model_.buffer(KVT_BRANCH) + row * width;
    float* target = model_.buffer(KVT_RESIDUAL) + row * width;
    if (op.norm < 0) add_scaled_row(branch, op.scale, width, target);
    else add_norm_row(branch, model_.vector(op.norm), op.eps, op.scale, width, target);
  }
  barrier(KVT_PROFILE_MAIN);
}

inline void Runner::run() {
  copy_blocks();
  for (size_t i = 0; i < model_.program.size(); ++i) {
    const kvt_op& op = model_.program[i];
    const OpPlan& plan = model_.plans[i];
    switch (op.kind) {
      case KVT_OP_EMBED: embed(op); break;
      case KVT_OP_QKV: qkv(op, plan); break;
      case KVT_OP_ATTENTION: attend_rows(op); break;
      case KVT_OP_RECURRENT: recurrent(op, plan); break;
      case KVT_OP_LINEAR: linear(op, plan); break;
      case KVT_OP_GATED: gated(op, plan); break;
      case KVT_OP_PLAIN: plain(op, plan); break;
      case KVT_OP_LATENT: latent(op, plan); break;
      case KVT_OP_HEADS: heads(op); break;
      case KVT_OP_EXPERTS: experts(op, plan); break;
      case KVT_OP_ADD: add(op); break;
      case KVT_OP_SAMPLED: narrow(); break;
      case KVT_OP_LOGITS: logits(op, plan); break;
      case KVT_OP_SAMPLE:
        sample_rows(worker_, model_.sampler, model_.memory.logits.as<float>(), step_);
        barrier(KVT_PROFILE_MAIN);
        break;
    }
    if (num_rows() == 0) return;  // nothing is sampled: the rest is for nobody
    meter_.next_op();
  }
}

inline void run_program(Worker& worker, void* argument) {
  Runner(worker, *static_cast<const StepContext*>(argument)).run();
}

}  // namespace kvt
