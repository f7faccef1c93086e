"""Memory of the torch backend: what a device has, and the pools of KV and states."""

from collections.abc import Callable
from functools import partial
from math import prod

import numpy as np
import torch

from kvtrio.backends import pages
from kvtrio.backends.base import BackendInfo
from kvtrio.backends.groups import LayerGroup
from kvtrio.backends.memory import ram_available
from kvtrio.backends.torch_caches import Pool
from kvtrio.backends.torch_states import StatePool
from kvtrio.core.batch import Copy
from kvtrio.core.types import Tier
from kvtrio.kernels.reference import copy_places

AnyPool = Pool | StatePool


def available_memory(device: torch.device) -> int | None:
    """Bytes that can be had on the device now; None where nobody says."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return ram_available() if device.type == "cpu" else None


def make_arenas(
    groups: tuple[LayerGroup, ...], info: BackendInfo, dtype: torch.dtype, device: torch.device
) -> dict[Tier, tuple[AnyPool, ...]]:
    """Pools for both tiers: one set for both where the device is the host."""
    places = [info.places(i) for i in range(len(groups))]
    if info.is_unified:
        together = [sum(both) for both in places]
        shared = _pools(groups, together, info, dtype, device)
        return dict.fromkeys(Tier, shared)
    own, host = ([each[i] for each in places] for i in range(2))
    return {
        Tier.DEVICE: _pools(groups, own, info, dtype, device),
        Tier.HOST: _pools(groups, host, info, dtype, torch.device("cpu")),
    }


def _pools(
    groups: tuple[LayerGroup, ...],
    places: list[int],
    info: BackendInfo,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[AnyPool, ...]:
    """One pool per group, zeroed (a masked NaN would still spoil its row)."""
    zeros = _paged if info.ram is not None and device.type == "cpu" else _zeros
    return tuple(
        _pool(group, (count, info.block_size), partial(zeros, device=device), dtype)
        for group, count in zip(groups, places, strict=True)
    )


def run_copy(sources: tuple[AnyPool, ...], targets: tuple[AnyPool, ...], copy: Copy) -> None:
    """Copy a part of a block, or a state; ``sources`` and ``targets`` of the copy's two tiers."""
    source, target = sources[copy.group], targets[copy.group]
    if isinstance(source, StatePool) and isinstance(target, StatePool):
        target.states[copy.target] = source.states[copy.source]
        return
    assert isinstance(source, Pool)
    assert isinstance(target, Pool)
    for theirs, mine in ((source.keys, target.keys), (source.values, target.values)):
        copy_places(theirs[:, copy.source], mine[:, copy.target], copy.num_tokens)


def read_place(pool: AnyPool, place: int, num_tokens: int) -> bytes:
    """Bytes of a slot, or of a block's keys and then values, zero behind its first tokens."""
    if isinstance(pool, StatePool):
        return _bytes_of(pool.states[place])
    parts = pool.keys[:, place].clone(), pool.values[:, place].clone()
    for part in parts:
        part[:, num_tokens:] = 0
    return b"".join(map(_bytes_of, parts))


def write_place(pool: AnyPool, place: int, part: bytes) -> None:
    """Fill a place with what ``read_place`` gave."""
    if isinstance(pool, Pool):
        targets = [pool.keys[:, place], pool.values[:, place]]
    else:
        targets = [pool.states[place]]
    start = 0
    for target in targets:
        end = start + target.numel() * target.itemsize
        if end > start:  # a group without values has none
            raw = torch.frombuffer(bytearray(part[start:end]), dtype=target.dtype)
            target.copy_(raw.view(target.shape))
        start = end
    assert start == len(part), "a part has its group's size"


def _bytes_of(tensor: torch.Tensor) -> bytes:
    if not tensor.numel():  # torch has no view of it as bytes
        return b""
    return tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes()


def _pool(
    group: LayerGroup,
    shape: tuple[int, int],
    zeros: Callable[..., torch.Tensor],
    dtype: torch.dtype,
) -> AnyPool:
    """``shape``: blocks, or slots, and tokens of a block."""
    num_layers = len(group.layers)
    if group.state is not None:
        values = (shape[0], num_layers, group.state.num_values)
        return StatePool(group, zeros(values, torch.float32))
    places = (num_layers, *shape, group.num_kv_heads)
    keys = zeros((*places, group.head_dim), dtype)
    return Pool(group, keys, zeros((*places, group.value_dim), dtype))


def places_are_pages(groups: tuple[LayerGroup, ...], block_size: int, dtype: torch.dtype) -> bool:
    """Whether the memory of a block, and of a slot, can be given back alone."""
    sizes = [group.bytes_per_state() for group in groups]
    for group in groups:
        for dim in (group.head_dim, group.value_dim):
            sizes.append(block_size * group.num_kv_heads * dim * dtype.itemsize)
    return pages.can_give_back(sizes)


def give_back_place(pool: AnyPool, place: int) -> None:
    """See ``moves.Places.give_back``; on the CPU."""
    if isinstance(pool, StatePool):
        pieces = [pool.states[place]]
    else:
        pieces = [*pool.keys[:, place], *pool.values[:, place]]
    for piece in pieces:
        pages.give_back(piece.data_ptr(), piece.numel() * piece.itemsize)


def _paged(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On the CPU, in small pages that can be given back."""
    raw = pages.zeros(prod(shape) * dtype.itemsize)
    return torch.from_numpy(raw).view(dtype).view(shape)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On the CPU from numpy, whose zeros are the system's untouched pages until written;
    ``torch.zeros`` would touch them all."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = np.uint32 if dtype.itemsize == 4 else np.uint16
    return torch.from_numpy(np.zeros(shape, size)).view(dtype)
