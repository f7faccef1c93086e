// Packing: rows of a GGUF file to panels.
#pragma once

#include <algorithm>
#include <memory>

#include "pack_source.hpp"

namespace kvt {
namespace pack {

// Put bits [from, from + 8 / per_byte) of every code into the plane that holds them.
inline void put_plane(const uint8_t* vectors, int from, int width, uint8_t* plane) {
  const int per_byte = 8 / width;        // codes in a byte
  const int num_vectors = width == 8 ? 8 : 8 / per_byte;
  const uint8_t mask = static_cast<uint8_t>((1 << width) - 1);
  for (int v = 0; v < num_vectors; ++v) {
    for (int i = 0; i < 64; ++i) {
      int byte = 0;
      for (int place = 0; place < per_byte; ++place) {
        // Nibbles pair vectors v and v + 4, the others hold neighbours.
        const int j = width == 4 ? v + 4 * place : v * per_byte + place;
        byte |= (vectors[64 * j + i] >> from & mask) << (width * place);
      }
      plane[64 * v + i] = static_cast<uint8_t>(byte);
    }
  }
}

inline void put_planes(const uint8_t* vectors, int bits, uint8_t* planes) {
  const int low = bits == 8 ? 8 : bits >= 4 ? 4 : 2;
  put_plane(vectors, 0, low, planes);
  if (bits > low) put_plane(vectors, low, bits - low, planes + 64 * low);
}

// Group `g` of 32 rows' blocks.
inline void put_group(const Format& format, const SourceBlock* rows, int g, uint8_t* group) {
  alignas(64) uint8_t vectors[512];
  for (int half = 0; half < 2; ++half) {
    for (int r = 0; r < 16; ++r) {
      const uint8_t* codes = rows[16 * half + r].codes + 32 * g;
      for (int j = 0; j < 8; ++j) std::memcpy(vectors + 64 * j + 4 * r, codes + 4 * j, 4);
    }
    put_planes(vectors, format.bits, group + half * format.half_bytes());
  }
}

// Scales that follow a group.
inline void put_scales(const Format& format, const SourceBlock* rows, uint8_t* target) {
  for (int r = 0; r < kPanelRows; ++r) {
    if (format.scales == kExponent) {
      target[r] = static_cast<uint8_t>(rows[r].d);
      continue;
    }
    store(target + 2 * r, rows[r].d);
    if (format.scales == kHalfMin) store(target + 64 + 2 * r, rows[r].m);
  }
}

inline void put_header(const Format& format, const SourceBlock* rows, uint8_t* header) {
  uint8_t* small = header + (format.has_min() ? 128 : 64);
  for (int r = 0; r < kPanelRows; ++r, ++small) {
    store(header + 2 * r, rows[r].d);
    if (format.has_min()) store(header + 64 + 2 * r, rows[r].m);
    const int count = format.has_halves() ? 16 : 8;
    const int step = format.scales == kByteMin ? 64 : 32;
    for (int i = 0; i < count; ++i) {
      small[step * i] = rows[r].scales[i];
      if (format.scales == kByteMin) small[step * i + 32] = rows[r].mins[i];
    }
  }
}

struct Source {
  int32_t type;
  const uint8_t* data;
  int64_t rows, cols;
};

inline void pack_quantised(const Source& source, int64_t panel, uint8_t* target) {
  const Format format = format_of(source.type);
  const int64_t row_bytes = source_row_bytes(source.type, source.cols);
  const auto blocks = std::make_unique<SourceBlock[]>(kPanelRows);
  const int64_t first = panel * kPanelRows;
  const auto count = static_cast<int>(std::min(kPanelRows, source.rows - first));
  for (int64_t b = 0; b < source.cols / format.block(); ++b) {
    for (int r = 0; r < count; ++r) {
      const uint8_t* row = source.data + (first + r) * row_bytes;
      source::read_block(source.type, row + b * format.source_bytes, blocks[r]);
    }
    if (format.is_super()) put_header(format, blocks.get(), target);
    uint8_t* group = target + format.header_bytes();
    for (int g = 0; g < format.groups(); ++g, group += format.group_bytes()) {
      put_group(format, blocks.get(), g, group);
      if (!format.is_super()) put_scales(format, blocks.get(), group + 2 * format.half_bytes());
    }
    target += format.block_bytes();
  }
}

// T: the bits of a value. Pairs of inputs stand together in bfloat16 panels.
template <class T>
void pack_floats(const Source& source, int64_t panel, T* target) {
  const bool is_paired = source.type == kBF16;
  const int64_t first = panel * kPanelRows;
  const int64_t count = std::min(kPanelRows, source.rows - first);
  for (int64_t r = 0; r < count; ++r) {
    const uint8_t* row = source.data + (first + r) * source.cols * static_cast<int64_t>(sizeof(T));
    for (int64_t k = 0; k < source.cols; ++k) {
      const int64_t place = is_paired ? (k / 2 * kPanelRows + r) * 2 + k % 2 : k * kPanelRows + r;
      target[place] = load<T>(row + k * static_cast<int64_t>(sizeof(T)));
    }
  }
}

}  // namespace pack

inline void pack_rows(int32_t type, const uint8_t* source, int64_t rows, int64_t cols,
                      uint8_t* target, int64_t first_panel, int64_t num_panels) {
  const pack::Source from{type, source, rows, cols};
  const int64_t bytes = panel_bytes(type, cols);
  for (int64_t panel = first_panel; panel < first_panel + num_panels; ++panel) {
    uint8_t* to = target + panel * bytes;
    if (is_quantised(type)) {
      pack::pack_quantised(from, panel, to);
      continue;
    }
    std::memset(to, 0, static_cast<size_t>(bytes));
    if (type == kF32) {
      pack::pack_floats(from, panel, reinterpret_cast<uint32_t*>(to));
    } else {
      pack::pack_floats(from, panel, reinterpret_cast<uint16_t*>(to));
    }
  }
}

}  // namespace kvt
