"""The compiled cache and attention over numpy arrays, and a float64 model of both."""

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from harness.kernel_calls import Floats, Kernels
from kvtrio.kernels import cpu_abi as abi

STRIP, GROUP = 16, 32
"""Places that are stored together; dimensions that share a scale."""


class KvType(IntEnum):
    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q8_0 = 8


@frozen(kw_only=True)
class Shape:
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    value_dim: int = 64
    block_size: int = 16
    key_type: KvType = KvType.F16
    value_type: KvType = KvType.F16
    is_latent: bool = False
    """A key's first ``value_dim`` numbers are the value."""


@frozen(kw_only=True)
class Scoring:
    scale: float = 0.2
    softcap: float = 0.0
    window: int = 0
    sinks: Floats | None = None


@frozen
class Rows:
    """Rows first .. end - 1 of a conversation, and where its blocks are."""

    first: int
    end: int
    blocks: NDArray[np.int32]


def aligned(num_bytes: int) -> NDArray[np.uint8]:
    """Bytes 255 (as floating-point numbers of every type: NaN), aligned to 64."""
    raw = np.full(num_bytes + 64, 255, np.uint8)
    return raw[-raw.ctypes.data % 64 :][:num_bytes]


@frozen(eq=False)
class NativeCache:
    """Blocks in the library's layout, at first full of what is no number."""

    kernels: Kernels
    shape: Shape
    num_blocks: int
    keys: NDArray[np.uint8] = field(init=False)
    values: NDArray[np.uint8] = field(init=False)

    def __attrs_post_init__(self) -> None:
        for name in ("key", "value"):
            size = self.kernels.call(f"kvt_{name}_block_bytes", self.struct(empty=True))
            object.__setattr__(self, f"{name}s", aligned(size * self.num_blocks))

    def struct(self, empty: bool = False) -> abi.Cache:
        names = ("key_type", "value_type", "block_size", "kv_heads", "head_dim", "value_dim")
        cache = abi.Cache(num_blocks=self.num_blocks, is_latent=self.shape.is_latent)
        for name in names:
            setattr(cache, name, getattr(self.shape, name))
        if not empty:
            cache.keys, cache.values = self.keys.ctypes.data, self.values.ctypes.data
        return cache

    def write(self, blocks: NDArray[np.int32], k: Floats, v: Floats, first: int = 0) -> None:
        """k [N, kv_heads, head_dim] and v of positions first ..."""
        size, cache = self.shape.block_size, self.struct()
        for i, (one_k, one_v) in enumerate(zip(k, v, strict=True)):
            block, place = divmod(first + i, size)
            self.kernels.call("kvt_cache_write", cache, int(blocks[block]), place, one_k, one_v)

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        self.kernels.call("kvt_cache_copy", self.struct(), source, target, num_tokens)

    def attend(self, q: Floats, rows: Sequence[Rows], scoring: Scoring) -> Floats:
        """q [N, heads, head_dim]: the rows one behind the other; returns [N, heads, value_dim]."""
        chunks = (abi.Chunk * len(rows))(*((part.first, part.end - part.first) for part in rows))
        blocks = np.concatenate([part.blocks for part in rows])
        tables = np.cumsum([0, *(len(part.blocks) for part in rows)]).astype(np.int64)
        attention = abi.Attention(num_heads=self.shape.heads, window=scoring.window)
        attention.scale, attention.softcap = scoring.scale, scoring.softcap
        out = np.full((len(q), self.shape.heads, self.shape.value_dim), np.nan, np.float32)
        self.kernels.call(
            "kvt_attend", self.kernels.team, self.struct(), attention, scoring.sinks, chunks,
            len(rows), blocks, tables, np.ascontiguousarray(q), out,
        )  # fmt: skip
        return out


# ---- the model


def rotate(x: Floats) -> Floats:
    """The normalised Hadamard transform of runs of the largest power of two in the last axis."""
    size = x.shape[-1] & -x.shape[-1]
    out, width = x.astype(np.float32), 1
    while width < size:
        pairs = out.reshape(-1, 2, width)
        out = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], 1).reshape(x.shape)
        width *= 2
    return out * (np.float32(1) / np.sqrt(np.float32(size)))


def quantise(kind: KvType, x: Floats) -> Floats:
    """GGUF's Q8_0 or Q4_0, and back, in groups of 32 along the last axis (a rest may be left)."""
    out = np.empty_like(x)
    for first in range(0, x.shape[-1], GROUP):
        part = x[..., first : first + GROUP]
        largest = np.abs(part).argmax(-1, keepdims=True)
        peak = np.take_along_axis(part, largest, -1)
        scale = np.abs(peak) / np.float32(127) if kind is KvType.Q8_0 else peak / np.float32(-8)
        scaled = part * np.where(scale == 0, 0, 1 / np.where(scale == 0, 1, scale))
        if kind is KvType.Q8_0:
            numbers = np.trunc(scaled + np.copysign(np.float32(0.5), scaled))
        else:
            numbers = np.minimum(np.trunc(scaled + np.float32(8.5)), 15) - 8
        out[..., first : first + GROUP] = numbers * scale.astype(np.float16).astype(np.float32)
    return out


def stored(kind: KvType, x: Floats) -> Floats:
    """What attention finds of x in the cache: x with the loss of the type."""
    if kind is KvType.F32:
        return x
    if kind is KvType.F16:
        return x.astype(np.float16).astype(np.float32)
    return rotate(quantise(kind, rotate(x)))


def naive(
    q: Floats, k: Floats, v: Floats, positions: NDArray[np.int64], scoring: Scoring
) -> NDArray[np.float64]:
    """softmax(cap(scale q k)) v per head in float64; k and v of positions 0 ..."""
    repeats = q.shape[1] // k.shape[1]
    keys, values = (np.repeat(x.astype(np.float64), repeats, 1) for x in (k, v))
    scores = np.einsum("nhd,khd->hnk", q.astype(np.float64), keys) * scoring.scale
    if scoring.softcap:
        scores = scoring.softcap * np.tanh(scores / scoring.softcap)
    age = positions[:, None] - np.arange(len(k))
    hidden = (age < 0) | ((age >= scoring.window) if scoring.window else False)
    scores = np.where(hidden, -np.inf, scores)
    sinks = np.full(q.shape[1], -np.inf) if scoring.sinks is None else scoring.sinks
    peak = np.maximum(scores.max(-1), sinks[:, None])
    weights = np.exp(scores - peak[..., None])
    total = weights.sum(-1) + np.exp(sinks[:, None] - peak)
    return np.einsum("hnk,khd->nhd", weights / total[..., None], values)
