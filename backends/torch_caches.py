"""K and V of the torch backend, and which part of them is a layer's."""

from collections.abc import Sequence

from attrs import frozen
from torch import Tensor

from kvtrio.backends.groups import LayerGroup


@frozen(eq=False)
class LayerCache:
    """K and V of one layer: views [num_blocks, block_size, kv_heads, dim] into its group's pool."""

    group: int
    keys: Tensor
    values: Tensor


@frozen(eq=False)
class Pool:
    """K and V of one group: [layers, num_blocks, block_size, kv_heads, dim]."""

    group: LayerGroup
    keys: Tensor
    values: Tensor


def layer_caches(pools: Sequence[object]) -> dict[int, LayerCache]:
    """Per index of a layer with attention, its part of its group's pool."""
    return {
        layer: LayerCache(i, pool.keys[place], pool.values[place])
        for i, pool in enumerate(pools)
        if isinstance(pool, Pool)
        for place, layer in enumerate(pool.group.layers)
    }
