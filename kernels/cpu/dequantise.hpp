// One row of a packed matrix as floats (embedding lookup).
#pragma once

#include "formats_scales.hpp"

namespace kvt {
namespace dequantise {

template <int32_t kType>
void quantised(const uint8_t* panel, int64_t cols, int lane, float* out) {
  constexpr Format kFormat = format_of(kType);
  const int piece = lane / kLanes, place = lane % kLanes;
  for (int64_t done = 0; done < cols; done += kFormat.block(), panel += kFormat.block_bytes()) {
    const uint8_t* group = panel + kFormat.header_bytes();
    for (int g = 0; g < kFormat.groups(); ++g, group += kFormat.group_bytes()) {
      for (int j = 0; j < 8; ++j) {
        const ScaleLanes scales = read_scales<kType>(panel, group, g, piece, j / 4);
        const ByteLanes codes = weights<kType>(group + piece_offset(kFormat, piece), j);
        const float d = scales.d[place], m = scales.m[place];
        for (int k = 0; k < 4; ++k) {
          *out++ = d * static_cast<float>(codes[4 * place + k] - kFormat.zero()) + m;
        }
      }
    }
  }
}

inline void halves(int32_t type, const uint8_t* panel, int64_t cols, int lane, float* out) {
  const auto* values = reinterpret_cast<const uint16_t*>(panel);
  for (int64_t k = 0; k < cols; ++k) {
    out[k] = type == kF16
                 ? from_f16(values[k * kPanelRows + lane])
                 : bits_to_float(uint32_t{values[(k / 2 * kPanelRows + lane) * 2 + k % 2]} << 16);
  }
}

inline void floats(const uint8_t* panel, int64_t cols, int lane, float* out) {
  const auto* values = reinterpret_cast<const float*>(panel);
  for (int64_t k = 0; k < cols; ++k) out[k] = values[k * kPanelRows + lane];
}

}  // namespace dequantise

inline void dequantise_row(const Matrix& matrix, int64_t row, float* out) {
  const int64_t cols = matrix.cols;
  const uint8_t* panel = matrix.data + row / kPanelRows * panel_bytes(matrix.type, cols);
  const auto lane = static_cast<int>(row % kPanelRows);
  switch (matrix.type) {
    case kQ4_0: return dequantise::quantised<kQ4_0>(panel, cols, lane, out);
    case kQ4_1: return dequantise::quantised<kQ4_1>(panel, cols, lane, out);
    case kQ5_0: return dequantise::quantised<kQ5_0>(panel, cols, lane, out);
    case kQ5_1: return dequantise::quantised<kQ5_1>(panel, cols, lane, out);
    case kQ8_0: return dequantise::quantised<kQ8_0>(panel, cols, lane, out);
    case kQ2_K: return dequantise::quantised<kQ2_K>(panel, cols, lane, out);
    case kQ3_K: return dequantise::quantised<kQ3_K>(panel, cols, lane, out);
    case kQ4_K: return dequantise::quantised<kQ4_K>(panel, cols, lane, out);
    case kQ5_K: return dequantise::quantised<kQ5_K>(panel, cols, lane, out);
    case kQ6_K: return dequantise::quantised<kQ6_K>(panel, cols, lane, out);
    case kIQ4_NL: return dequantise::quantised<kIQ4_NL>(panel, cols, lane, out);
    case kIQ4_XS: return dequantise::quantised<kIQ4_XS>(panel, cols, lane, out);
    case kMXFP4: return dequantise::quantised<kMXFP4>(panel, cols, lane, out);
    case kF32: return dequantise::floats(panel, cols, lane, out);
    default: return dequantise::halves(matrix.type, panel, cols, lane, out);
  }
}

}  // namespace kvt
