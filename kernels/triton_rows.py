"""What is done row by row: RMSNorm with the residual before it, and gated activations."""

from enum import IntEnum

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtrio.kernels.triton_common import next_power, rows_of


class Act(IntEnum):
    """``out = act(a) * b``."""

    SILU = 0
    GELU_TANH = 1
    SIGMOID = 2
    CLAMPED = 3
    """``a sigmoid(1.702 a) (b + 1)``, a at most 7 and b within 7 of 0."""


def add_norm(
    x: Tensor, change: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    """``rms_norm(x + change)``; the sum stays in ``x``, which is changed in place.

    x [..., D] float32 where there is a change, else any float type; change [..., D] of any float
    type; weight float32 [D]; returns ``dtype`` [..., D]. See ``reference.rms_norm``.
    """
    size = x.shape[-1]
    flat = x.reshape(-1, size)
    assert change is None or flat.data_ptr() == x.data_ptr(), "the sum must stay in x"
    out = torch.empty(flat.shape, dtype=dtype, device=x.device)
    if len(flat):
        block = next_power(size)
        add = None if change is None else change.reshape(-1, size)
        warps = min(8, max(1, block // 512))
        _add_norm[(len(flat),)](
            flat, add, weight, out, eps, size, HAS_CHANGE=add is not None, BLOCK=block,
            num_warps=warps,
        )  # fmt: skip
    return out.view(x.shape)


@triton.jit
def _add_norm(
    x, change, weight, out, eps, size, HAS_CHANGE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * size
    cols = tl.arange(0, BLOCK)
    mask = cols < size
    values = tl.load(x + row + cols, mask=mask, other=0.0).to(tl.float32)
    if HAS_CHANGE:
        values += tl.load(change + row + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(x + row + cols, values, mask=mask)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, 0) / size + eps)
    normed = values * scale * tl.load(weight + cols, mask=mask, other=0.0)
    tl.store(out + row + cols, normed.to(out.dtype.element_ty), mask=mask)


def gated(a: Tensor, b: Tensor, act: Act) -> Tensor:
    """``act(a) * b`` in float32, rounded to b's type; see ``reference.gated`` and, of clamped ones,
    ``reference.gated_clamped``.

    a and b [N, F] of any float types, rows anywhere; returns [N, F].
    """
    a, b = rows_of(a), rows_of(b)
    num_rows, size = b.shape
    out = torch.empty((num_rows, size), dtype=b.dtype, device=b.device)
    block = min(1024, next_power(size))
    if num_rows:
        _gated[(num_rows, triton.cdiv(size, block))](
            a, b, out, a.stride(0), b.stride(0), size, ACT=int(act), BLOCK=block, num_warps=4
        )
    return out


@triton.jit
def _gated(a, b, out, a_stride, b_stride, size, ACT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < size
    gate = tl.load(a + row * a_stride + cols, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(b + row * b_stride + cols, mask=mask, other=0.0).to(tl.float32)
    if ACT == 1:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        active = gate * tl.sigmoid(2.0 * inner)  # g / 2 (1 + tanh(u)) = g sigmoid(2 u)
    elif ACT == 0:
        active = gate * tl.sigmoid(gate)
    elif ACT == 3:
        gate = tl.minimum(gate, 7.0)
        active = gate * tl.sigmoid(1.702 * gate)
        value = tl.minimum(tl.maximum(value, -7.0), 7.0) + 1.0
    else:
        active = tl.sigmoid(gate)
    tl.store(out + row * size + cols, (active * value).to(out.dtype.element_ty), mask=mask)
