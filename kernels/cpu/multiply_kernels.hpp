// The tile kernels of each type, for 1 to 6 rows.
#pragma once

#if defined(__AVX512VNNI__)
#include "multiply_avx512.hpp"
#else
#include "multiply_narrow.hpp"
#endif

namespace kvt {

template <int32_t kType, int kRows>
void run_tile(const Tile& tile) {
  if constexpr (is_quantised(kType)) {
    multiply_tile<kType, kRows>(tile);
  } else {
    multiply_float_tile<kType, kRows>(tile);
  }
}

template <int32_t kType>
constexpr TileFunction kTiles[kInputRows] = {run_tile<kType, 1>, run_tile<kType, 2>,
                                             run_tile<kType, 3>, run_tile<kType, 4>,
                                             run_tile<kType, 5>, run_tile<kType, 6>};

// tiles_of(type)[rows - 1]
inline const TileFunction* tiles_of(int32_t type) {
  switch (type) {
    case kF32: return kTiles<kF32>;
    case kF16: return kTiles<kF16>;
    case kQ4_0: return kTiles<kQ4_0>;
    case kQ4_1: return kTiles<kQ4_1>;
    case kQ5_0: return kTiles<kQ5_0>;
    case kQ5_1: return kTiles<kQ5_1>;
    case kQ8_0: return kTiles<kQ8_0>;
    case kQ2_K: return kTiles<kQ2_K>;
    case kQ3_K: return kTiles<kQ3_K>;
    case kQ4_K: return kTiles<kQ4_K>;
    case kQ5_K: return kTiles<kQ5_K>;
    case kQ6_K: return kTiles<kQ6_K>;
    case kIQ4_NL: return kTiles<kIQ4_NL>;
    case kIQ4_XS: return kTiles<kIQ4_XS>;
    case kMXFP4: return kTiles<kMXFP4>;
    default: return kTiles<kBF16>;
  }
}

}  // namespace kvt
