"""Launches of every Triton kernel at the shapes of real models: an 8B one, mostly."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kvtrio.kernels.triton_adapters import PartTable, Tiles, WeightTable, add_adapters
from kvtrio.kernels.triton_attention import Queries, Shape, attend
from kvtrio.kernels.triton_blocks import Pairs, Places, copy_parts
from kvtrio.kernels.triton_experts import Experts, Stack, apply_experts
from kvtrio.kernels.triton_latent import LatentShape, attend_latent
from kvtrio.kernels.triton_mamba2 import SpaceShape, state_space
from kvtrio.kernels.triton_matmul import FEW_ROWS, multiply, take_rows
from kvtrio.kernels.triton_pack import KINDS, Packed
from kvtrio.kernels.triton_qkv import QkvRows, QkvShape, write_qkv
from kvtrio.kernels.triton_recurrent import DeltaShape, Runs, causal_conv, delta_rule
from kvtrio.kernels.triton_rows import Act, add_norm, gated

BF16, F32 = torch.bfloat16, torch.float32
HIDDEN, INNER, HEADS, KV, DIM = 4096, 14336, 32, 8, 128


def values(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Of that shape, without memory: nothing reads them."""
    return torch.empty(shape, dtype=dtype, device="meta")


def packed(name: str, rows: int = HIDDEN, cols: int = HIDDEN) -> Packed:
    """A matrix of that type."""
    kind = KINDS[name]

    def each(per: int, dtype: torch.dtype) -> Tensor:
        return values(rows, cols // per, dtype=dtype)

    return Packed(
        kind=kind,
        rows=rows,
        cols=cols,
        low=each(1 if kind.bits == 8 else 2, torch.uint8),
        high=each(8 // (kind.bits - 4), torch.uint8) if kind.bits in (5, 6) else None,
        d=each(kind.block, torch.uint8 if kind.is_exponent else torch.float16),
        m=each(kind.block, torch.float16) if kind.has_min else None,
        scales=each(kind.group, torch.int8) if kind.group else None,
        mins=each(kind.group, torch.int8) if kind.group and kind.has_min else None,
    )


def queries(num_chunks: int, length: int) -> Queries:
    """Chunks that end at position 4096."""
    ints = partial(values, dtype=torch.int32)
    return Queries(
        first_rows=ints(num_chunks),
        starts=ints(num_chunks),
        lengths=ints(num_chunks),
        tables=ints(num_chunks * 256),
        table_starts=ints(num_chunks),
        max_length=length,
        max_keys=4096,
        num_tiles=num_chunks * length,
        tile_starts=ints(num_chunks + 1),
    )


def _attend(shape: Shape, length: int, has_sinks: bool = False, num: int = 32) -> None:
    cache = tuple(values(512, 16, shape.num_kv_heads, n) for n in (shape.head_dim, shape.value_dim))
    q = values(32, shape.num_heads, shape.head_dim)
    out = values(32, shape.num_heads, shape.value_dim)
    sinks = values(shape.num_heads, dtype=F32) if has_sinks else None
    attend(q, (cache[0], cache[1]), queries(num, length), shape, out, sinks)


def _multiply(name: str, num_rows: int) -> None:
    multiply(values(num_rows, HIDDEN), packed(name), values(num_rows, HIDDEN))


def _qkv(num: int = 32) -> None:
    rows = QkvRows(values(num, dtype=torch.int64), *(values(num, DIM // 2, dtype=F32),) * 2)
    norms = (values(DIM, dtype=F32), values(DIM, dtype=F32))
    cache = (values(512, 16, KV, DIM), values(512, 16, KV, DIM))
    shape = QkvShape(HEADS, KV, DIM, DIM, DIM, False, False, 1e-5)
    write_qkv(values(num, (HEADS + 2 * KV) * DIM), norms, rows, cache, shape)


def _adapters(num: int = 32) -> None:
    ints, wide = partial(values, dtype=torch.int32), partial(values, dtype=torch.int64)
    parts = tuple(PartTable(wide(3), ints(3), ints(3), first, 1024) for first in (0, 1024))
    weight = WeightTable(wide(3), wide(3), ints(3), 32, parts)
    tiles = Tiles(wide(num), *[ints(num)] * 4, ints(num), values(num, dtype=F32), 2)
    add_adapters(values(num, HIDDEN), values(num, 2048), tiles, weight)


def _copies() -> None:
    pool = Places(values(32, 512, 8192, dtype=torch.int32))
    wide = partial(values, dtype=torch.int64)
    copy_parts(pool, pool, Pairs(wide(9), wide(9), values(9, dtype=torch.int32)))


def _runs(length: int, num: int = 32) -> Runs:
    ints = partial(values, dtype=torch.int32)
    return Runs(ints(num), ints(num), ints(num), values(num, dtype=torch.int64), length)


def _convolution() -> None:
    wide = partial(values, dtype=F32)
    causal_conv(wide(32, 8192), wide(8192, 4), wide(8192), wide(64, 3, 8192), _runs(64), True)


def _delta(length: int, num: int = 32) -> None:
    rows = [values(num, 32, DIM, dtype=F32)] * 3 + [values(num, 32, dtype=F32)] * 2
    states = values(64, 32, DIM, DIM, dtype=F32)
    inputs = (rows[0], rows[1], rows[2], rows[3], rows[4])
    delta_rule(inputs, states, _runs(length, num), DeltaShape(32, DIM, DIM), rows[0])


def _latent(heads: int, length: int, num: int = 32) -> None:
    """As DeepSeek 2 lite, with 16 heads, and DeepSeek 3, with 128, have it."""
    shape = LatentShape(heads, 512, 64, 0.1)
    q, cache = values(32, heads, 576), values(512, 16, 1, 576)
    attend_latent(q, cache, queries(num, length), shape, values(32, heads, 512))


def _experts(name: str | None, num_rows: int) -> None:
    """32 of about 2900 inputs and outputs, four of which a row uses, as gpt-oss 20B has them."""
    rows, cols = 2816, 3072
    matrix = packed(name, 32 * rows, cols) if name else values(32 * rows, cols)
    wide = Stack(matrix, rows, values(32, rows, dtype=F32))
    matrix = packed(name, 32 * cols, rows) if name else values(32 * cols, rows)
    down = Stack(matrix, cols, values(32, cols, dtype=F32))
    choice = values(num_rows, 4, dtype=torch.int64), values(num_rows, 4, dtype=F32)
    apply_experts(values(num_rows, cols), choice, Experts(wide, wide, down, Act.CLAMPED))


def _space(length: int, num: int = 32) -> None:
    """As Granite 4 small has it: 128 heads of 64 values, states of 128."""
    wide = partial(values, dtype=F32)
    inputs = (wide(num, 128 * 64 + 2 * 128), wide(num, 128), wide(num, 128))
    states = wide(64, 128, 64, 128)
    state_space(
        inputs, wide(128), states, _runs(length, num), SpaceShape(128, 64, 1, 128), inputs[0]
    )


PLAIN = Shape(HEADS, KV, DIM, DIM, 0.09)
GEMMA = Shape(8, 4, 256, 256, 0.06, softcap=50.0, window=1024)
CASES: dict[str, Callable[[], object]] = {
    "norm": lambda: add_norm(
        values(32, HIDDEN, dtype=F32), values(32, HIDDEN), values(HIDDEN, dtype=F32), 1e-5, BF16
    ),
    "gated": lambda: gated(values(32, INNER), values(32, INNER), Act.SILU),
    "qkv": _qkv,
    "attention, decode": lambda: _attend(PLAIN, 1, True),
    "attention, prefill": lambda: _attend(PLAIN, 64, True),
    "attention 256, decode": lambda: _attend(GEMMA, 1),
    "attention 256, prefill": lambda: _attend(GEMMA, 64),
    **{f"latent, {n} heads, decode": partial(_latent, n, 1) for n in (16, 128)},
    **{f"latent, {n} heads, prefill": partial(_latent, n, 64) for n in (16, 128)},
    "embedding Q6_K": lambda: take_rows(packed("Q6_K"), values(32, dtype=torch.int64)),
    "adapters": _adapters,
    "block copies": _copies,
    "convolution": _convolution,
    "delta net, row": lambda: _delta(1),
    "delta net, piece": lambda: _delta(64),
    "state space, row": lambda: _space(1),
    "state space, piece": lambda: _space(64),
    "experts, bf16, 1 row": lambda: _experts(None, 1),
    "experts, bf16, 512 rows": lambda: _experts(None, 512),
    **{f"experts, {name}, 1 row": partial(_experts, name, 1) for name in KINDS},
    **{f"experts, {name}, 512 rows": partial(_experts, name, 512) for name in KINDS},
    **{f"{name}, 1 row": partial(_multiply, name, 1) for name in KINDS},
    **{f"{name}, 17 rows": partial(_multiply, name, FEW_ROWS + 1) for name in ("Q4_K", "Q6_K")},
    **{f"{name}, 64 rows": partial(_multiply, name, 64) for name in KINDS},
}


FEW, MORE, MANY = (1, 7, 16), (17, 24, 32), (33, 48, 101)
ALIKE: dict[str, list[Callable[[], object]]] = {
    "qkv": [partial(_qkv, n) for n in FEW],
    "adapters": [partial(_adapters, n) for n in FEW],
    **{
        f"attention, {length}": [partial(_attend, PLAIN, length, num=n) for n in FEW]
        for length in (1, 64)
    },
    **{
        f"latent, {length}": [partial(_latent, 16, length, num=n) for n in FEW]
        for length in (1, 64)
    },
    **{f"delta net, {length}": [partial(_delta, length, n) for n in FEW] for length in (1, 64)},
    **{f"state space, {length}": [partial(_space, length, n) for n in FEW] for length in (1, 64)},
    **{
        f"products of {rows[0]} rows": [partial(_multiply, "Q4_K", n) for n in rows]
        for rows in (FEW, MORE, MANY)
    },
    "experts": [partial(_experts, "MXFP4", n) for n in FEW],
}
"""Launches that differ in what differs from step to step: none may be compiled for itself."""
