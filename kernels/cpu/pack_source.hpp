// Reading the blocks of a GGUF file: one row's block to codes and raw scales.
#pragma once

#include "formats.hpp"

namespace kvt {

// A block of 32 or 256 inputs. `d` and `m` are IEEE halves as they stand (an exponent byte for
// MXFP4); `scales` and `mins` are the small integers of K types, one for 32 or 16 inputs.
struct SourceBlock {
  uint8_t codes[256];
  uint16_t d, m;
  uint8_t scales[16], mins[16];
};

namespace source {

// 16 bytes: the low nibbles are the first 16 codes, the high ones the last.
inline void nibbles(const uint8_t* bytes, uint8_t* codes) {
  for (int i = 0; i < 16; ++i) {
    codes[i] = bytes[i] & 15;
    codes[i + 16] = bytes[i] >> 4;
  }
}

inline void fifth_bits(const uint8_t* bytes, uint8_t* codes) {
  const auto bits = load<uint32_t>(bytes);
  for (int i = 0; i < 32; ++i) codes[i] |= (bits >> i & 1) << 4;
}

// 256 codes of 4 bits: each 32 bytes hold 32 codes in the low nibbles, then 32 in the high ones.
inline void long_nibbles(const uint8_t* bytes, uint8_t* codes) {
  for (int i = 0; i < 256; ++i) {
    codes[i] = bytes[i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15;
  }
}

// 256 codes of 2 bits: each 32 bytes hold four times 32 codes, the lowest bits first.
inline void long_pairs(const uint8_t* bytes, uint8_t* codes) {
  for (int i = 0; i < 256; ++i) {
    codes[i] = bytes[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
  }
}

// 32 bytes: bit b of byte i belongs to code 32b + i.
inline void long_bits(const uint8_t* bytes, int shift, uint8_t* codes) {
  for (int i = 0; i < 256; ++i) codes[i] |= (bytes[i % 32] >> (i / 32) & 1) << shift;
}

inline void sixes(const uint8_t* low, const uint8_t* high, uint8_t* codes) {
  for (int i = 0; i < 256; ++i) {
    const int run = i / 128, place = i % 128;
    const int nibble = low[64 * run + place % 64] >> (place / 64 * 4) & 15;
    codes[i] = nibble | (high[32 * run + i % 32] >> (place / 32 * 2) & 3) << 4;
  }
}

// 12 bytes: eight scales and eight mins of 6 bits (Q4_K, Q5_K).
inline void packed_scales(const uint8_t* bytes, SourceBlock& block) {
  for (int i = 0; i < 4; ++i) {
    block.scales[i] = bytes[i] & 63;
    block.mins[i] = bytes[i + 4] & 63;
    block.scales[i + 4] = (bytes[i + 8] & 15) | bytes[i] >> 6 << 4;
    block.mins[i + 4] = bytes[i + 8] >> 4 | bytes[i + 4] >> 6 << 4;
  }
}

// 12 bytes: sixteen scales of 6 bits, less 32 (Q3_K).
inline void sixteen_scales(const uint8_t* bytes, SourceBlock& block) {
  for (int i = 0; i < 16; ++i) {
    const int low = bytes[i % 8] >> (i / 8 * 4) & 15;
    const int high = bytes[8 + i % 4] >> (i / 4 * 2) & 3;
    block.scales[i] = static_cast<uint8_t>((low | high << 4) - 32);
  }
}

inline void iq4_xs(const uint8_t* bytes, SourceBlock& block) {
  const auto high = load<uint16_t>(bytes + 2);
  for (int g = 0; g < 8; ++g) {
    const int low = bytes[4 + g / 2] >> (g % 2 * 4) & 15;
    block.scales[g] = static_cast<uint8_t>((low | (high >> (2 * g) & 3) << 4) - 32);
    nibbles(bytes + 8 + 16 * g, block.codes + 32 * g);
  }
}

inline void read_small(int32_t type, const uint8_t* bytes, SourceBlock& block) {
  const bool is_mxfp4 = type == kMXFP4;
  const bool has_min = format_of(type).has_min();
  block.d = is_mxfp4 ? bytes[0] : load<uint16_t>(bytes);
  bytes += is_mxfp4 ? 1 : 2;
  if (has_min) block.m = load<uint16_t>(bytes);
  bytes += has_min ? 2 : 0;
  if (type == kQ8_0) {
    for (int i = 0; i < 32; ++i) block.codes[i] = bytes[i] ^ 0x80;  // plus 128
    return;
  }
  const bool is_five = type == kQ5_0 || type == kQ5_1;
  nibbles(bytes + (is_five ? 4 : 0), block.codes);
  if (is_five) fifth_bits(bytes, block.codes);
}

inline void read_super(int32_t type, const uint8_t* bytes, SourceBlock& block) {
  switch (type) {
    case kQ2_K:
      for (int i = 0; i < 16; ++i) block.scales[i] = bytes[i];
      long_pairs(bytes + 16, block.codes);
      block.d = load<uint16_t>(bytes + 80);
      block.m = load<uint16_t>(bytes + 82);
      break;
    case kQ3_K:
      long_pairs(bytes + 32, block.codes);
      long_bits(bytes, 2, block.codes);
      sixteen_scales(bytes + 96, block);
      block.d = load<uint16_t>(bytes + 108);
      break;
    case kQ4_K:
    case kQ5_K:
      block.d = load<uint16_t>(bytes);
      block.m = load<uint16_t>(bytes + 2);
      packed_scales(bytes + 4, block);
      long_nibbles(bytes + (type == kQ4_K ? 16 : 48), block.codes);
      if (type == kQ5_K) long_bits(bytes + 16, 4, block.codes);
      break;
    case kQ6_K:
      sixes(bytes, bytes + 128, block.codes);
      std::memcpy(block.scales, bytes + 192, 16);
      block.d = load<uint16_t>(bytes + 208);
      break;
    default:
      block.d = load<uint16_t>(bytes);
      iq4_xs(bytes, block);
  }
}

inline void read_block(int32_t type, const uint8_t* bytes, SourceBlock& block) {
  if (format_of(type).is_super()) {
    read_super(type, bytes, block);
  } else {
    read_small(type, bytes, block);
  }
}

}  // namespace source
}  // namespace kvt
