"""Memory of the cuda backend: a place that no request has, for rows that stand for none; and RAM
with blocks one behind the other, so that each travels in one piece."""

import mmap
from collections.abc import Sequence
from math import prod
from weakref import finalize

import numpy as np
import torch
from attrs import evolve
from numpy.typing import NDArray
from torch import Tensor

from kvtrio.backends.base import BackendError, BackendInfo
from kvtrio.backends.torch_caches import Pool
from kvtrio.backends.torch_memory import AnyPool
from kvtrio.core.config import Group
from kvtrio.core.types import BlockId, Tier

CANNOT_PIN = "the GPU cannot be given so much RAM for --cache-ram; a smaller one needs less"
FOR_ALL_DEVICES = 1
"""cudaHostRegisterPortable."""


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
    if not is_pinned:
        return pool
    return evolve(pool, states=zeros_in_ram(pool.states.shape, pool.states.dtype, True))


def block_major(like: Tensor, is_pinned: bool = False) -> Tensor:
    """Zeros of a shape [layers, places, ...] and of a type, places first in memory."""
    layers, places, *rest = like.shape
    return zeros_in_ram((places, layers, *rest), like.dtype, is_pinned).transpose(0, 1)


def zeros_in_ram(shape: Sequence[int], dtype: torch.dtype, is_pinned: bool) -> Tensor:
    """Untouched pages of its own; where asked, the GPU reads and writes them by itself.

    Raises BackendError where the driver does not take so much.
    """
    num_bytes = prod(shape) * dtype.itemsize
    pages = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = np.frombuffer(pages, np.uint8, num_bytes)
    if is_pinned and num_bytes:
        _pin(memory)
    return torch.from_numpy(memory).view(dtype).view(tuple(shape))


def _pin(memory: NDArray[np.uint8]) -> None:
    """Until it is given back. Pinned memory of torch's own takes the next power of two bytes, which
    may be twice what was asked for."""
    # torch has no annotations for reaching the runtime.
    runtime, address = torch.cuda.cudart(), memory.ctypes.data  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(address, memory.nbytes, FOR_ALL_DEVICES)):
        raise BackendError(CANNOT_PIN)
    finalize(memory, runtime.cudaHostUnregister, address).atexit = False
