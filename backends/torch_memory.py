"""Memory of the torch backend: what a device has, and the KV pools."""

import numpy as np
import torch

from kvtrio.backends.base import BackendInfo
from kvtrio.backends.groups import LayerGroup
from kvtrio.backends.memory import ram_available
from kvtrio.backends.torch_ops import Pool
from kvtrio.core.types import Tier


def available_memory(device: torch.device) -> int | None:
    """Bytes that can be had on the device now; None where nobody says."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return ram_available() if device.type == "cpu" else None


def make_arenas(
    groups: tuple[LayerGroup, ...], info: BackendInfo, dtype: torch.dtype, device: torch.device
) -> dict[Tier, tuple[Pool, ...]]:
    """Pools for both tiers: one set for both where the device is the host."""
    total, size = info.num_blocks + info.num_host_blocks, info.block_size
    if info.is_unified:
        return dict.fromkeys(Tier, make_pools(groups, total, size, dtype, device))
    return {
        Tier.DEVICE: make_pools(groups, info.num_blocks, size, dtype, device),
        Tier.HOST: make_pools(groups, info.num_host_blocks, size, dtype, torch.device("cpu")),
    }


def make_pools(
    groups: tuple[LayerGroup, ...],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Pool, ...]:
    """One pool per group, zeroed (a masked NaN would still spoil its row)."""
    pools = []
    for group in groups:
        shape = (len(group.layers), num_blocks, block_size, group.num_kv_heads)
        keys = _zeros((*shape, group.head_dim), dtype, device)
        values = _zeros((*shape, group.value_dim), dtype, device)
        pools.append(Pool(group, keys, values))
    return tuple(pools)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On the CPU from numpy, whose zeros are the system's untouched pages until written;
    ``torch.zeros`` would touch them all."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = np.uint32 if dtype.itemsize == 4 else np.uint16
    return torch.from_numpy(np.zeros(shape, size)).view(dtype)
