"""Between the product that makes q, k and v, and attention: norms, rotation, cache write."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtrio.kernels.triton_common import next_power


@dataclass(frozen=True)
class QkvShape:
    """What is the same for all rows of a layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    num_rotated: int
    """0: no rotation."""
    adjacent: bool
    gated: bool
    """Behind q of each head stands its gate, of as many values."""
    eps: float


@dataclass(frozen=True, eq=False)
class QkvRows:
    """What differs between rows."""

    slots: Tensor
    """int64 [N]: block * block_size + place."""
    cos: Tensor | None
    """float32 [N, num_rotated / 2]."""
    sin: Tensor | None


def write_qkv(
    fused: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    rows: QkvRows,
    cache: tuple[Tensor, Tensor],
    shape: QkvShape,
) -> Tensor:
    """Norm q and k per head, rotate both, write k and v into the cache at the rows' slots.

    fused [N, q and gates, k, v] contiguous; norms float32 [head_dim] for q and k; cache: keys
    [blocks, block_size, kv_heads, head_dim] and values, changed in place; returns q of fused's
    type [N, heads, head_dim], or with the gate behind it [N, heads, 2 head_dim]. See
    ``reference.rms_norm``, ``reference.rope`` and ``reference.write_cache``.
    """
    width = shape.head_dim * (2 if shape.gated else 1)
    num_rows = fused.shape[0]
    out = torch.empty((num_rows, shape.num_heads, width), dtype=fused.dtype, device=fused.device)
    if num_rows:
        num_programs = shape.num_heads + 2 * shape.num_kv_heads
        q_norm, k_norm = norms or (None, None)
        _write_qkv[(num_rows, num_programs)](
            fused, q_norm, k_norm, rows.cos, rows.sin, rows.slots, cache[0], cache[1], out,
            shape.eps, shape.num_heads, shape.num_kv_heads, fused.stride(0),
            DIM=shape.head_dim, VALUE_DIM=shape.value_dim, WIDTH=width,
            HALF=shape.num_rotated // 2, ADJACENT=shape.adjacent, HAS_NORM=norms is not None,
            BLOCK=next_power(max(shape.head_dim, shape.value_dim)), num_warps=1,
        )  # fmt: skip
    return out


@triton.jit
def _turned(head, norm, cos, sin, eps, i, DIM: tl.constexpr, HALF: tl.constexpr,
            ADJACENT: tl.constexpr, HAS_NORM: tl.constexpr):  # fmt: skip
    """Values of one head, normed and rotated; ``i`` are their indices."""
    mask = i < DIM
    values = tl.load(head + i, mask=mask, other=0.0).to(tl.float32)
    if ADJACENT:
        partner, pair, sign = i ^ 1, i // 2, tl.where(i % 2 == 0, -1.0, 1.0)
    else:
        is_first = i < HALF
        partner = tl.where(is_first, i + HALF, i - HALF)
        pair, sign = tl.where(is_first, i, i - HALF), tl.where(is_first, -1.0, 1.0)
    is_turned = i < 2 * HALF
    others = tl.load(head + partner, mask=is_turned, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = 1.0 / tl.sqrt(tl.sum(values * values, 0) / DIM + eps)
        values = values * scale * tl.load(norm + i, mask=mask, other=0.0)
        others = others * scale * tl.load(norm + partner, mask=is_turned, other=0.0)
    if HALF:
        c = tl.load(cos + pair, mask=is_turned, other=1.0)
        s = tl.load(sin + pair, mask=is_turned, other=0.0)
        values = values * c + others * s * sign
    return values


@triton.jit
def _write_qkv(
    fused, q_norm, k_norm, cos, sin, slots, keys, values, out, eps, num_heads, num_kv_heads,
    row_stride, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr,
    HALF: tl.constexpr, ADJACENT: tl.constexpr, HAS_NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One head of q, k or v of one row."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, BLOCK)
    source = fused + row * row_stride
    if HALF:
        cos += row * HALF
        sin += row * HALF
    slot = tl.load(slots + row)
    if head < num_heads:
        own = source + head * WIDTH
        turned = _turned(own, q_norm, cos, sin, eps, i, DIM, HALF, ADJACENT, HAS_NORM)
        target = out + (row * num_heads + head) * WIDTH
        tl.store(target + i, turned.to(out.dtype.element_ty), mask=i < DIM)
        if WIDTH > DIM:
            gate = tl.load(own + DIM + i, mask=i < DIM, other=0.0)
            tl.store(target + DIM + i, gate, mask=i < DIM)
    elif head < num_heads + num_kv_heads:
        kv_head = head - num_heads
        own = source + num_heads * WIDTH + kv_head * DIM
        turned = _turned(own, k_norm, cos, sin, eps, i, DIM, HALF, ADJACENT, HAS_NORM)
        target = keys + (slot * num_kv_heads + kv_head) * DIM
        tl.store(target + i, turned.to(keys.dtype.element_ty), mask=i < DIM)
    else:
        kv_head = head - num_heads - num_kv_heads
        own = source + num_heads * WIDTH + num_kv_heads * DIM + kv_head * VALUE_DIM
        value = tl.load(own + i, mask=i < VALUE_DIM, other=0.0)
        target = values + (slot * num_kv_heads + kv_head) * VALUE_DIM
        tl.store(target + i, value.to(values.dtype.element_ty), mask=i < VALUE_DIM)
