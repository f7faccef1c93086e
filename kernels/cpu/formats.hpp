// The packed form of each type: bit planes of 16 rows by 4 inputs, and scales beside them.
//
// A panel holds blocks of 32 inputs (256 for K- and IQ4_XS types), a block a header and its groups
// of 32 inputs. A group's quants: for each half of 16 rows, planes of 64-byte vectors. Vector j of
// a group (8 of them) has the inputs 4j..4j+3 of 16 rows: byte 4 * row + input % 4.
//   4 bits: vector v of 4 has vector v of the group in its low nibbles, v + 4 in its high ones;
//   2 bits: vector v of 2 has vector 4v + i in bits 2i and 2i + 1;
//   1 bit:  bit j of the one vector belongs to vector j;
//   8 bits: 8 vectors, as they are.
// 5 bits are a plane of 4 and one of 1 bit, 6 are 4 + 2, 3 are 2 + 1; the first has the low bits.
#pragma once

#include "lanes.hpp"
#include "matrix.hpp"

namespace kvt {

// Where the scales of 32 rows stand; half = IEEE half precision.
enum Scales {
  kHalfScale,     // after each group: half d[32]
  kHalfMin,       // after each group: half d[32], half m[32]
  kExponent,      // after each group: exponent byte e[32], d = 2^(e - 128)
  kByteScale,     // header: half d[32], then for each group int8 scale[32]
  kByteMin,       // header: half d[32], half dmin[32], for each group uint8 scale[32], min[32]
  kHalvesScale,   // header: half d[32], for each group int8 scale[2][32], one for 16 inputs
  kHalvesMin,     // header: half d[32], half dmin[32], for each group byte[2][32]:
                  //         low nibble the scale, high nibble the min of 16 inputs
};

struct Format {
  int bits;
  Scales scales;
  int zero_shift;          // the zero point is 1 << zero_shift; -1: there is a min instead
  const uint8_t* table;    // value + zero point of each code, or null: the code
  int source_bytes;        // of a block as GGUF stores it

  constexpr bool is_super() const { return scales >= kByteScale; }
  constexpr bool has_min() const { return zero_shift < 0; }
  constexpr int block() const { return is_super() ? 256 : 32; }
  constexpr int groups() const { return block() / 32; }
  // Scales for 16 inputs each?
  constexpr bool has_halves() const { return scales == kHalvesScale || scales == kHalvesMin; }
  constexpr int parts() const { return has_halves() ? 2 : 1; }
  constexpr int half_bytes() const { return 64 * bits; }  // planes of 16 rows
  constexpr int header_bytes() const {
    switch (scales) {
      case kByteScale: return 64 + 8 * 32;
      case kByteMin: return 128 + 8 * 64;
      case kHalvesScale: return 64 + 8 * 64;
      case kHalvesMin: return 128 + 8 * 64;
      default: return 0;
    }
  }
  constexpr int group_bytes() const {
    switch (scales) {
      case kHalfScale: return 2 * half_bytes() + 64;
      case kHalfMin: return 2 * half_bytes() + 128;
      case kExponent: return 2 * half_bytes() + 32;
      default: return 2 * half_bytes();
    }
  }
  constexpr int64_t block_bytes() const { return header_bytes() + groups() * group_bytes(); }
  constexpr int zero() const { return has_min() ? 0 : 1 << zero_shift; }
};

// The values of IQ4_NL and IQ4_XS plus 128, and twice those of MXFP4 plus 16.
alignas(16) constexpr uint8_t kIq4Table[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                               129, 141, 153, 166, 181, 197, 217, 241};
alignas(16) constexpr uint8_t kMxfp4Table[16] = {16, 17, 18, 19, 20, 22, 24, 28,
                                                 16, 15, 14, 13, 12, 10, 8,  4};

constexpr Format format_of(int32_t type) {
  switch (type) {
    case kQ4_0: return {4, kHalfScale, 3, nullptr, 18};
    case kQ4_1: return {4, kHalfMin, -1, nullptr, 20};
    case kQ5_0: return {5, kHalfScale, 4, nullptr, 22};
    case kQ5_1: return {5, kHalfMin, -1, nullptr, 24};
    case kQ8_0: return {8, kHalfScale, 7, nullptr, 34};
    case kQ2_K: return {2, kHalvesMin, -1, nullptr, 84};
    case kQ3_K: return {3, kHalvesScale, 2, nullptr, 110};
    case kQ4_K: return {4, kByteMin, -1, nullptr, 144};
    case kQ5_K: return {5, kByteMin, -1, nullptr, 176};
    case kQ6_K: return {6, kHalvesScale, 5, nullptr, 210};
    case kIQ4_NL: return {4, kHalfScale, 7, kIq4Table, 18};
    case kIQ4_XS: return {4, kByteScale, 7, kIq4Table, 136};
    case kMXFP4: return {4, kExponent, 4, kMxfp4Table, 17};
    default: return {0, kHalfScale, 0, nullptr, 0};
  }
}

constexpr bool is_quantised(int32_t type) { return format_of(type).bits != 0; }

// Bytes of one value of a float type, 0 for others.
constexpr int float_bytes(int32_t type) {
  return type == kF32 ? 4 : type == kF16 || type == kBF16 ? 2 : 0;
}

// Float types: for each input 32 values, one of each row; bfloat16 in pairs of inputs, with 16
// rows by 2 inputs in 64 bytes. The number of inputs is made even with zeros.
constexpr int64_t padded_cols(int64_t cols) { return (cols + 1) / 2 * 2; }

constexpr int64_t panel_bytes(int32_t type, int64_t cols) {
  if (!is_quantised(type)) return padded_cols(cols) * kPanelRows * float_bytes(type);
  const Format format = format_of(type);
  return (cols / format.block() * format.block_bytes() + 63) / 64 * 64;
}

constexpr bool is_shape(int32_t type, int64_t rows, int64_t cols) {
  if (rows <= 0 || cols <= 0) return false;
  if (is_quantised(type)) return cols % format_of(type).block() == 0;
  return float_bytes(type) != 0;
}

inline int64_t packed_bytes(int32_t type, int64_t rows, int64_t cols) {
  return is_shape(type, rows, cols) ? num_panels(rows) * panel_bytes(type, cols) : -1;
}

inline int64_t source_row_bytes(int32_t type, int64_t cols) {
  if (!is_shape(type, 1, cols)) return -1;
  if (!is_quantised(type)) return cols * float_bytes(type);
  const Format format = format_of(type);
  return cols / format.block() * format.source_bytes;
}

// A panel's rows are computed in pieces of so many as a vector has lanes.
constexpr int kPieces = static_cast<int>(kPanelRows) / kLanes;

// Where the first plane of a piece begins, in a group of a type.
constexpr int piece_offset(const Format& format, int piece) {
  const int row = piece * kLanes;
  return row / 16 * format.half_bytes() + row % 16 * 4;
}

// Vector `j` of a piece, from its planes.
template <int kBits>
KVT_INLINE ByteLanes unpack(const uint8_t* planes, int j) {
  // Shifted by 16 bits at a time: the mask drops what comes from the neighbour.
  const auto field = [](const uint8_t* source, int from, int to, int mask) {
    const WordLanes words = load<WordLanes>(source);
    const WordLanes moved = from >= to ? words >> (from - to) : words << (to - from);
    return (ByteLanes)moved & (ByteLanes{} + static_cast<uint8_t>(mask << to));
  };
  if constexpr (kBits == 8) return load<ByteLanes>(planes + 64 * j);
  constexpr int kLow = kBits >= 4 ? 4 : 2;
  ByteLanes code = kLow == 4 ? field(planes + 64 * (j % 4), j / 4 * 4, 0, 15)
                             : field(planes + 64 * (j / 4), j % 4 * 2, 0, 3);
  const uint8_t* high = planes + 64 * kLow;
  if constexpr (kBits - kLow == 1) code |= field(high, j, kLow, 1);
  if constexpr (kBits - kLow == 2) code |= field(high + 64 * (j / 4), j % 4 * 2, kLow, 3);
  return code;
}

// Vector `j` as what the product takes: unsigned bytes, value + zero point.
template <int32_t kType>
KVT_INLINE ByteLanes weights(const uint8_t* planes, int j) {
  constexpr Format kFormat = format_of(kType);
  const ByteLanes codes = unpack<kFormat.bits>(planes, j);
  if constexpr (kFormat.table != nullptr) return look_up(kFormat.table, codes);
  return codes;
}

}  // namespace kvt
