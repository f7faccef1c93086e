// Products of the rows of an input with packed matrices: sharing out the work.
#pragma once

#include "multiply_activation.hpp"
#include "multiply_kernels.hpp"
#include "multiply_plan.hpp"

namespace kvt {
namespace products {

constexpr int64_t kAhead = 6144;  // bytes between what is read and what is fetched

inline const uint8_t* panel_at(const Matrix& matrix, int64_t panel) {
  return matrix.data + panel * panel_bytes(matrix.type, matrix.cols);
}

inline int64_t num_tiles(const Unit& unit) {
  return divide_up(unit.last_row - unit.first_row, kInputRows);
}

// What one of a unit's tiles shall fetch. The only tile of a panel reads memory all the time: it
// fetches what comes soon, past the panel's end too. Of several, each fetches a share of the next
// panel.
inline Fetch fetch_for(const Matrix& matrix, const Unit& unit, int64_t tile) {
  const int64_t bytes = panel_bytes(matrix.type, matrix.cols);
  const int64_t steps = divide_up(matrix.cols, 32);
  const int64_t lines = divide_up(bytes, kLine * steps * num_tiles(unit));
  const int64_t ahead = num_tiles(unit) == 1 ? kAhead : bytes + tile * steps * lines * kLine;
  return {panel_at(matrix, unit.panel) + ahead, panel_at(matrix, unit.end_panel),
          static_cast<int>(lines), num_tiles(unit) == 1};
}

// The inputs of a block of six rows.
inline const void* block_inputs(const Input& input, int32_t type, int64_t block) {
  if (is_quantised(type)) {
    return reinterpret_cast<const InputGroup*>(input.groups) + block * (input.cols / 32);
  }
  const int64_t bytes = padded_cols(input.cols) * kInputRows * (is_paired(type) ? 2 : 4);
  return (is_paired(type) ? input.halves : input.floats) + block * bytes;
}

// sums [rows][32] of rows first.. of the input, a block or its beginning, with a unit's panel.
inline void multiply_block(const Input& input, const Matrix& matrix, const Unit& unit,
                           int64_t first, int64_t rows, float* sums) {
  const int64_t tile = (first - unit.first_row) / kInputRows;
  tiles_of(matrix.type)[rows - 1]({panel_at(matrix, unit.panel),
                                   block_inputs(input, matrix.type, first / kInputRows),
                                   matrix.cols, sums, fetch_for(matrix, unit, tile)});
}

inline void finish_panel(const Unit& unit, float* sums, float* gates, float* out) {
  const Product& product = *unit.product;
  const int64_t row = unit.panel * kPanelRows;
  const int64_t count = std::min(kPanelRows, product.matrix->rows - row);
  const float* bias = product.bias ? product.bias + row : nullptr;
  if (!product.activation) return finish(sums, bias, product.accumulate, count, out + row);
  add_bias(sums, bias, count);
  if (gates) {
    add_bias(gates, product.gate_bias ? product.gate_bias + row : nullptr, count);
    gate_values(sums, gates, kPanelRows, product.activation);
  } else {
    activate_values(sums, kPanelRows, product.activation);
  }
  finish(sums, nullptr, false, count, out + row);
}

// A panel with a unit's rows, six at a time.
inline void multiply_unit(const Input& input, const Unit& unit) {
  const Product& product = *unit.product;
  alignas(64) float sums[kInputRows * kPanelRows], gates[kInputRows * kPanelRows];
  for (int64_t first = unit.first_row; first < unit.last_row; first += kInputRows) {
    const int64_t rows = std::min<int64_t>(kInputRows, unit.last_row - first);
    multiply_block(input, *product.matrix, unit, first, rows, sums);
    if (product.gate) multiply_block(input, *product.gate, unit, first, rows, gates);
    for (int64_t i = 0; i < rows; ++i) {
      finish_panel(unit, sums + i * kPanelRows, product.gate ? gates + i * kPanelRows : nullptr,
                   product.out + (first + i) * product.stride);
    }
  }
}

}  // namespace products

inline void multiply(Worker& worker, const Input& input, const Product* products,
                     int num_products) {
  const products::Plan plan = products::make_plan(worker, input, products, num_products);
  products::Runs runs(worker, plan);
  for (products::Run run = runs.take(); !run.is_empty(); run = runs.take()) {
    for (; !run.is_empty(); ++run.first) {
      products::multiply_unit(input, products::unit_at(plan, run, input.n));
    }
  }
}

}  // namespace kvt
