"""Memory of the cpu backend for what a model keeps of requests: how large, and where it lies."""

from collections.abc import Mapping

from attrs import evolve, field, frozen

from kvtrio.backends import pages
from kvtrio.backends.base import BackendError, BackendInfo, BackendSettings
from kvtrio.backends.cpu_native import Native, aligned
from kvtrio.backends.cpu_recurrent import state_bytes
from kvtrio.backends.groups import LayerGroup, state_class
from kvtrio.core.config import Group
from kvtrio.kernels import cpu_abi as abi
from kvtrio.model.spec import (
    AttentionSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LatentAttentionSpec,
    LayerSpec,
    ModelSpec,
)

CACHE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8}
"""ggml's numbers."""
PLACES = 16
"""A block is a whole number of so many tokens."""


@frozen
class GroupSize:
    """Bytes of one layer of a group: of a block, or of a slot."""

    keys: int = 0
    values: int = 0
    state: int = 0
    num_latent: int = 0
    """Of a key's numbers so many are the value; 0: values are kept, too."""


@frozen(eq=False)
class Stores:
    """Where K and V, or states, of each layer lie, by its index."""

    caches: Mapping[int, abi.Cache] = field(factory=dict)
    states: Mapping[int, abi.State] = field(factory=dict)
    state_bytes: Mapping[int, int] = field(factory=dict)
    """What a slot holds; it may have more, to be whole pages."""


def group_sizes(
    native: Native, spec: ModelSpec, groups: tuple[LayerGroup, ...], settings: BackendSettings
) -> tuple[GroupSize, ...]:
    """Per group. Raises BackendError for types or sizes that the kernels do not have."""
    if settings.block_size % PLACES:
        raise BackendError(f"--block-size {settings.block_size}: not a multiple of {PLACES}")
    return tuple(_group_size(native, spec, group, settings) for group in groups)


def places_are_pages(sizes: tuple[GroupSize, ...]) -> bool:
    """Whether the memory of each block can be given back alone; that of slots can be made so."""
    return pages.can_give_back(n for size in sizes for n in (size.keys, size.values))


def paged(sizes: tuple[GroupSize, ...]) -> tuple[GroupSize, ...]:
    """With slots that are whole pages."""
    return tuple(evolve(size, state=pages.whole(size.state)) for size in sizes)


def rounding(info: BackendInfo) -> int:
    """Bytes for whole pages, of the device's slots, where the memory of each can be given back."""
    if info.ram is None:
        return 0
    kept = sum(group.bytes_per_state for group in info.groups)
    return info.num_state_slots * (info.ram.state_bytes - kept)


def _group_size(
    native: Native, spec: ModelSpec, group: LayerGroup, settings: BackendSettings
) -> GroupSize:
    mixer = spec.layers[group.layers[0]].mixer
    if not isinstance(mixer, AttentionSpec | LatentAttentionSpec):
        return GroupSize(state=state_bytes(native, mixer))
    num_latent = mixer.latent_dim if isinstance(mixer, LatentAttentionSpec) else 0
    cache = _cache(group, num_latent, settings)
    keys, values = (
        int(function(cache))
        for function in (native.cdll.kvt_key_block_bytes, native.cdll.kvt_value_block_bytes)
    )
    if keys < 0 or values < 0:
        name = settings.key_type if keys < 0 else settings.value_type
        size = group.head_dim if keys < 0 else group.value_dim
        raise BackendError(f"a KV cache of type {name} does not go with heads of {size} values")
    return GroupSize(keys, values, num_latent=num_latent)


def _cache(group: LayerGroup, num_latent: int, settings: BackendSettings) -> abi.Cache:
    for name in (settings.key_type, settings.value_type):
        if name not in CACHE_TYPES:
            raise BackendError(f"unknown cache type; known are {', '.join(CACHE_TYPES)}")
    return abi.Cache(
        key_type=CACHE_TYPES[settings.key_type],
        value_type=CACHE_TYPES[settings.value_type],
        block_size=settings.block_size,
        kv_heads=group.num_kv_heads,
        head_dim=group.head_dim,
        value_dim=num_latent or group.value_dim,
        is_latent=num_latent > 0,
    )


def core_groups(
    groups: tuple[LayerGroup, ...], sizes: tuple[GroupSize, ...], settings: BackendSettings
) -> tuple[Group, ...]:
    """The groups as the core knows them; bytes are rounded up to whole ones per token."""
    return tuple(
        Group(
            state_class(group, settings.max_context),
            group.window,
            -(-len(group.layers) * (size.keys + size.values) // settings.block_size),
            bytes_per_state=len(group.layers) * size.state,
            bytes_per_block=len(group.layers) * (size.keys + size.values),
        )
        for group, size in zip(groups, sizes, strict=True)
    )


def make_stores(
    native: Native,
    groups: tuple[LayerGroup, ...],
    sizes: tuple[GroupSize, ...],
    settings: BackendSettings,
    info: BackendInfo,
) -> Stores:
    """Memory for all blocks and slots of ``info``: zeroed, and untouched until written.

    Raises BackendError where there is no memory.
    """
    caches: dict[int, abi.Cache] = {}
    states: dict[int, abi.State] = {}
    kept = {
        layer: size.state
        for size, group in zip(sizes, groups, strict=True)
        for layer in group.layers
    }
    if info.ram is not None:
        sizes = paged(sizes)
    for index, (group, size) in enumerate(zip(groups, sizes, strict=True)):
        count = sum(info.places(index))
        if size.state:
            states |= _states(native, group.layers, abi.State(
                stride=size.state // 4, num_slots=count, group=index
            ))  # fmt: skip
        else:
            cache = _cache(group, size.num_latent, settings)
            cache.group, cache.num_blocks = index, count
            caches |= _caches(native, group.layers, size, cache)
    stores = Stores(caches, states, kept)
    if info.ram is not None:
        _keep_pages_small(sizes, stores)
    return stores


def _keep_pages_small(sizes: tuple[GroupSize, ...], stores: Stores) -> None:
    """So that each place has its own; see ``pages``."""
    for cache in stores.caches.values():
        size = sizes[cache.group]
        pages.keep_small(cache.keys, size.keys * cache.num_blocks)
        pages.keep_small(cache.values, size.values * cache.num_blocks)
    for state in stores.states.values():
        pages.keep_small(state.data, sizes[state.group].state * state.num_slots)


def _caches(
    native: Native, layers: tuple[int, ...], size: GroupSize, like: abi.Cache
) -> dict[int, abi.Cache]:
    """Per layer, K and V; all else as in ``like``."""
    key_bytes = aligned(size.keys * like.num_blocks)
    value_bytes = aligned(size.values * like.num_blocks)
    address = native.allocate(len(layers) * (key_bytes + value_bytes))
    caches = {}
    for layer in layers:
        caches[layer] = cache = abi.Cache.from_buffer_copy(like)
        cache.keys, cache.values = address, address + key_bytes
        address += key_bytes + value_bytes
    return caches


def _states(native: Native, layers: tuple[int, ...], like: abi.State) -> dict[int, abi.State]:
    num_bytes = 4 * like.stride * like.num_slots
    address = native.allocate(len(layers) * num_bytes)
    states = {}
    for layer in layers:
        states[layer] = state = abi.State.from_buffer_copy(like)
        state.data = address
        address += num_bytes
    return states


def activation_bytes(spec: ModelSpec, settings: BackendSettings) -> int:
    """What a step of ``max_rows`` rows needs for its activations, float32, and its logits."""
    widths = (_width(layer, spec.hidden_size) for layer in spec.layers)
    per_row = 2 * spec.hidden_size + max(widths, default=0)
    return 4 * (settings.max_rows * per_row + settings.max_sampled * spec.vocab_size)


def _width(layer: LayerSpec, hidden: int) -> int:
    """Values of a row within a layer, nearly."""
    mixer = layer.mixer
    if isinstance(mixer, LatentAttentionSpec):
        own = mixer.num_heads * (mixer.query_dim + mixer.key_dim + mixer.latent_dim)
    elif isinstance(mixer, AttentionSpec):
        own = mixer.num_heads * (mixer.head_dim + mixer.value_dim) * (2 if mixer.gated else 1)
    else:
        own = 3 * mixer.conv.channels
    match layer.feed_forward:
        case FeedForwardSpec() as dense:
            return own + dense.size
        case ExpertsSpec() as experts:
            shared = experts.shared.size if experts.shared else 0
            return own + shared + experts.num_used * (hidden + 2 * experts.size)
        case None:
            return own
