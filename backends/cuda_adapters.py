"""Which rows of a step carry which adapters, as tables for the kernels that add them."""

from collections.abc import Mapping, Sequence

import torch
from attrs import define, field, frozen
from torch import Tensor

from kvtrio.backends.torch_adapters import Loaded
from kvtrio.core.batch import Chunk
from kvtrio.core.identity import AdapterUse, effective
from kvtrio.kernels.reference_adapters import LowRankMatrix, OutputPart
from kvtrio.kernels.triton_adapters import TILE, PartTable, Tiles, WeightTable, add_adapters

MAX_TABLES = 4096
"""Kept from step to step; then all are made anew."""
Uses = tuple[AdapterUse, ...]


@frozen(eq=False)
class Carried:
    """The rows of a step that carry adapters."""

    tiles: Tiles
    uses: Uses
    """The lists of all rows, one behind the other."""


def carried(chunks: Sequence[Chunk], counts: Sequence[int], device: torch.device) -> Carried | None:
    """Which rows carry what when chunk i has ``counts[i]`` rows; None: none has any."""
    lists: dict[Uses, list[int]] = {}
    first = 0
    for chunk, count in zip(chunks, counts, strict=True):
        if count and (uses := effective(chunk.adapters)):
            lists.setdefault(uses, []).extend(range(first, first + count))
        first += count
    if not lists:
        return None
    return Carried(_tiles(lists, device), tuple(use for uses in lists for use in uses))


def _tiles(lists: Mapping[Uses, list[int]], device: torch.device) -> Tiles:
    rows: list[int] = []
    placed: list[tuple[int, int, int, int]] = []
    first_use = 0
    for uses, own in lists.items():
        for first in range(0, len(own), TILE):
            count = min(TILE, len(own) - first)
            placed.append((len(rows) + first, count, first_use, len(uses)))
        rows += own
        first_use += len(uses)
    firsts, counts, first_uses, num_uses = (
        _ints(list(column), device) for column in zip(*placed, strict=True)
    )
    return Tiles(
        rows=_ints(rows, device, torch.int64),
        firsts=firsts,
        counts=counts,
        first_uses=first_uses,
        num_uses=num_uses,
        most_uses=max(map(len, lists)),
    )


@define(eq=False)
class AdapterTables:
    """What the adapters of a step do to each weight; tables are kept while the lists are alike."""

    _loaded: Loaded
    """The backend's, as it changes."""
    _device: torch.device
    _tables: dict[tuple[str, Uses], WeightTable | None] = field(init=False, factory=dict)

    def add(self, rows: Carried | None, x: Tensor, out: Tensor, weight: str) -> Tensor:
        """``out``, the product of ``x`` with a weight, with the changes of the rows that have some.

        x [N, I], out [N, O] contiguous, changed in place; any float types.
        """
        table = self._table(weight, rows.uses) if rows else None
        if rows is not None and table is not None:
            add_adapters(x.contiguous(), out, rows.tiles, table)
        return out

    def forget(self) -> None:
        """Adapters have changed."""
        self._tables.clear()

    def _table(self, weight: str, uses: Uses) -> WeightTable | None:
        key = (weight, uses)
        if key not in self._tables:
            if len(self._tables) >= MAX_TABLES:
                self._tables.clear()
            self._tables[key] = self._made(weight, uses)
        return self._tables[key]

    def _made(self, weight: str, uses: Uses) -> WeightTable | None:
        found = [self._loaded[use.adapter_id].get(weight) for use in uses]
        if not any(found):
            return None
        ranks = [len(matrix.a) if matrix else 0 for matrix in found]
        scales = torch.tensor([use.scale for use in uses], dtype=torch.float32)
        outputs = sorted({(part.first_output, len(part.b)) for m in found if m for part in m.parts})
        return WeightTable(
            a=self._addresses([matrix.a if matrix else None for matrix in found]),
            scalings=self._addresses([matrix.scaling if matrix else None for matrix in found]),
            scales=scales.to(self._device),
            ranks=_ints(ranks, self._device),
            most_ranks=max(ranks),
            parts=tuple(self._part(found, *output) for output in outputs),
        )

    def _part(
        self, found: list[LowRankMatrix | None], first_output: int, num_outputs: int
    ) -> PartTable:
        parts = [_part_at(matrix, first_output) for matrix in found]
        return PartTable(
            b=self._addresses([part.b if part else None for part in parts]),
            ranks=_ints([part.b.shape[1] if part else 0 for part in parts], self._device),
            first_ranks=_ints([part.first_rank if part else 0 for part in parts], self._device),
            first_output=first_output,
            num_outputs=num_outputs,
        )

    def _addresses(self, tensors: list[Tensor | None]) -> Tensor:
        values = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        return _ints(values, self._device, torch.int64)


def _part_at(matrix: LowRankMatrix | None, first_output: int) -> OutputPart | None:
    parts = matrix.parts if matrix else ()
    return next((part for part in parts if part.first_output == first_output), None)


def _ints(values: list[int], device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype).to(device)
