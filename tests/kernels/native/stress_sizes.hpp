// Recurrent layers of each kind, in small sizes that fill no vector.
#pragma once

#include "kvt_step.h"
#include "stress_team.hpp"

namespace stress {

constexpr int32_t kHidden = 64, kSlots = 16;

struct RecurrentSizes {
  int32_t kind, channels, heads, groups, key_dim, value_dim;
};

constexpr RecurrentSizes kRecurrents[] = {
    {KVT_DELTA_NET, 2 * 2 * 12 + 4 * 20, 4, 2, 12, 20},
    {KVT_STATE_SPACE, 6 * 10 + 2 * 7, 6, 1, 7, 10},
    {KVT_SHORT_CONV, kHidden, 0, 0, 0, 0},
};

// Without vectors.
inline kvt_recurrent bare_recurrent(const RecurrentSizes& sizes) {
  kvt_recurrent layer{};
  layer.kind = sizes.kind;
  layer.width = 4;
  layer.channels = sizes.channels;
  layer.num_heads = sizes.heads;
  layer.num_groups = sizes.groups;
  layer.key_dim = sizes.key_dim;
  layer.value_dim = sizes.value_dim;
  layer.is_tiled = sizes.kind == KVT_DELTA_NET;
  layer.conv = layer.conv_bias = layer.dt_bias = layer.decay = layer.skip = layer.norm = -1;
  return layer;
}

// Rows of the matrices that make up a row of such a layer.
inline std::vector<int32_t> part_sizes(const RecurrentSizes& sizes) {
  const int32_t inner = sizes.heads * sizes.value_dim;
  if (sizes.kind == KVT_SHORT_CONV) return {3 * sizes.channels};
  if (sizes.kind == KVT_STATE_SPACE) return {inner + sizes.channels + sizes.heads};
  return {sizes.channels, inner, sizes.heads, sizes.heads};
}

}  // namespace stress
