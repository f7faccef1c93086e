"""Memory on the device through which blocks travel between the tiers."""

from collections.abc import Iterator, Sequence
from itertools import cycle
from math import prod

import torch
from attrs import define, frozen
from torch import Tensor

from kvtrio.backends.torch_caches import Pool
from kvtrio.backends.torch_memory import AnyPool
from kvtrio.core.config import Group

TURN_BYTES = 16 << 20
"""Of one turn, or what the largest place has in one tensor. So much takes half a millisecond on a
bus of 25 to 60 GB/s; launching its copies takes microseconds."""
NUM_TURNS = 2
"""Each way: one is filled while the other is emptied."""


@define(eq=False)
class Turn:
    """Memory for some places, until its owner has emptied it."""

    _memory: Tensor
    """uint8 [bytes]."""
    emptied: object | None = None
    """The mark behind which it is free; None: it was never used."""

    def view(self, like: Tensor, num_places: int) -> Tensor:
        """[layers, ``num_places``, tokens, ...], places one behind the other as in RAM: a whole one
        travels in one piece. ``like`` [layers, places, tokens, ...]."""
        layers, _, *rest = like.shape
        size = num_places * place_bytes(like)
        flat = self._memory[:size].view(like.dtype)
        return flat.view(num_places, layers, *rest).transpose(0, 1)


@frozen(eq=False)
class Staging:
    """Turns each way; ``leaving`` and ``returning`` give the next one."""

    _turn_bytes: int
    _leaving: Iterator[Turn]
    _returning: Iterator[Turn]

    @classmethod
    def of(cls, pools: tuple[AnyPool, ...], device: torch.device) -> "Staging":
        """For the places of ``pools``."""
        size = turn_bytes(pools)
        ways = (
            cycle(
                tuple(
                    Turn(torch.empty(size, dtype=torch.uint8, device=device))
                    for _ in range(NUM_TURNS)
                )
            )
            for _ in range(2)
        )
        return cls(size, *ways)

    def capacity(self, like: Tensor) -> int:
        """Places of a tensor that fit into a turn."""
        return self._turn_bytes // place_bytes(like)

    def leaving(self) -> Turn:
        return next(self._leaving)

    def returning(self) -> Turn:
        return next(self._returning)


def turn_bytes(pools: tuple[AnyPool, ...]) -> int:
    """Of one turn."""
    largest = max((place_bytes(t) for pool in pools for t in tensors_of(pool)), default=0)
    return max(TURN_BYTES, largest)


def tensors_of(pool: AnyPool) -> tuple[Tensor, ...]:
    """All that a place of a pool has, as [layers, places, tokens, ...]; a state is one token."""
    if isinstance(pool, Pool):
        found: tuple[Tensor, ...] = (pool.keys, pool.values)
    else:
        found = (pool.states.flatten(1)[None, :, None],)
    return tuple(tensor for tensor in found if place_bytes(tensor))


def place_bytes(tensor: Tensor) -> int:
    """Of one place in all layers. ``tensor`` [layers, places, ...]."""
    layers, _, *rest = tensor.shape
    return layers * prod(rest) * tensor.itemsize


def moves_bytes(groups: Sequence[Group], block_size: int) -> int:
    """Of all turns, at most; ``groups`` with the device's bytes."""
    largest = max(group.part_bytes(block_size) for group in groups)
    return 2 * NUM_TURNS * max(TURN_BYTES, largest)
