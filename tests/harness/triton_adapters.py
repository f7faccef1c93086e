"""Random low-rank changes for Triton's kernels, and their tables."""

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from kvtrio.kernels.reference_adapters import LowRankMatrix, OutputPart, add_low_rank
from kvtrio.kernels.triton_adapters import TILE, PartTable, Tiles, WeightTable

Use = tuple[LowRankMatrix | None, float]


def random_matrix(
    ranks: Sequence[int], sizes: Sequence[int], cols: int, seed: int
) -> LowRankMatrix:
    """A stack of changes; rank 0: that part is left alone."""
    generator = torch.Generator().manual_seed(seed)
    parts, first_output, first_rank = [], 0, 0
    for rank, size in zip(ranks, sizes, strict=True):
        if rank:
            b = torch.randn((size, rank), generator=generator)
            parts.append(OutputPart(b, first_output, first_rank))
        first_output, first_rank = first_output + size, first_rank + rank
    a = torch.randn((first_rank, cols), generator=generator) / cols**0.5
    return LowRankMatrix(a, torch.rand(first_rank, generator=generator), tuple(parts))


@frozen(eq=False)
class Mix:
    """Rows that carry one list of adapters."""

    rows: tuple[int, ...]
    uses: tuple[Use, ...]


def expected(x: Tensor, out: Tensor, mixes: Sequence[Mix]) -> Tensor:
    """What the reference makes of it, rounded once."""
    wide = out.float()
    for mix in mixes:
        own = wide[list(mix.rows)]
        for matrix, scale in mix.uses:
            if matrix is not None:
                add_low_rank(own, x[list(mix.rows)].float(), matrix, scale)
        wide[list(mix.rows)] = own
    return wide.to(out.dtype)


def tiles(mixes: Sequence[Mix], device: str = "cpu") -> Tiles:
    rows, placed, first_use = [], [], 0
    for mix in mixes:
        for first in range(0, len(mix.rows), TILE):
            count = min(TILE, len(mix.rows) - first)
            placed.append((len(rows) + first, count, first_use, len(mix.uses)))
        rows += mix.rows
        first_use += len(mix.uses)
    columns = [
        torch.tensor(each, dtype=torch.int32).to(device) for each in zip(*placed, strict=True)
    ]
    most = max(len(mix.uses) for mix in mixes)
    scales = torch.tensor([scale for mix in mixes for _, scale in mix.uses]).to(device)
    uses = torch.arange(first_use, dtype=torch.int32).to(device)
    return Tiles(torch.tensor(rows).to(device), *columns, uses, scales, most)


def table(mixes: Sequence[Mix], sizes: Sequence[int], device: str = "cpu") -> WeightTable:
    """As if each use were of an adapter of its own."""
    uses = [use for mix in mixes for use in mix.uses]

    def ints(values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(device)

    parts = []
    for i, size in enumerate(sizes):
        first = sum(sizes[:i])
        found = [
            next((p for p in matrix.parts if p.first_output == first), None) if matrix else None
            for matrix, _ in uses
        ]
        parts.append(
            PartTable(
                b=ints([p.b.data_ptr() if p else 0 for p in found], torch.int64),
                ranks=ints([p.b.shape[1] if p else 0 for p in found]),
                first_ranks=ints([p.first_rank if p else 0 for p in found]),
                first_output=first,
                num_outputs=size,
            )
        )
    ranks = [len(matrix.a) if matrix else 0 for matrix, _ in uses]
    return WeightTable(
        a=ints([m.a.data_ptr() if m else 0 for m, _ in uses], torch.int64),
        scalings=ints([m.scaling.data_ptr() if m else 0 for m, _ in uses], torch.int64),
        ranks=ints(ranks),
        most_ranks=max(ranks),
        parts=tuple(parts),
    )
