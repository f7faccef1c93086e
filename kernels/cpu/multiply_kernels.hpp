// The kernels of each type.
#pragma once

#if defined(__AVX512VNNI__)
#include "multiply_gemv_avx512.hpp"
#else
#include "multiply_portable.hpp"
#endif

namespace kvt {

// How panels of a type meet a block of six rows: unpacked or widened first, then tile[rows - 1].
struct Kernels {
  void (*unpack)(const uint8_t* panel, int64_t cols, uint8_t* target);  // null: used as it is
  const TileFunction* tiles;                                            // quantised types
  const FloatTileFunction* float_tiles;                                 // float types
  // One row, without unpacking into memory; null: as for more.
  void (*vector)(const uint8_t* panel, const Input& input, float* out);
};

template <bool kHasHalves, bool kHasMin>
constexpr TileFunction kTiles[kInputRows] = {
    multiply_tile<1, kHasHalves, kHasMin>, multiply_tile<2, kHasHalves, kHasMin>,
    multiply_tile<3, kHasHalves, kHasMin>, multiply_tile<4, kHasHalves, kHasMin>,
    multiply_tile<5, kHasHalves, kHasMin>, multiply_tile<6, kHasHalves, kHasMin>};

constexpr FloatTileFunction kFloatTiles[kInputRows] = {
    multiply_float_tile<1>, multiply_float_tile<2>, multiply_float_tile<3>,
    multiply_float_tile<4>, multiply_float_tile<5>, multiply_float_tile<6>};

#if defined(__AVX512BF16__)
constexpr FloatTileFunction kBf16Tiles[kInputRows] = {
    multiply_bf16_tile<1>, multiply_bf16_tile<2>, multiply_bf16_tile<3>,
    multiply_bf16_tile<4>, multiply_bf16_tile<5>, multiply_bf16_tile<6>};
#endif

template <int32_t kType>
constexpr Kernels quantised_kernels() {
  constexpr Format kFormat = format_of(kType);
  const TileFunction* tiles = kTiles<kFormat.has_halves(), kFormat.has_min()>;
#if defined(__AVX512VNNI__)
  return {unpack_panel<kType>, tiles, nullptr, multiply_vector<kType>};
#else
  return {unpack_panel<kType>, tiles, nullptr, nullptr};
#endif
}

inline Kernels float_kernels(int32_t type) {
#if defined(__AVX512BF16__)
  if (type == kBF16) return {nullptr, nullptr, kBf16Tiles, nullptr};
#endif
#if defined(__AVX512VNNI__)
  if (type == kF32) return {nullptr, nullptr, kFloatTiles, multiply_float_vector<kF32>};
  if (type == kF16) return {widen_panel<kF16>, nullptr, kFloatTiles, multiply_float_vector<kF16>};
#else
  if (type == kF32) return {nullptr, nullptr, kFloatTiles, nullptr};
  if (type == kF16) return {widen_panel<kF16>, nullptr, kFloatTiles, nullptr};
#endif
  return {widen_panel<kBF16>, nullptr, kFloatTiles, nullptr};
}

inline Kernels kernels_of(int32_t type) {
  switch (type) {
    case kQ4_0: return quantised_kernels<kQ4_0>();
    case kQ4_1: return quantised_kernels<kQ4_1>();
    case kQ5_0: return quantised_kernels<kQ5_0>();
    case kQ5_1: return quantised_kernels<kQ5_1>();
    case kQ8_0: return quantised_kernels<kQ8_0>();
    case kQ2_K: return quantised_kernels<kQ2_K>();
    case kQ3_K: return quantised_kernels<kQ3_K>();
    case kQ4_K: return quantised_kernels<kQ4_K>();
    case kQ5_K: return quantised_kernels<kQ5_K>();
    case kQ6_K: return quantised_kernels<kQ6_K>();
    case kIQ4_NL: return quantised_kernels<kIQ4_NL>();
    case kIQ4_XS: return quantised_kernels<kIQ4_XS>();
    case kMXFP4: return quantised_kernels<kMXFP4>();
    default: return float_kernels(type);
  }
}

// Bytes of a panel as the tile kernels read it.
inline int64_t unpacked_bytes(int32_t type, int64_t cols) {
  return is_quantised(type) ? cols / 32 * kind_of(type).group_bytes()
                            : padded_cols(cols) * kPanelRows * 4;
}

}  // namespace kvt
