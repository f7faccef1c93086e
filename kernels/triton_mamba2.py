"""The state space of Mamba 2 over the states of a step's requests.

All is float32, as in ``reference_mamba2``, whose letters these are. A state is read and written in
its slot; who begins at position 0 begins with zeros, whatever is in the slot.
"""

from dataclasses import dataclass

import triton
from torch import Tensor

from kvtrio.kernels.triton_common import tile
from kvtrio.kernels.triton_mamba2_kernels import space_chunk_kernel, space_row_kernel
from kvtrio.kernels.triton_recurrent import PIECE, Runs


@dataclass(frozen=True)
class SpaceShape:
    """What is the same for all rows of a layer."""

    num_heads: int
    head_dim: int
    num_groups: int
    """Of heads that have B and C in common."""
    state_size: int


def state_space(
    inputs: tuple[Tensor, Tensor, Tensor],
    skip: Tensor,
    states: Tensor,
    runs: Runs,
    shape: SpaceShape,
    out: Tensor,
) -> None:
    """Outputs of the rows of each chunk, into their rows of ``out``, and the states behind them.

    inputs, contiguous float32: x, B and C side by side [N, H P + 2 G S], dt and log a [N, H]; skip
    float32 [H]: D; states float32 [slots, H, P, S], with a stride of any size between slots,
    changed in place; out [N, H, P]. Single rows by the recurrence, longer chunks in pieces.
    """
    if not runs.starts.shape[0]:
        return
    is_single = runs.max_length == 1
    kernel = space_row_kernel if is_single else space_chunk_kernel
    block_p = min(tile(shape.head_dim), 32)
    # Of more of a state at a time a GPU has no room in registers.
    pieces = {} if is_single else {"PIECE": PIECE}
    grid = (runs.starts.shape[0], shape.num_heads, triton.cdiv(shape.head_dim, block_p))
    kernel[grid](
        *inputs, skip, states, out, runs.first_rows, runs.starts, runs.lengths, runs.slots,
        shape.num_heads, inputs[0].stride(0), states.stride(0), P=shape.head_dim,
        S=shape.state_size, GROUPS=shape.num_groups, BLOCK_P=block_p,
        BLOCK_S=tile(shape.state_size) if is_single else min(tile(shape.state_size), 32),
        **pieces, num_warps=4 if is_single else 8, num_stages=1,
    )  # fmt: skip
