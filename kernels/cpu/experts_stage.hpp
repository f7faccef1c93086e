// Experts behind their router's logits: choice, and two products for all rows.
#pragma once

#include "experts.hpp"

namespace kvt {

// x and out [n, cols], [n, down.rows] float32. A shared expert's values lie in out already, and
// count `factors` [n] times; without (null) out is set.
struct ExpertsRun {
  const Experts* experts;
  ExpertsMemory memory;  // logits are there
  const float* x;
  int64_t n;
  float* out;
  const float* factors;
};

namespace products {

inline Matrix expert_of(const Matrix& first, int64_t expert) {
  Matrix matrix = first;
  matrix.data += expert * num_panels(first.rows) * panel_bytes(first.type, first.cols);
  return matrix;
}

// Of an expert, where the stack has biases.
inline const float* bias_of(const float* biases, const Matrix& matrix, int64_t expert) {
  return biases ? biases + expert * matrix.rows : nullptr;
}

// Panels of one item: enough work for a run, but four items per thread.
inline int64_t item_panels(const Worker& worker, const Matrix& matrix, int64_t rows,
                           int64_t num_stacked) {
  const int64_t total = num_panels(matrix.rows) * num_stacked;
  const int64_t fair = total / (kUnitsPerThread * worker.num_threads);
  const int64_t long_enough =
      divide_up(kMinRun, kPanelRows * matrix.cols * std::max<int64_t>(rows, 8));
  return std::clamp<int64_t>(std::min(fair, long_enough), 1, num_panels(matrix.rows));
}

// Rows whose inputs stay in a core's second cache.
inline int64_t fitting_rows(int64_t cols) {
  return std::max<int64_t>(kRowsBytes / (2 * cols) / kInputRows, 2) * kInputRows;
}

// hidden of one expert's places, panels [first, end).
inline void raise_item(const ExpertsRun& run, const Places& places, const Input& input,
                       int32_t expert, int64_t first, int64_t end) {
  const Experts& experts = *run.experts;
  const Matrix gate = expert_of(experts.gate, expert), up = expert_of(experts.up, expert);
  const Product product{&up,
                        &gate,
                        run.memory.hidden,
                        up.rows,
                        bias_of(experts.biases[1], up, expert),
                        false,
                        experts.activation,
                        bias_of(experts.biases[0], gate, expert)};
  const int64_t last_row = places.firsts[expert] + places.counts[expert];
  const int64_t step = fitting_rows(up.cols);
  for (int64_t row = places.firsts[expert]; row < last_row; row += step) {
    for (int64_t panel = first; panel < end; ++panel) {
      multiply_unit(input, Unit{&product, panel, end, row, std::min(last_row, row + step)});
    }
  }
}

// One panel of down with rows of one expert, times their weights, added to out.
inline void lower_unit(const ExpertsRun& run, const Places& places, const Input& input,
                       const Unit& unit) {
  const Matrix& down = *unit.product->matrix;
  alignas(64) float sums[kInputRows * kPanelRows];
  const int64_t column = unit.panel * kPanelRows;
  const int64_t count = std::min(kPanelRows, down.rows - column);
  for (int64_t first = unit.first_row; first < unit.last_row; first += kInputRows) {
    const int64_t rows = std::min<int64_t>(kInputRows, unit.last_row - first);
    multiply_block(input, down, unit, first, rows, sums);
    for (int64_t i = 0; i < rows; ++i) {
      float* out = run.out + places.rows[first + i] * down.rows + column;
      const float weight = places.weights[first + i];
      float* values = sums + i * kPanelRows;
      add_bias(values, unit.product->bias ? unit.product->bias + column : nullptr, count);
      for (int64_t k = 0; k < count; ++k) out[k] += values[k] * weight;
    }
  }
}

// Panels [first, end) of out: what is there, and then one expert after the other.
inline void lower_item(const ExpertsRun& run, const Places& places, const Input& input,
                       int64_t first, int64_t end) {
  const Matrix& stack = run.experts->down;
  const int64_t column = first * kPanelRows, last = std::min(end * kPanelRows, stack.rows);
  for (int64_t row = 0; row < run.n; ++row) {
    float* out = run.out + row * stack.rows;
    if (!run.factors) std::fill(out + column, out + last, 0.0f);
    for (int64_t k = column; run.factors && k < last; ++k) out[k] *= run.factors[row];
  }
  const int64_t step = fitting_rows(stack.cols);
  for (int64_t i = 0; i < places.num_active; ++i) {
    const int32_t expert = places.active[i];
    const Matrix down = expert_of(stack, expert);
    const float* bias = bias_of(run.experts->biases[2], down, expert);
    const Product product{&down, nullptr, run.out, down.rows, bias, false, kNoActivation};
    const int64_t last_row = places.firsts[expert] + places.counts[expert];
    for (int64_t row = places.firsts[expert]; row < last_row; row += step) {
      for (int64_t panel = first; panel < end; ++panel) {
        lower_unit(run, places, input,
                   Unit{&product, panel, end, row, std::min(last_row, row + step)});
      }
    }
  }
}

}  // namespace products

// Inputs of all places: rows of x, which is sorted already or in the order of the step.
inline void prepare_places(Worker& worker, const Places& places, const Input& input, const float* x,
                           bool is_sorted) {
  for (int64_t i; (i = worker.take(places.count / kInputRows)) >= 0;) {
    for (int64_t place = i * kInputRows; place < (i + 1) * kInputRows; ++place) {
      if (places.rows[place] < 0) break;
      const int64_t row = is_sorted ? place : places.rows[place];
      input::prepare_row(input, x + row * input.cols, place);
    }
  }
  worker.barrier();
}

inline void raise_rows(Worker& worker, const ExpertsRun& run, const Places& places,
                       const Input& input) {
  const Matrix& up = run.experts->up;
  const int64_t rows = places.count / std::max<int64_t>(places.num_active, 1);
  const int64_t size = products::item_panels(worker, up, 2 * rows, places.num_active);
  const int64_t items = products::divide_up(num_panels(up.rows), size);
  for (int64_t i; (i = worker.take(items * places.num_active)) >= 0;) {
    const int64_t first = i % items * size;
    products::raise_item(run, places, input, places.active[i / items], first,
                         std::min(first + size, num_panels(up.rows)));
  }
  worker.barrier();
}

inline void lower_rows(Worker& worker, const ExpertsRun& run, const Places& places,
                       const Input& input) {
  const Matrix& down = run.experts->down;
  // Long items: each reads all inputs.
  const int64_t panels = num_panels(down.rows);
  const int64_t size =
      products::divide_up(panels, products::kUnitsPerThread * worker.num_threads);
  for (int64_t i; (i = worker.take(products::divide_up(panels, size))) >= 0;) {
    products::lower_item(run, places, input, i * size, std::min((i + 1) * size, panels));
  }
}

// A stage, and behind it a barrier: out of all rows from the router's logits.
inline void apply_experts(Worker& worker, const ExpertsRun& run) {
  const Experts& experts = *run.experts;
  for (int64_t row; (row = worker.take(run.n)) >= 0;) {
    choose_row(experts.routing, {run.memory.logits + row * experts.num_experts,
                                 experts.num_experts, experts.num_used,
                                 run.memory.chosen + row * experts.num_used,
                                 run.memory.weights + row * experts.num_used,
                                 reinterpret_cast<float*>(worker.scratch)});
  }
  worker.barrier();
  const Places places = sort_rows(experts, run.memory, run.n, worker.scratch);
  Input input, hidden;
  input_bind(input, run.memory.inputs, places.count, experts.up.cols, experts.forms());
  input_bind(hidden, run.memory.hidden_inputs, places.count, experts.down.cols,
             input_form(experts.down.type));
  prepare_places(worker, places, input, run.x, false);
  raise_rows(worker, run, places, input);
  prepare_places(worker, places, hidden, run.memory.hidden, true);
  lower_rows(worker, run, places, hidden);
}

}  // namespace kvt
