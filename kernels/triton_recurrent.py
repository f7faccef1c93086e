"""Causal convolution and the gated delta rule over the states of a step's requests.

All is float32, as in ``reference_recurrent`` and ``reference_delta_net``. A state is read and
written in its slot; who begins at position 0 begins with zeros, whatever is in the slot.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kvtrio.kernels.triton_common import next_power, tile
from kvtrio.kernels.triton_recurrent_kernels import (
    conv_kernel,
    delta_chunk_kernel,
    delta_row_kernel,
)

PIECE = 32
"""Rows that are computed together. Half of the reference's, whose borders are thus borders too:
with 64 rows a GPU runs out of registers."""


@dataclass(frozen=True, eq=False)
class Runs:
    """Some chunks of a step, as recurrent layers see them."""

    first_rows: Tensor
    """int32 [S]."""
    starts: Tensor
    """int32 [S]: position of the first row."""
    lengths: Tensor
    """int32 [S]."""
    slots: Tensor
    """int64 [S]."""
    max_length: int


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, runs: Runs, silu: bool
) -> Tensor:
    """Each channel's convolution along the rows of each chunk, and SiLU behind it if asked.

    x float32 [N, C] contiguous, weight float32 [C, width], bias float32 [C], history float32
    [slots, width - 1, C] with a stride of any size between slots, changed in place; returns
    float32 [N, C], of which rows of no chunk are not written. See
    ``reference_recurrent.causal_conv``.
    """
    out = torch.empty_like(x)
    channels, width = weight.shape
    if runs.starts.shape[0]:
        block = min(256, next_power(channels))
        conv_kernel[(runs.starts.shape[0], triton.cdiv(channels, block))](
            x, weight, bias, history, out, runs.first_rows, runs.starts, runs.lengths, runs.slots,
            channels, history.stride(0), WIDTH=width, BACK=next_power(width),
            HAS_BIAS=bias is not None, SILU=silu, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out


@dataclass(frozen=True)
class DeltaShape:
    """What is the same for all rows of a layer."""

    num_heads: int
    key_dim: int
    value_dim: int


def delta_rule(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    states: Tensor,
    runs: Runs,
    shape: DeltaShape,
    out: Tensor,
) -> None:
    """Outputs of the rows of each chunk, into their rows of ``out``, and the states behind them.

    inputs, contiguous float32: q and k [N, H, K], v [N, H, V], log decay and beta [N, H]; states
    float32 [slots, H, K, V], with a stride of any size between slots, changed in place; out [N, H,
    V]. Single rows by the recurrence, longer chunks in pieces; see ``reference_delta_net``.
    """
    if not runs.starts.shape[0]:
        return
    is_single = runs.max_length == 1
    kernel = delta_row_kernel if is_single else delta_chunk_kernel
    block_v = min(tile(shape.value_dim), 32 if is_single else 16)
    sizes = {} if is_single else {"PIECE": PIECE}
    grid = (runs.starts.shape[0], shape.num_heads, triton.cdiv(shape.value_dim, block_v))
    kernel[grid](
        *inputs, states, out, runs.first_rows, runs.starts, runs.lengths, runs.slots,
        shape.num_heads, states.stride(0), K=shape.key_dim, V=shape.value_dim,
        BLOCK_K=tile(shape.key_dim) if is_single else min(tile(shape.key_dim), 32),
        BLOCK_V=block_v, **sizes,
        num_warps=4 if is_single else 8, num_stages=1,
    )  # fmt: skip
