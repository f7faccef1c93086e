"""Which rows of a step carry which adapters, and what all loaded ones do to each weight."""

from collections.abc import Mapping, Sequence

import torch
from attrs import define, field, frozen
from torch import Tensor

from kvtrio.backends.cuda_arena import Arena
from kvtrio.backends.torch_adapters import Loaded
from kvtrio.core.batch import Chunk
from kvtrio.core.identity import AdapterUse, effective
from kvtrio.kernels.reference_adapters import LowRankMatrix, OutputPart
from kvtrio.kernels.triton_adapters import TILE, PartTable, Tiles, WeightTable, add_adapters

Uses = tuple[AdapterUse, ...]
Places = Mapping[int, int]
"""By handle, which of the loaded adapters it is."""
MOST_USES = 4
"""Adapters of a row in a captured step."""


@frozen
class Columns:
    """``Tiles`` as numbers."""

    rows: list[int]
    tiles: list[tuple[int, int, int, int]]
    """First, count, first use, number of uses."""
    uses: list[int]
    scales: list[float]


def carried(
    chunks: Sequence[Chunk], counts: Sequence[int], places: Places, arena: Arena
) -> Tiles | None:
    """Which rows carry what when chunk i has ``counts[i]`` rows; None: none has any.

    Raises KeyError for a handle that is not among ``places``.
    """
    lists = _lists(chunks, counts)
    if not lists:
        return None
    return _tiles(_columns(lists, places), max(map(len, lists)), arena)


def carried_by_any(chunks: Sequence[Chunk], places: Places, arena: Arena) -> Tiles:
    """The same for single rows, in buffers that have room for any of so many."""
    num_rows = len(chunks)
    columns = _columns(_lists(chunks, [1] * num_rows), places)
    num_uses = num_rows * MOST_USES
    padded = Columns(
        rows=columns.rows + [0] * (num_rows - len(columns.rows)),
        tiles=columns.tiles + [(0, 0, 0, 0)] * (num_rows - len(columns.tiles)),
        uses=columns.uses + [0] * (num_uses - len(columns.uses)),
        scales=columns.scales + [0.0] * (num_uses - len(columns.scales)),
    )
    return _tiles(padded, MOST_USES, arena)


def require_loaded(chunks: Sequence[Chunk], places: Places) -> None:
    """Raise KeyError for an adapter that is not among ``places``, whatever its scale."""
    for use in {use for chunk in chunks for use in chunk.adapters}:
        places[use.adapter_id]


def _lists(chunks: Sequence[Chunk], counts: Sequence[int]) -> dict[Uses, list[int]]:
    """The rows that carry each list."""
    lists: dict[Uses, list[int]] = {}
    first = 0
    for chunk, count in zip(chunks, counts, strict=True):
        if count and (uses := effective(chunk.adapters)):
            lists.setdefault(uses, []).extend(range(first, first + count))
        first += count
    return lists


def _columns(lists: Mapping[Uses, list[int]], places: Places) -> Columns:
    columns = Columns([], [], [], [])
    for uses, own in lists.items():
        for first in range(0, len(own), TILE):
            count = min(TILE, len(own) - first)
            columns.tiles.append((len(columns.rows) + first, count, len(columns.uses), len(uses)))
        columns.rows.extend(own)
        columns.uses.extend(places[use.adapter_id] for use in uses)
        columns.scales.extend(use.scale for use in uses)
    return columns


def _tiles(columns: Columns, most_uses: int, arena: Arena) -> Tiles:
    firsts, counts, first_uses, num_uses = zip(*columns.tiles, strict=True)
    return Tiles(
        rows=arena.ints(columns.rows, torch.int64),
        firsts=arena.ints(firsts),
        counts=arena.ints(counts),
        first_uses=arena.ints(first_uses),
        num_uses=arena.ints(num_uses),
        uses=arena.ints(columns.uses),
        scales=arena.put(torch.tensor(columns.scales, dtype=torch.float32)),
        most_uses=most_uses,
    )


@define(eq=False)
class AdapterTables:
    """What the loaded adapters do to each weight; tables are kept while those are the same."""

    _loaded: Loaded
    """The backend's, as it changes."""
    _device: torch.device
    version: int = field(init=False, default=0)
    """Counts the changes: tables of another version are other memory."""
    _places: dict[int, int] = field(init=False, factory=dict)
    _tables: dict[str, WeightTable | None] = field(init=False, factory=dict)

    def places(self) -> Places:
        """Of what is loaded now."""
        if self._places.keys() != self._loaded.keys():
            self._places = {handle: i for i, handle in enumerate(self._loaded)}
            self._tables = {}
            self.version += 1
        return self._places

    def add(self, rows: Tiles | None, x: Tensor, out: Tensor, weight: str) -> Tensor:
        """``out``, the product of ``x`` with a weight, with the changes of the rows that have some.

        x [N, I], out [N, O] contiguous, changed in place; any float types.
        """
        table = self._table(weight) if rows else None
        if rows is not None and table is not None:
            add_adapters(x.contiguous(), out, rows, table)
        return out

    def _table(self, weight: str) -> WeightTable | None:
        if weight not in self._tables:
            self._tables[weight] = self._made(weight)
        return self._tables[weight]

    def _made(self, weight: str) -> WeightTable | None:
        found = [self._loaded[handle].get(weight) for handle in self._places]
        if not any(found):
            return None
        ranks = [len(matrix.a) if matrix else 0 for matrix in found]
        outputs = sorted({(part.first_output, len(part.b)) for m in found if m for part in m.parts})
        return WeightTable(
            a=self._addresses([matrix.a if matrix else None for matrix in found]),
            scalings=self._addresses([matrix.scaling if matrix else None for matrix in found]),
            ranks=self._ints(ranks),
            most_ranks=max(ranks),
            parts=tuple(self._part(found, *output) for output in outputs),
        )

    def _part(
        self, found: list[LowRankMatrix | None], first_output: int, num_outputs: int
    ) -> PartTable:
        parts = [_part_at(matrix, first_output) for matrix in found]
        return PartTable(
            b=self._addresses([part.b if part else None for part in parts]),
            ranks=self._ints([part.b.shape[1] if part else 0 for part in parts]),
            first_ranks=self._ints([part.first_rank if part else 0 for part in parts]),
            first_output=first_output,
            num_outputs=num_outputs,
        )

    def _addresses(self, tensors: list[Tensor | None]) -> Tensor:
        values = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        return self._ints(values, torch.int64)

    def _ints(self, values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self._device)


def _part_at(matrix: LowRankMatrix | None, first_output: int) -> OutputPart | None:
    parts = matrix.parts if matrix else ()
    return next((part for part in parts if part.first_output == first_output), None)
