"""Memory of the cuda backend: a place that no request has, for rows that stand for none; and RAM
with blocks one behind the other, so that each travels in one piece."""

from collections.abc import Sequence

import torch
from attrs import evolve
from torch import Tensor

from kvtrio.backends.base import BackendInfo
from kvtrio.backends.torch_caches import Pool
from kvtrio.backends.torch_memory import AnyPool
from kvtrio.core.config import Group
from kvtrio.core.types import BlockId, Tier


def with_scratch(info: BackendInfo) -> BackendInfo:
    """For making pools: one place more in each on the device, the last."""
    return evolve(
        info,
        num_blocks=info.num_blocks + 1,
        num_window_blocks=info.num_window_blocks + 1,
        num_state_slots=info.num_state_slots + 1,
    )


def scratch_bytes(groups: Sequence[Group], block_size: int) -> int:
    """Of those places."""
    return sum(group.bytes_per_token * block_size + group.bytes_per_state for group in groups)


def scratch_places(pools: Sequence[AnyPool]) -> tuple[BlockId, ...]:
    """The last place of each; of pools that were made so."""
    sizes = (pool.keys.shape[1] if isinstance(pool, Pool) else len(pool.states) for pool in pools)
    return tuple(BlockId(size - 1) for size in sizes)


def travelling(
    pools: dict[Tier, tuple[AnyPool, ...]], device: torch.device
) -> dict[Tier, tuple[AnyPool, ...]]:
    """The same pools with RAM's in that order, pinned where there is a GPU; one arena stays."""
    if pools[Tier.HOST] is pools[Tier.DEVICE]:
        return pools
    is_pinned = device.type == "cuda"
    return {**pools, Tier.HOST: tuple(_turned(pool, is_pinned) for pool in pools[Tier.HOST])}


def _turned(pool: AnyPool, is_pinned: bool) -> AnyPool:
    if isinstance(pool, Pool):
        parts = (block_major(each, is_pinned) for each in (pool.keys, pool.values))
        return Pool(pool.group, *parts)
    return evolve(pool, states=pool.states.pin_memory()) if is_pinned else pool


def block_major(like: Tensor, is_pinned: bool = False) -> Tensor:
    """Zeros of a shape [layers, places, ...] and of a type, places first in memory."""
    layers, places, *rest = like.shape
    memory = torch.zeros((places, layers, *rest), dtype=like.dtype, pin_memory=is_pinned)
    return memory.transpose(0, 1)
