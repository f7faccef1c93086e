"""Memory of the torch backend: what it needs, what there is, and the KV pools."""

from pathlib import Path

import numpy as np
import torch
from attrs import frozen

from kvtrio.backends.base import BackendError, BackendInfo
from kvtrio.backends.groups import LayerGroup
from kvtrio.backends.torch_ops import Pool
from kvtrio.core.types import Tier

MIB = 1 << 20


def available_memory(device: torch.device) -> int | None:
    """Bytes that can be had on the device now; None where nobody says."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return meminfo_available(Path("/proc/meminfo")) if device.type == "cpu" else None


def meminfo_available(path: Path) -> int | None:
    """The kernel's estimate, in bytes; None where it gives none."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    fields = [line.split() for line in lines if line.startswith("MemAvailable:")]
    return int(fields[0][1]) * 1024 if fields else None


@frozen(kw_only=True)
class Needs:
    """Bytes that a backend wants to take."""

    weights: int
    """With what loading needs besides."""
    pools: int
    """For requests that run."""
    host: int
    """For the state of past requests, in RAM."""


def shrunk_host_bytes(needs: Needs, available: int | None) -> int:
    """At most half of what the rest leaves, so that the machine is not filled unasked."""
    if available is None:
        return needs.host
    left = max(0, available - needs.weights - needs.pools)
    return min(needs.host, left // 2)


def require_memory(needs: Needs, available: int | None) -> None:
    """Raise BackendError, with the sum, when not all fits; None: nobody knows."""
    needed = needs.weights + needs.pools + needs.host
    if available is not None and needed > available:
        raise BackendError(
            f"not enough memory: weights {_mib(needs.weights)} + KV pools {_mib(needs.pools)} + "
            f"--cache-ram {_mib(needs.host)} = {_mib(needed)}, available {_mib(available)}; a "
            "smaller context, fewer places, a smaller type or --cache-ram needs less"
        )


def require_room(num_bytes: int, available: int | None) -> None:
    """Raise BackendError when an adapter of that size does not fit beside what is there."""
    if available is not None and num_bytes > available:
        raise BackendError(
            f"not enough memory for an adapter of {_mib(num_bytes)}, available {_mib(available)}"
        )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.0f} MiB"


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
