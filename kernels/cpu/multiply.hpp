// Products of the rows of an input with packed matrices: sharing out the work.
//
// An item is a run of panels of one product, for some of the rows. One row: each panel is read
// once, as it is. More rows: a panel is unpacked into this thread's cache and meets all blocks of
// six rows there, while the next panel is fetched from memory.
#pragma once

#include "multiply_activation.hpp"
#include "multiply_kernels.hpp"

namespace kvt {
namespace products {

constexpr int64_t kRunBytes = 64 << 10;     // of an item with few rows: long reads in one piece
constexpr int64_t kRowsBytes = 384 << 10;   // activations that stay in a core's second cache
constexpr int64_t kItemsPerThread = 4;      // so that threads end together

// How the work is cut: items are numbered product by product for the first rows, then the next.
struct Plan {
  const Product* products;
  int num_products;
  int64_t run;        // panels of an item
  int64_t rows;       // rows of an item, a multiple of six
  int64_t num_runs;   // of all products
  int64_t num_items;
};

struct Item {
  const Product* product;
  int64_t first_panel, last_panel;
  int64_t first_row, last_row;
};

inline int64_t divide_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit; }

inline int64_t runs_of(const Product& product, int64_t run) {
  return divide_up(num_panels(product.matrix->rows), run);
}

inline Plan make_plan(const Worker& worker, const Input& input, const Product* products,
                      int num_products) {
  int64_t panels = 0, bytes = 0;
  for (int i = 0; i < num_products; ++i) {
    panels += num_panels(products[i].matrix->rows);
    bytes = std::max(bytes, panel_bytes(products[i].matrix->type, input.cols));
  }
  const int64_t wanted = worker.num_threads * kItemsPerThread;
  Plan plan{products, num_products, 1, 0, 0, 0};
  if (input.n <= 16) plan.run = std::clamp(panels / wanted, int64_t{1}, divide_up(kRunBytes, bytes));
  const int64_t fitting = kRowsBytes / std::max<int64_t>(1, input.cols * 2);
  const int64_t sharing = divide_up(input.n * panels, wanted);
  plan.rows = std::max<int64_t>(std::min(fitting, sharing), 2 * kInputRows);
  plan.rows = divide_up(plan.rows, kInputRows) * kInputRows;
  for (int i = 0; i < num_products; ++i) plan.num_runs += runs_of(products[i], plan.run);
  plan.num_items = plan.num_runs * divide_up(input.n, plan.rows);
  return plan;
}

inline Item item_of(const Plan& plan, int64_t number, int64_t n) {
  Item item{plan.products, 0, 0, number / plan.num_runs * plan.rows, 0};
  item.last_row = std::min(n, item.first_row + plan.rows);
  int64_t run = number % plan.num_runs;
  for (int64_t runs; run >= (runs = runs_of(*item.product, plan.run)); ++item.product) run -= runs;
  item.first_panel = run * plan.run;
  item.last_panel = std::min(num_panels(item.product->matrix->rows), item.first_panel + plan.run);
  return item;
}

inline const uint8_t* panel_at(const Matrix& matrix, int64_t panel) {
  return matrix.data + panel * panel_bytes(matrix.type, matrix.cols);
}

// A matrix with its kernels, as one thread uses it.
struct Operand {
  const Matrix* matrix;
  Kernels kernels;
  uint8_t* memory;          // for an unpacked panel
  const uint8_t* unpacked;  // the current panel

  void take_panel(int64_t panel) {
    unpacked = panel_at(*matrix, panel);
    if (!kernels.unpack) return;
    kernels.unpack(unpacked, matrix->cols, memory);
    unpacked = memory;
  }

  // sums [rows][32] of rows first.. of the input: a block, or its beginning.
  void multiply(const Input& input, int64_t first, int64_t rows, float* sums) const {
    const int64_t block = first / kInputRows;
    if (kernels.tiles) {
      const int64_t groups = input.cols / 32;
      const auto* x = reinterpret_cast<const InputGroup*>(input.groups) + block * groups;
      kernels.tiles[rows - 1]({unpacked, x, groups, format_of(matrix->type).zero_shift, sums});
      return;
    }
    const bool is_paired = input_form(matrix->type) == kFormBf16;
    const int64_t count = padded_cols(input.cols) / (is_paired ? 2 : 1);
    const std::byte* x = is_paired ? input.halves : input.floats;
    x += block * count * kInputRows * 4;
    kernels.float_tiles[rows - 1]({unpacked, x, count, sums});
  }
};

inline void finish_panel(const Product& product, int64_t panel, float* sums, const float* gates,
                         float* out) {
  const int64_t row = panel * kPanelRows;
  const int64_t count = std::min(kPanelRows, product.matrix->rows - row);
  if (gates) gate_values(sums, gates, kPanelRows, product.activation);
  const float* bias = product.bias ? product.bias + row : nullptr;
  finish(sums, bias, product.accumulate, count, out + row);
}

// The panels of an item with the only row.
inline void multiply_one(const Input& input, const Item& item) {
  const Product& product = *item.product;
  const auto kernel = kernels_of(product.matrix->type).vector;
  const auto gate = product.gate ? kernels_of(product.gate->type).vector : nullptr;
  for (int64_t panel = item.first_panel; panel < item.last_panel; ++panel) {
    alignas(64) float sums[kPanelRows], gates[kPanelRows];
    kernel(panel_at(*product.matrix, panel), input, sums);
    if (gate) gate(panel_at(*product.gate, panel), input, gates);
    finish_panel(product, panel, sums, gate ? gates : nullptr, product.out);
  }
}

inline bool has_vector(const Product& product) {
  return kernels_of(product.matrix->type).vector &&
         (!product.gate || kernels_of(product.gate->type).vector);
}

// The panels of an item with its rows, six at a time.
inline void multiply_rows(const Input& input, const Item& item, uint8_t* scratch) {
  const Product& product = *item.product;
  Operand up{product.matrix, kernels_of(product.matrix->type), scratch, nullptr};
  Operand gate{product.gate, {}, scratch + unpacked_bytes(up.matrix->type, input.cols), nullptr};
  if (product.gate) gate.kernels = kernels_of(product.gate->type);
  for (int64_t panel = item.first_panel; panel < item.last_panel; ++panel) {
    alignas(64) float sums[kInputRows * kPanelRows], gates[kInputRows * kPanelRows];
    up.take_panel(panel);
    if (product.gate) gate.take_panel(panel);
    for (int64_t first = item.first_row; first < item.last_row; first += kInputRows) {
      const int64_t rows = std::min<int64_t>(kInputRows, item.last_row - first);
      up.multiply(input, first, rows, sums);
      if (product.gate) gate.multiply(input, first, rows, gates);
      for (int64_t i = 0; i < rows; ++i) {
        finish_panel(product, panel, sums + i * kPanelRows,
               product.gate ? gates + i * kPanelRows : nullptr,
               product.out + (first + i) * product.stride);
      }
    }
  }
}

}  // namespace products

inline int64_t multiply_scratch(int64_t cols) { return 2 * padded_cols(cols) * kPanelRows * 4; }

inline void multiply(Worker& worker, const Input& input, const Product* products,
                     int num_products) {
  using namespace products;
  const Plan plan = make_plan(worker, input, products, num_products);
  auto* scratch = reinterpret_cast<uint8_t*>(worker.scratch);
  for (int64_t number; (number = worker.take(plan.num_items)) >= 0;) {
    const Item item = item_of(plan, number, input.n);
    if (input.n == 1 && has_vector(*item.product)) {
      multiply_one(input, item);
    } else {
      multiply_rows(input, item, scratch);
    }
  }
}

}  // namespace kvt
