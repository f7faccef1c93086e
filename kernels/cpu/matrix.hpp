// Quantised matrices and their products: what the executor sees.
//
// A matrix is repacked at load into panels of 32 output rows (two halves of 16), without loss: the
// quants of a GGUF type keep their bits, scales are stored as they are or a little wider. In a
// panel the inputs come in ascending order, 32 (a group) at a time, so one row, many rows and all
// instruction sets read one stream of memory.
//
// 1. Value = d * u + m with u an unsigned byte; types with a zero point z have m = -z * d.
// 2. Activations are int8 with one float scale per group (amax / 127); for F16 and F32 matrices
//    they stay float, for BF16 they are rounded to bfloat16 where the processor multiplies those.
// 3. The products inside a group (or half a group, where a type has a scale for 16 inputs) are
//    summed exactly, as integers; groups are added in float32, in ascending order. So a row's
//    result has the same bits whatever rows stand beside it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "team.hpp"

namespace kvt {

// ggml's numbers of the types that matrices can have.
enum Type : int32_t {
  kF32 = 0, kF16 = 1, kQ4_0 = 2, kQ4_1 = 3, kQ5_0 = 6, kQ5_1 = 7, kQ8_0 = 8, kQ2_K = 10, kQ3_K = 11,
  kQ4_K = 12, kQ5_K = 13, kQ6_K = 14, kIQ4_NL = 20, kIQ4_XS = 23, kBF16 = 30, kMXFP4 = 39,
};

enum Activation : int32_t { kNoActivation = 0, kSilu = 1, kGeluTanh = 2, kClamped = 3 };

constexpr int64_t kPanelRows = 32;

// `data` points to num_panels(rows) panels, aligned to 64 bytes. Rows of the last panel that do not
// exist are zeros; so are inputs beyond `cols` in float types.
struct Matrix {
  int32_t type;
  int64_t rows, cols;
  const uint8_t* data;
  int64_t stack = 1;  // matrices of this shape, one behind the other
};

constexpr int64_t num_panels(int64_t rows) { return (rows + kPanelRows - 1) / kPanelRows; }

// Bytes of all panels, a multiple of 64; -1 for a type that is not in `Type`, no rows, or cols that
// are no multiple of the type's block (32 or 256).
int64_t packed_bytes(int32_t type, int64_t rows, int64_t cols);

// Bytes of one row as GGUF stores it; -1 as above.
int64_t source_row_bytes(int32_t type, int64_t cols);

// Pack panels [first_panel, first_panel + num_panels) of a matrix. `source` is row 0 as GGUF stores
// it (any alignment), `target` panel 0. Panels are independent: threads may share them out.
void pack_rows(int32_t type, const uint8_t* source, int64_t rows, int64_t cols, uint8_t* target,
               int64_t first_panel, int64_t num_panels);

// One row as float32 [cols], the values that gguf.quants.dequantize gives.
void dequantise_row(const Matrix& matrix, int64_t row, float* out);

// The forms of activations; a product needs the one of its matrices' type.
enum Form : uint32_t { kForm8 = 1, kFormFloat = 2, kFormBf16 = 4 };

uint32_t input_form(int32_t type);

// The activations of n rows of `cols` floats, in the forms that products need. Written by
// input_prepare, read by multiply; fields are the kernels' own.
struct Input {
  int64_t n, cols;
  uint32_t forms;
  std::byte* groups;  // kForm8: blocks of 6 rows, see input.hpp
  std::byte* floats;  // kFormFloat
  std::byte* halves;  // kFormBf16
};

// Memory for n rows, a multiple of 64 bytes. `forms` is the union of input_form() of all matrices
// that will read the input.
int64_t input_bytes(int64_t n, int64_t cols, uint32_t forms);

// `memory` is aligned to 64 bytes and holds input_bytes(); it need not be zeroed.
void input_bind(Input& input, std::byte* memory, int64_t n, int64_t cols, uint32_t forms);

// Convert rows [first, first + count); row i is the `cols` floats at x + i * stride. Threads may
// prepare different rows at once. A value that is not finite makes its row's results not finite.
void input_prepare(const Input& input, const float* x, int64_t stride, int64_t first,
                   int64_t count);

// out[i * stride + r] = (x W^T)[i][r] (+ bias[r]) (+ the old value, if accumulate) for all rows i
// of the input. With a gate: out = act(x gate^T + gate bias) * (x W^T + bias), where gate has the
// matrix's rows and cols (types may differ) and nothing is accumulated. Without one, but with an
// activation: out = act(x W^T + bias), the same.
struct Product {
  const Matrix* matrix;
  const Matrix* gate;  // or null
  float* out;
  int64_t stride;      // floats between rows of out
  const float* bias;   // float32 [rows], or null
  bool accumulate;
  int32_t activation;  // Activation
  const float* gate_bias = nullptr;
};

// A stage: all threads call it with the same arguments, and a barrier follows. The products share
// one input.
void multiply(Worker& worker, const Input& input, const Product* products, int num_products);

// up[i] *= act(gate[i]): what a product with a gate does, for gates that adapters have changed;
// clamped: up[i] becomes what Activation says.
void gate_values(float* up, const float* gate, int64_t count, int32_t activation);

// x[i] = act(x[i]), not clamped.
void activate_values(float* x, int64_t count, int32_t activation);

}  // namespace kvt
