"""What all stages of a model have in common: adapters, states put back, places as bytes."""

from collections.abc import Sequence

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from kvtrio.backends.base import BackendError, DeviceMemory
from kvtrio.backends.cuda_relief import Kept
from kvtrio.backends.cuda_stage import Stage
from kvtrio.backends.memory import require_room
from kvtrio.backends.torch_caches import Pool
from kvtrio.backends.torch_memory import available_memory, read_place, write_place
from kvtrio.backends.torch_states import StatePool
from kvtrio.core.batch import Chunk
from kvtrio.core.types import Tier
from kvtrio.model.adapter_pairs import adaptable
from kvtrio.model.adapters import AdapterData
from kvtrio.model.spec import ModelSpec


@define(eq=False)
class StagedAdapters:
    """All loaded adapters, each in parts on the devices whose layers it changes.

    Handles are the same on all of them. Where a device's memory was measured, what its adapters
    take never exceeds what the measure left for them.
    """

    _spec: ModelSpec
    _stages: Sequence[Stage]
    _memory: Sequence[DeviceMemory]
    """Of the same devices, or empty where nothing was measured."""
    _sizes: dict[int, tuple[int, ...]] = field(init=False, factory=dict)
    """By handle, bytes on each device."""

    def load(self, data: AdapterData) -> int:
        """See ``Backend.load_adapter``."""
        parts = [stage.loaded.share.own(data) for stage in self._stages]
        self._check(data, [part.num_bytes for part in parts])
        handle, is_short = 0, False
        for stage, part in zip(self._stages, parts, strict=True):
            stage.device.activate()
            handle, fits = _load(stage, evolve(part, targets={}) if is_short else part)
            is_short = is_short or not fits
        if is_short:
            self._forget(handle)
            raise BackendError("not enough memory for an adapter")
        self._sizes[handle] = tuple(part.num_bytes for part in parts)
        return handle

    def unload(self, handle: int) -> None:
        """Raises KeyError for an unknown handle."""
        del self._sizes[handle]
        self._forget(handle)

    def _forget(self, handle: int) -> None:
        for stage in self._stages:
            stage.loaded.adapters.unload(handle)

    def _check(self, data: AdapterData, sizes: Sequence[int]) -> None:
        shapes = adaptable(self._spec)
        for name, target in data.targets.items():
            if shapes.get(name) != (len(target.b), target.a.shape[1]):
                raise BackendError("the adapter is for another model")
        if not self._memory:
            require_room(data.num_bytes, available_memory(torch.device("cpu")))
        for i, memory in enumerate(self._memory):
            taken = sum(each[i] for each in self._sizes.values())
            require_room(sizes[i], memory.adapter_bytes - taken)


def _load(stage: Stage, data: AdapterData) -> tuple[int, bool]:
    """Its handle, and whether all of it is there; else nothing is, and the handle counts."""
    try:
        return stage.loaded.adapters.load(data), True
    except torch.OutOfMemoryError:
        pass
    stage.device.relieve()
    return stage.loaded.adapters.load(evolve(data, targets={})), False


@frozen(eq=False)
class StagedStates:
    """The states of recurrent layers that a step changes; ``cuda_relief.Memory``."""

    _stages: Sequence[Stage]

    @property
    def has_states(self) -> bool:
        return any(self._pools(stage) for stage in self._stages)

    def relieve(self) -> None:
        for stage in self._stages:
            stage.device.relieve()

    def keep(self, chunks: Sequence[Chunk]) -> Kept:
        kept = [
            (pool.states, slots, pool.states[slots])
            for stage in self._stages
            for group, pool in self._pools(stage)
            if len(slots := self._slots(chunks, group, pool.states))
        ]

        def put_back() -> None:
            for states, slots, values in kept:
                states[slots] = values

        return put_back

    def _pools(self, stage: Stage) -> list[tuple[int, StatePool]]:
        pools = stage.pools[Tier.DEVICE]
        return [
            (i, pool)
            for i, pool in enumerate(pools)
            if isinstance(pool, StatePool) and pool.group.layers
        ]

    def _slots(self, chunks: Sequence[Chunk], group: int, states: Tensor) -> Tensor:
        """Of those that have a state already."""
        slots = [chunk.block_tables[group][0] for chunk in chunks if chunk.start]
        return torch.tensor(slots, dtype=torch.int64).to(states.device)


def read_staged(stages: Sequence[Stage], where: tuple[int, int, Tier], num_tokens: int) -> bytes:
    """A place as one device with all layers would give it; ``where``: group, place, tier."""
    group, place, tier = where
    pools = [stage.pools[tier][group] for stage in stages]
    parts = [read_place(pool, place, num_tokens) for pool in pools]
    cuts = [_key_bytes(pool) for pool in pools]
    keys = (part[:cut] for part, cut in zip(parts, cuts, strict=True))
    values = (part[cut:] for part, cut in zip(parts, cuts, strict=True))
    return b"".join((*keys, *values))


def write_staged(stages: Sequence[Stage], where: tuple[int, int, Tier], part: bytes) -> None:
    """Fill a place with what ``read_staged`` gave."""
    group, place, tier = where
    pools = [stage.pools[tier][group] for stage in stages]
    cuts = [_key_bytes(pool) for pool in pools]
    key, value = 0, sum(cuts)
    for pool, cut in zip(pools, cuts, strict=True):
        rest = _value_bytes(pool)
        write_place(pool, place, part[key : key + cut] + part[value : value + rest])
        key, value = key + cut, value + rest


def _key_bytes(pool: Pool | StatePool) -> int:
    """Of what comes first in a place: keys, or the state."""
    if isinstance(pool, Pool):
        return pool.keys[:, 0].numel() * pool.keys.itemsize if len(pool.keys) else 0
    return pool.states[0].numel() * pool.states.itemsize


def _value_bytes(pool: Pool | StatePool) -> int:
    if isinstance(pool, Pool) and len(pool.values):
        return pool.values[:, 0].numel() * pool.values.itemsize
    return 0
