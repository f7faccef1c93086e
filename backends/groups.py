"""Which layers of a model share a block table, or a slot for their state."""

from math import prod
from typing import assert_never

from attrs import evolve, frozen

from kvtrio.backends.base import BackendError, BackendInfo, BackendSettings
from kvtrio.core.config import Group, RamBudget, widest_window, window_blocks
from kvtrio.core.types import StateClass
from kvtrio.model.spec import (
    AttentionSpec,
    DeltaNetSpec,
    LatentAttentionSpec,
    LayerSpec,
    Mamba2Spec,
    ModelSpec,
    RecurrentSpec,
    ShortConvSpec,
)

STATE_BYTES = 4
"""Of one value of a state: float32 whatever the cache's type is."""
LEAST_TOKENS_PER_SLOT = 64
"""Of blocks in RAM: checkpoints closer together than that are of little use."""
NODE_TOKENS_PER_SLOT = 512
"""The same where no layer has K and V and a block is only a node of the index."""
PARTS_SHARE = 3
"""Of the blocks in RAM one in so many has its part in groups with a sliding window: a conversation
needs the parts of its last window, and where later turns may part from it."""
NODE_BYTES = 1536
"""Of such a block of 16 tokens, in Python."""


@frozen(kw_only=True)
class HostSizes:
    """What RAM holds of each kind of state."""

    num_blocks: int
    num_parts: int
    num_slots: int
    ram: RamBudget | None = None
    """What all kinds share; None: each has its share."""


@frozen
class StateShape:
    """What one recurrent layer keeps per request: the rows before, and a matrix per head."""

    history: tuple[int, int]
    """Rows, channels."""
    matrices: tuple[int, int, int]
    """Heads, rows, columns; without any, 0 heads."""

    @property
    def num_history_values(self) -> int:
        return prod(self.history)

    @property
    def num_values(self) -> int:
        """The history comes first."""
        return prod(self.history) + prod(self.matrices)


@frozen
class LayerGroup:
    """Layers with the same state class, window and shape of K and V, or of their state."""

    state_class: StateClass
    window: int | None
    num_kv_heads: int
    head_dim: int
    value_dim: int
    layers: tuple[int, ...]
    """Layer indices, ascending."""
    state: StateShape | None = None
    """Of recurrent layers, which have no K and V: their other sizes are 0."""

    def values_per_token(self) -> int:
        """Numbers that one token leaves in all layers of the group."""
        return len(self.layers) * self.num_kv_heads * (self.head_dim + self.value_dim)

    def bytes_per_state(self) -> int:
        """Of one slot: the state of all layers of the group; 0 where there is none."""
        return len(self.layers) * self.state.num_values * STATE_BYTES if self.state else 0


def layer_groups(spec: ModelSpec) -> tuple[LayerGroup, ...]:
    """The groups of a model, in order of their first layer."""
    members: dict[LayerGroup, list[int]] = {}
    for layer in spec.layers:
        members.setdefault(_shape(layer), []).append(layer.index)
    return tuple(evolve(group, layers=tuple(layers)) for group, layers in members.items())


def state_class(group: LayerGroup, max_context: int) -> StateClass:
    """A window that is not smaller than the longest request is none."""
    is_wide = group.window is not None and group.window >= max_context
    return StateClass.TOKEN if is_wide else group.state_class


def core_groups(
    groups: tuple[LayerGroup, ...], bytes_per_value: int, max_context: int
) -> tuple[Group, ...]:
    """The groups as the core knows them."""
    return tuple(
        Group(
            state_class(group, max_context),
            group.window,
            group.values_per_token() * bytes_per_value,
            group.bytes_per_state(),
        )
        for group in groups
    )


def host_sizes(
    groups: tuple[Group, ...], settings: BackendSettings, ram: RamBudget | None
) -> HostSizes:
    """As much as fits into the budget, or, without one, into each kind's share. Raises BackendError
    as ``with_slots``."""
    fixed = with_slots(groups, settings)
    if ram is not None:
        return HostSizes(
            num_blocks=ram.most(ram.block_bytes),
            num_parts=ram.most(ram.part_bytes),
            num_slots=ram.most(ram.state_bytes),
            ram=ram,
        )
    num_blocks, num_parts = host_blocks(groups, fixed)
    num_slots = fixed.num_host_state_slots or 0
    return HostSizes(num_blocks=num_blocks, num_parts=num_parts, num_slots=num_slots)


def ram_budget(groups: tuple[Group, ...], settings: BackendSettings) -> RamBudget | None:
    """Of ``settings.host_bytes``, where the memory of each block and slot can be given back; None
    where but one kind of state takes memory, or the settings say how many slots."""
    sizes = dict.fromkeys(StateClass, 0)
    for group in groups:
        sizes[group.state_class] += group.part_bytes(settings.block_size)
    is_told = settings.num_host_state_slots is not None and sizes[StateClass.POINT]
    if is_told or not settings.host_bytes or sum(map(bool, sizes.values())) < 2:
        return None
    return RamBudget(
        num_bytes=settings.host_bytes,
        block_bytes=sizes[StateClass.TOKEN] or NODE_BYTES,
        part_bytes=sizes[StateClass.WINDOW],
        state_bytes=sizes[StateClass.POINT],
    )


def device_slots(groups: tuple[Group, ...], settings: BackendSettings) -> int:
    """Per group of recurrent layers, on the device; none where nothing needs them."""
    return settings.num_state_slots if any(group.bytes_per_state for group in groups) else 0


def with_slots(groups: tuple[Group, ...], settings: BackendSettings) -> BackendSettings:
    """The settings with the number of slots in RAM, and ``host_bytes`` less what those take.

    Half of ``host_bytes`` is for slots, or less where they would outnumber what blocks can have
    use for; without K and V nearly all. No slots at all where nothing needs them. Raises
    BackendError where something does and the device has none.
    """
    state_bytes = sum(group.bytes_per_state for group in groups)
    if not state_bytes:
        return evolve(settings, num_state_slots=0, num_host_state_slots=0)
    if not settings.num_state_slots:
        raise BackendError("this model has recurrent layers, and there is no slot for their state")
    if settings.num_host_state_slots is not None:
        return settings
    token_bytes, host_bytes = sum(group.bytes_per_token for group in groups), settings.host_bytes
    if token_bytes:
        most = host_bytes // (state_bytes + LEAST_TOKENS_PER_SLOT * token_bytes)
        num_slots = min(host_bytes // 2 // state_bytes, most)
    else:
        nodes_bytes = NODE_TOKENS_PER_SLOT // settings.block_size * NODE_BYTES
        num_slots = host_bytes // (state_bytes + nodes_bytes)
    rest = host_bytes - num_slots * state_bytes
    return evolve(settings, num_host_state_slots=num_slots, host_bytes=rest)


def host_blocks(groups: tuple[Group, ...], settings: BackendSettings) -> tuple[int, int]:
    """Whole blocks, and parts of blocks in groups with a sliding window, that fit into
    ``settings.host_bytes``; where no layer has K and V, nodes of the index for the slots in RAM."""
    size, host_bytes = settings.block_size, settings.host_bytes
    block_bytes = size * sum(g.bytes_per_token for g in groups if g.state_class is StateClass.TOKEN)
    part_bytes = size * sum(g.bytes_per_token for g in groups if g.state_class is StateClass.WINDOW)
    if block_bytes:
        num_blocks = PARTS_SHARE * host_bytes // (PARTS_SHARE * block_bytes + part_bytes)
        return num_blocks, num_blocks // PARTS_SHARE if part_bytes else 0
    if part_bytes:
        num_parts = host_bytes // (part_bytes + PARTS_SHARE * NODE_BYTES)
        return PARTS_SHARE * num_parts, num_parts
    return (settings.num_host_state_slots or 0) * (NODE_TOKENS_PER_SLOT // size), 0


def device_parts(groups: tuple[Group, ...], settings: BackendSettings) -> int:
    """Blocks per group with a sliding window, on the device."""
    return window_blocks(
        widest_window(groups),
        settings.block_size,
        settings.max_sampled,
        settings.max_rows,
        settings.num_blocks,
    )


def pool_bytes(info: BackendInfo) -> int:
    """Of all blocks and slots, in both memories."""
    device, host = (
        sum(
            info.places(i)[memory]
            * (group.bytes_per_token * info.block_size + group.bytes_per_state)
            for i, group in enumerate(info.groups)
        )
        for memory in range(2)
    )
    return device + (info.ram.num_bytes if info.ram else host)


def _shape(layer: LayerSpec) -> LayerGroup:
    """A group without layers."""
    spec = layer.mixer
    if isinstance(spec, AttentionSpec):
        sizes = (spec.num_kv_heads, spec.head_dim, spec.value_dim)
        return LayerGroup(layer.state_class, spec.window, *sizes, ())
    if isinstance(spec, LatentAttentionSpec):
        # A token's row is key and value at once, and kept as key.
        return LayerGroup(layer.state_class, None, 1, spec.key_dim, 0, ())
    return LayerGroup(layer.state_class, None, 0, 0, 0, (), state_shape(spec))


def state_shape(spec: RecurrentSpec) -> StateShape:
    """What a layer of that kind keeps."""
    history = (spec.conv.width - 1, spec.conv.channels)
    match spec:
        case ShortConvSpec():
            return StateShape(history, (0, 0, 0))
        case DeltaNetSpec():
            return StateShape(history, (spec.num_value_heads, spec.key_dim, spec.value_dim))
        case Mamba2Spec():
            return StateShape(history, (spec.num_heads, spec.head_dim, spec.state_size))
        case _:
            assert_never(spec)
