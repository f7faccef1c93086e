"""Which layers of a model share a block table."""

from attrs import frozen

from kvtrio.backends.base import BackendSettings
from kvtrio.core.config import Group
from kvtrio.core.types import StateClass
from kvtrio.model.spec import LayerSpec, ModelSpec


@frozen
class LayerGroup:
    """Layers with the same state class, window and shape of K and V."""

    state_class: StateClass
    window: int | None
    num_kv_heads: int
    head_dim: int
    value_dim: int
    layers: tuple[int, ...]
    """Layer indices, ascending."""

    def values_per_token(self) -> int:
        """Numbers that one token leaves in all layers of the group."""
        return len(self.layers) * self.num_kv_heads * (self.head_dim + self.value_dim)


def layer_groups(spec: ModelSpec) -> tuple[LayerGroup, ...]:
    """The groups of a model, in order of their first layer."""
    members: dict[tuple[StateClass, int | None, int, int, int], list[int]] = {}
    for layer in spec.layers:
        members.setdefault(_shape(layer), []).append(layer.index)
    return tuple(LayerGroup(*shape, tuple(layers)) for shape, layers in members.items())


def core_groups(groups: tuple[LayerGroup, ...], bytes_per_value: int) -> tuple[Group, ...]:
    """The groups as the core knows them."""
    return tuple(
        Group(group.state_class, group.window, group.values_per_token() * bytes_per_value)
        for group in groups
    )


def host_blocks(groups: tuple[Group, ...], settings: BackendSettings) -> int:
    """Whole blocks, of all groups together, that fit into ``settings.host_bytes``."""
    block_bytes = sum(group.bytes_per_token for group in groups) * settings.block_size
    return settings.host_bytes // block_bytes


def _shape(layer: LayerSpec) -> tuple[StateClass, int | None, int, int, int]:
    spec = layer.attention
    return (layer.state_class, spec.window, spec.num_kv_heads, spec.head_dim, spec.value_dim)
