"""RAM of the cuda backend: blocks one behind the other, so that each travels in one piece."""

import torch
from attrs import evolve
from torch import Tensor

from kvtrio.backends.torch_caches import Pool
from kvtrio.backends.torch_memory import AnyPool
from kvtrio.core.types import Tier


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
