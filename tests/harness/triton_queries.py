"""Ragged batches for paged attention, and what it should give, row by row in float64."""

from collections.abc import Sequence
from random import Random

import torch
from attrs import frozen
from torch import Tensor

from kvtrio.kernels.triton_attention import Queries, Shape, queries_per_tile


@frozen(eq=False)
class Ragged:
    """Chunks (start, rows) over scattered blocks of a cache, on some device."""

    chunks: tuple[tuple[int, int], ...]
    q: Tensor
    keys: Tensor
    values: Tensor
    tables: tuple[tuple[int, ...], ...]

    def queries(self, shape: Shape, chosen: Sequence[int] | None = None) -> Queries:
        """The chunks at these places of the batch, all if None, as the kernel takes them."""
        places = range(len(self.chunks)) if chosen is None else chosen
        lengths = [self.chunks[i][1] for i in places]
        block_q = queries_per_tile(shape.padded_ratio, max(lengths) == 1)
        tile_starts, firsts = [0], [sum(n for _, n in self.chunks[:i]) for i in places]
        for length in lengths:
            tile_starts.append(tile_starts[-1] - (-length // block_q))
        tables = [block for i in places for block in self.tables[i]]
        table_starts = [sum(len(self.tables[j]) for j in places[:n]) for n in range(len(places))]

        def ints(values: object) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.q.device)

        return Queries(
            first_rows=ints(firsts),
            starts=ints([self.chunks[i][0] for i in places]),
            lengths=ints(lengths),
            tables=ints(tables),
            table_starts=ints(table_starts),
            max_length=max(lengths),
            max_keys=max(sum(self.chunks[i]) for i in places),
            num_tiles=tile_starts[-1],
            tile_starts=ints(tile_starts),
        )

    def expected(self, shape: Shape, sinks: Tensor | None = None) -> Tensor:
        """[N, heads, value_dim] in float64."""
        rows = []
        firsts = [sum(n for _, n in self.chunks[:i]) for i in range(len(self.chunks))]
        for (start, length), first, table in zip(self.chunks, firsts, self.tables, strict=True):
            for i in range(length):
                rows.append(self._row(shape, (first + i, start + i), table, sinks))
        return torch.stack(rows)

    def _row(
        self, shape: Shape, at: tuple[int, int], table: tuple[int, ...], sinks: Tensor | None
    ) -> Tensor:
        row, position = at
        oldest = 0 if shape.window is None else max(0, position - shape.window + 1)
        places, repeats = self.keys.shape[1], shape.num_heads // shape.num_kv_heads
        slots = [table[p // places] * places + p % places for p in range(oldest, position + 1)]
        keys, values = (
            part.flatten(0, 1)[slots].double().repeat_interleave(repeats, 1)
            for part in (self.keys, self.values)
        )
        scores = torch.einsum("hd,khd->hk", self.q[row].double(), keys) * shape.scale
        if shape.softcap:
            scores = shape.softcap * torch.tanh(scores / shape.softcap)
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None]), -1)
        weights = torch.softmax(scores, -1)[:, : len(slots)]
        return torch.einsum("hk,khv->hv", weights, values)


def ragged(
    shape: Shape,
    chunks: Sequence[tuple[int, int]],
    *,
    places: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> Ragged:
    """Random q, and a cache in which no two tables share a block and none is in order."""
    rng, generator = Random(seed), torch.Generator().manual_seed(seed)
    counts = [-(-(start + length) // places) for start, length in chunks]
    blocks = list(range(sum(counts) + 1))
    rng.shuffle(blocks)
    tables = tuple(tuple(blocks.pop() for _ in range(count)) for count in counts)

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(device, dtype)

    num_rows, num_blocks = sum(length for _, length in chunks), sum(counts) + 1
    return Ragged(
        tuple(chunks),
        random(num_rows, shape.num_heads, shape.head_dim),
        random(num_blocks, places, shape.num_kv_heads, shape.head_dim),
        random(num_blocks, places, shape.num_kv_heads, shape.value_dim),
        tables,
    )
