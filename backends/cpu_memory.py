"""KV memory of the cpu backend: how large a block is, and where each layer's lie."""

from collections.abc import Sequence

from attrs import frozen

from kvtrio.backends.base import BackendError, BackendSettings
from kvtrio.backends.cpu_native import Native, aligned
from kvtrio.backends.groups import LayerGroup, state_class
from kvtrio.core.config import Group
from kvtrio.kernels import cpu_abi as abi
from kvtrio.model.spec import FeedForwardSpec, ModelSpec

CACHE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8}
"""ggml's numbers."""
PLACES = 16
"""A block is a whole number of so many tokens."""


@frozen
class BlockSize:
    """Bytes of one block of one layer of a group."""

    keys: int
    values: int


def block_sizes(
    native: Native, groups: tuple[LayerGroup, ...], settings: BackendSettings
) -> tuple[BlockSize, ...]:
    """Per group. Raises BackendError for types or sizes that the kernels do not have."""
    if settings.block_size % PLACES:
        raise BackendError(f"--block-size {settings.block_size}: not a multiple of {PLACES}")
    return tuple(_block_size(native, group, settings) for group in groups)


def _block_size(native: Native, group: LayerGroup, settings: BackendSettings) -> BlockSize:
    cache = _cache(group, 0, settings)
    keys, values = (
        int(function(cache))
        for function in (native.cdll.kvt_key_block_bytes, native.cdll.kvt_value_block_bytes)
    )
    if keys < 0 or values < 0:
        name = settings.key_type if keys < 0 else settings.value_type
        size = group.head_dim if keys < 0 else group.value_dim
        raise BackendError(f"a KV cache of type {name} does not go with heads of {size} values")
    return BlockSize(keys, values)


def _cache(group: LayerGroup, index: int, settings: BackendSettings) -> abi.Cache:
    for name in (settings.key_type, settings.value_type):
        if name not in CACHE_TYPES:
            raise BackendError(f"unknown cache type; known are {', '.join(CACHE_TYPES)}")
    return abi.Cache(
        key_type=CACHE_TYPES[settings.key_type],
        value_type=CACHE_TYPES[settings.value_type],
        block_size=settings.block_size,
        kv_heads=group.num_kv_heads,
        head_dim=group.head_dim,
        value_dim=group.value_dim,
        group=index,
    )


def core_groups(
    groups: tuple[LayerGroup, ...], sizes: tuple[BlockSize, ...], settings: BackendSettings
) -> tuple[Group, ...]:
    """The groups as the core knows them; bytes are rounded up to whole ones per token."""
    return tuple(
        Group(
            state_class(group, settings.max_context),
            group.window,
            -(-len(group.layers) * (size.keys + size.values) // settings.block_size),
            bytes_per_block=len(group.layers) * (size.keys + size.values),
        )
        for group, size in zip(groups, sizes, strict=True)
    )


def pool_bytes(
    groups: tuple[LayerGroup, ...], sizes: tuple[BlockSize, ...], num_blocks: Sequence[int]
) -> int:
    """Of all layers, with so many blocks in each group."""
    return sum(
        count * len(group.layers) * (size.keys + size.values)
        for group, size, count in zip(groups, sizes, num_blocks, strict=True)
    )


def make_caches(
    native: Native,
    groups: tuple[LayerGroup, ...],
    settings: BackendSettings,
    num_blocks: Sequence[int],
) -> list[abi.Cache]:
    """Per layer index, K and V of its group's ``num_blocks``: zeroed, and untouched until written.

    Raises BackendError where there is no memory.
    """
    caches: dict[int, abi.Cache] = {}
    for index, group in enumerate(groups):
        size, count = _block_size(native, group, settings), num_blocks[index]
        key_bytes, value_bytes = aligned(size.keys * count), aligned(size.values * count)
        address = native.allocate(len(group.layers) * (key_bytes + value_bytes))
        for layer in group.layers:
            cache = _cache(group, index, settings)
            cache.num_blocks = count
            cache.keys, cache.values = address, address + key_bytes
            address += key_bytes + value_bytes
            caches[layer] = cache
    return [caches[layer] for layer in sorted(caches)]


def activation_bytes(spec: ModelSpec, settings: BackendSettings) -> int:
    """What a step of ``max_rows`` rows needs for its activations, float32, and its logits."""
    widths = [
        layer.attention.num_heads * (layer.attention.head_dim + layer.attention.value_dim)
        + layer.feed_forward.size
        for layer in spec.layers
        if isinstance(layer.feed_forward, FeedForwardSpec)
    ]
    per_row = 2 * spec.hidden_size + max(widths, default=0)
    return 4 * (settings.max_rows * per_row + settings.max_sampled * spec.vocab_size)
