"""Feed-forwards of which each row uses a few: rows sorted by expert, one product for all experts.

1. Nothing of the host's knows which experts were chosen: tiles are as many as there could be, each
   finds its expert by binary search, and those behind the last end at once.
2. A tile has rows of one expert, so of the weights only those of chosen experts are read. Few rows
   have small tiles, by the step's number of rows alone: so a row has the same bits in any such
   company.
3. A row's experts are added in the order of their numbers, in float32.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kvtrio.kernels.triton_common import next_power
from kvtrio.kernels.triton_experts_kernels import combine_kernel, packed_kernel, plain_kernel
from kvtrio.kernels.triton_matmul import matrix_constants, matrix_fields
from kvtrio.kernels.triton_pack import Packed
from kvtrio.kernels.triton_rows import Act, gated

FEW_ROWS = 16
"""Of an expert, on average: up to here tiles have so many."""
MANY_ROWS = 64


@dataclass(frozen=True, eq=False)
class Stack:
    """Matrices of E experts, one below the other."""

    matrix: Packed | Tensor
    """[E R, C]; a tensor of x's type, contiguous."""
    rows: int
    """R."""
    bias: Tensor | None = None
    """float32 [E, R]."""

    @property
    def cols(self) -> int:
        return self.matrix.cols if isinstance(self.matrix, Packed) else self.matrix.shape[-1]


@dataclass(frozen=True, eq=False)
class Experts:
    """Of one layer."""

    gate: Stack
    up: Stack
    down: Stack
    act: Act


@dataclass(frozen=True, eq=False)
class Grouped:
    """A step's pairs of a row and an expert, sorted by expert."""

    rows: Tensor
    """int32 [P]: the row of each."""
    starts: Tensor
    """int32 [E + 1]: first pair of each expert, and behind the last."""
    tile_starts: Tensor
    """int32 [E + 1]: the same of tiles."""
    places: Tensor
    """int32 [N, U]: each row's pairs, in the order of its experts' numbers."""
    weights: Tensor
    """float32 [N, U]: of those."""
    block_m: int
    num_tiles: int
    """At most."""


def apply_experts(x: Tensor, choice: tuple[Tensor, Tensor], experts: Experts) -> Tensor:
    """``sum over the row's experts of weight * down(act(gate x, up x))``, with biases if any.

    x float32 or bfloat16 [N, D]; choice: int64 [N, U] and float32 [N, U]; returns float32 [N, D].
    See ``reference_experts.apply_experts``; products are rounded behind their bias, not before.
    """
    num_experts = _num_experts(experts.gate)
    groups = grouped(*choice, num_experts)
    num_pairs, inner = groups.rows.shape[0], experts.gate.rows
    both = x.new_empty(num_pairs, 2 * inner)
    _multiply(x.contiguous(), experts.gate, groups, both[:, :inner], groups.rows)
    _multiply(x.contiguous(), experts.up, groups, both[:, inner:], groups.rows)
    hidden = gated(both[:, :inner], both[:, inner:], experts.act)
    values = x.new_empty(num_pairs, experts.down.rows)
    _multiply(hidden, experts.down, groups, values, None)
    return _combined(values, groups)


def grouped(experts: Tensor, weights: Tensor, num_experts: int) -> Grouped:
    """Sort the pairs. experts int64 [N, U], weights float32 [N, U]."""
    num_rows, num_used = experts.shape
    num_pairs = num_rows * num_used
    block_m = FEW_ROWS if num_pairs <= FEW_ROWS * num_experts else MANY_ROWS
    found, order = experts.flatten().sort(stable=True)
    borders = torch.arange(num_experts + 1, device=experts.device)
    starts = torch.searchsorted(found, borders)
    tiles = (starts.diff() + block_m - 1) // block_m
    tile_starts = torch.cat((torch.zeros_like(starts[:1]), tiles.cumsum(0)))
    places = torch.empty_like(order).scatter_(
        0, order, torch.arange(num_pairs, device=experts.device)
    )
    places, ranked = places.view(num_rows, num_used).sort(-1)
    return Grouped(
        rows=(order // num_used).int(),
        starts=starts.int(),
        tile_starts=tile_starts.int(),
        places=places.int(),
        weights=weights.gather(-1, ranked),
        block_m=block_m,
        num_tiles=min(num_pairs, num_pairs // block_m + num_experts),
    )


def _num_experts(stack: Stack) -> int:
    matrix = stack.matrix
    return (matrix.rows if isinstance(matrix, Packed) else matrix.shape[0]) // stack.rows


def _multiply(x: Tensor, stack: Stack, groups: Grouped, out: Tensor, rows: Tensor | None) -> None:
    """``out[pair] = x[rows[pair]] W^T + bias`` of each pair's expert; rows None: x is by pairs."""
    matrix, is_few = stack.matrix, groups.block_m == FEW_ROWS
    block_n = 32 if is_few else 64
    grid = (groups.num_tiles, triton.cdiv(stack.rows, block_n))
    placed = (rows, groups.starts, groups.tile_starts, stack.bias, out)
    sizes = (groups.starts.shape[0] - 1, stack.rows, stack.cols, x.stride(0), out.stride(0))
    flags = {
        "HAS_ROWS": rows is not None,
        "HAS_BIAS": stack.bias is not None,
        "BLOCK_M": groups.block_m,
        "BLOCK_N": block_n,
    }
    if not groups.num_tiles:
        return
    if isinstance(matrix, Packed):
        packed_kernel[grid](
            x, *matrix_fields(matrix), *placed, *sizes, **matrix_constants(matrix), **flags,
            GROUPS=4 if is_few else 2, num_warps=4, num_stages=3 if is_few else 2,
        )  # fmt: skip
    else:
        plain_kernel[grid](
            x, matrix, *placed, *sizes, **flags, BLOCK_K=64, num_warps=4, num_stages=3
        )


def _combined(values: Tensor, groups: Grouped) -> Tensor:
    """values [P, D] to float32 [N, D]."""
    (num_rows, num_used), size = groups.places.shape, values.shape[-1]
    out = torch.empty((num_rows, size), dtype=torch.float32, device=values.device)
    block = min(1024, next_power(size))
    if num_rows:
        combine_kernel[(num_rows, triton.cdiv(size, block))](
            values, groups.places, groups.weights, out, num_used, size, BLOCK=block, num_warps=4
        )
    return out
