"""Low-rank changes of many adapters to the rows of one product.

1. Rows are grouped by the list of adapters that they carry, and each adds its adapters in that
   list's order, in float32, and is rounded once: company changes nothing.
2. Adapters lie where they were loaded; kernels follow pointers to them, so one launch serves all.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtrio.kernels.triton_common import product, tile

TILE = 16
"""Rows of a tile, all with one list of adapters."""


@dataclass(frozen=True, eq=False)
class Tiles:
    """Rows of a step that carry adapters, sorted by their lists, in tiles."""

    rows: Tensor
    """int64 [T]: rows of the step."""
    firsts: Tensor
    """int32 [tiles]: where in ``rows`` each begins."""
    counts: Tensor
    """int32 [tiles]: rows, at most ``TILE``; of a tile that stands for none, 0."""
    first_uses: Tensor
    """int32 [tiles]: where the list of the tile's rows begins among all uses."""
    num_uses: Tensor
    """int32 [tiles]: its length."""
    uses: Tensor
    """int32 [U]: which of the loaded adapters; the lists of all rows, one behind the other."""
    scales: Tensor
    """float32 [U]."""
    most_uses: int
    """Of any tile, or of any that these buffers may stand for."""


@dataclass(frozen=True, eq=False)
class PartTable:
    """B of one of the matrices that a product stacks, per loaded adapter (L)."""

    b: Tensor
    """int64 [L]: addresses of float32 [outputs, rank]; 0 where the adapter has none."""
    ranks: Tensor
    """int32 [L]."""
    first_ranks: Tensor
    """int32 [L]: where its ranks begin among those of A."""
    first_output: int
    num_outputs: int


@dataclass(frozen=True, eq=False)
class WeightTable:
    """What all loaded adapters do to one product."""

    a: Tensor
    """int64 [L]: addresses of float32 [rank, inputs]; 0 where the adapter leaves it alone."""
    scalings: Tensor
    """int64 [L]: addresses of float32 [rank]."""
    ranks: Tensor
    """int32 [L]: of all parts together."""
    most_ranks: int
    parts: tuple[PartTable, ...]


def add_adapters(x: Tensor, out: Tensor, tiles: Tiles, weight: WeightTable) -> None:
    """``out[row] += sum over the row's uses of ((x A^T) * scaling * scale) B^T``, part by part.

    x [N, I] and out [N, O], contiguous, any float types; out is changed in place. See
    ``reference_adapters.add_low_rank``.
    """
    num_tiles, num_rows = tiles.firsts.shape[0], tiles.rows.shape[0]
    block_r = tile(weight.most_ranks)
    sizes = (tiles.most_uses, num_rows, block_r)
    inner = torch.empty(sizes, dtype=torch.float32, device=x.device)
    placed = (
        tiles.rows, tiles.firsts, tiles.counts, tiles.first_uses, tiles.num_uses, tiles.uses,
    )  # fmt: skip
    _shrink[(num_tiles, tiles.most_uses)](
        x, inner, *placed, tiles.scales, weight.a, weight.scalings, weight.ranks, num_rows,
        x.shape[1], BLOCK_T=TILE, BLOCK_R=block_r, BLOCK_K=64, num_warps=4, num_stages=2,
    )  # fmt: skip
    for part in weight.parts:
        grid = (num_tiles, triton.cdiv(part.num_outputs, 64))
        _expand[grid](
            inner, out, *placed, part.b, part.ranks, part.first_ranks, num_rows, out.shape[1],
            part.first_output, part.num_outputs, BLOCK_T=TILE, BLOCK_R=block_r, BLOCK_O=64,
            num_warps=4, num_stages=2,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _shrink(
    x, inner, rows, firsts, counts, first_uses, num_uses, uses, scales, a, scalings, ranks,
    num_rows, num_inputs, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """x A^T, scaled, of one tile and one of its uses."""
    tile_id, place = tl.program_id(0), tl.program_id(1)
    if place < tl.load(num_uses + tile_id):
        use = tl.load(first_uses + tile_id) + place
        own_use = tl.load(uses + use)
        rank = tl.load(ranks + own_use)
        if rank > 0:
            t = tl.arange(0, BLOCK_T)
            is_row = t < tl.load(counts + tile_id)
            first = tl.load(firsts + tile_id)
            row = tl.load(rows + first + t, mask=is_row, other=0)
            r = tl.arange(0, BLOCK_R)
            own = tl.load(a + own_use).to(tl.pointer_type(tl.float32))
            acc = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
            for start in range(0, num_inputs, BLOCK_K):
                k = start + tl.arange(0, BLOCK_K)
                values = tl.load(
                    x + row[:, None] * num_inputs + k[None, :],
                    mask=is_row[:, None] & (k < num_inputs)[None, :], other=0.0,
                )  # fmt: skip
                part = tl.load(
                    own + r[None, :] * num_inputs + k[:, None],
                    mask=(r < rank)[None, :] & (k < num_inputs)[:, None], other=0.0,
                )  # fmt: skip
                acc = product(values.to(tl.float32), part, acc)
            factors = tl.load(scalings + own_use).to(tl.pointer_type(tl.float32))
            factor = tl.load(factors + r, mask=r < rank, other=0.0) * tl.load(scales + use)
            target = inner + (place * num_rows + first + t)[:, None] * BLOCK_R + r[None, :]
            tl.store(target, acc * factor[None, :], mask=is_row[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def _expand(
    inner, out, rows, firsts, counts, first_uses, num_uses, uses, b, ranks, first_ranks, num_rows,
    out_stride, first_output, num_outputs, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr,
):  # fmt: skip
    """What all uses of one tile add to some outputs of its rows."""
    tile_id = tl.program_id(0)
    if tl.load(counts + tile_id) == 0:
        return
    t, r = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_R)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    is_row, is_output = t < tl.load(counts + tile_id), o < num_outputs
    first = tl.load(firsts + tile_id)
    row = tl.load(rows + first + t, mask=is_row, other=0)
    target = out + row[:, None] * out_stride + first_output + o[None, :]
    mask = is_row[:, None] & is_output[None, :]
    acc = tl.load(target, mask=mask, other=0.0).to(tl.float32)
    begin = tl.load(first_uses + tile_id)
    for place in range(0, tl.load(num_uses + tile_id)):
        use = tl.load(uses + begin + place)
        rank = tl.load(ranks + use)
        if rank > 0:
            r0 = tl.load(first_ranks + use)
            source = inner + (place * num_rows + first + t)[:, None] * BLOCK_R + r0 + r[None, :]
            left = tl.load(source, mask=is_row[:, None] & (r < rank)[None, :], other=0.0)
            own = tl.load(b + use).to(tl.pointer_type(tl.float32))
            right = tl.load(
                own + o[None, :] * rank + r[:, None],
                mask=is_output[None, :] & (r < rank)[:, None], other=0.0,
            )  # fmt: skip
            acc = product(left, right, acc)
    tl.store(target, acc.to(out.dtype.element_ty), mask=mask)
