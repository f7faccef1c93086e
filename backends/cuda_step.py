"""A batch as the cuda backend's kernels take it.

1. Everything goes to the device in one copy; see ``cuda_arena``.
2. A step that was captured is built by the same code, with as many single rows as it was captured
   for: then all shapes but that of the block tables are the same, and those come last.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from kvtrio.backends.base import BackendError
from kvtrio.backends.cuda_adapters import AdapterTables, carried, carried_by_any, require_loaded
from kvtrio.backends.cuda_arena import Arena
from kvtrio.backends.groups import LayerGroup
from kvtrio.backends.torch_step import GroupStep, StepLayout, TorchStep, rotation, slots_of
from kvtrio.core.batch import Batch, Chunk
from kvtrio.kernels.triton_adapters import Tiles
from kvtrio.kernels.triton_attention import Queries, queries_per_tile
from kvtrio.kernels.triton_common import next_power
from kvtrio.kernels.triton_latent import latent_ratio
from kvtrio.kernels.triton_recurrent import Runs
from kvtrio.model.spec import AttentionSpec, LatentAttentionSpec, ModelSpec, RopeSpec

Member = tuple[Chunk, int]
"""A chunk, and its first row in the step."""


@frozen(eq=False)
class CudaStep(TorchStep):
    """One step, without what only the reference's attention, states and adapters want."""

    queries: Mapping[int, tuple[Queries, ...]]
    """By group with K and V: single rows, and longer chunks."""
    runs: Mapping[int, Runs]
    """By recurrent group: all chunks."""
    split_runs: Mapping[int, tuple[Runs, ...]]
    """The same as single rows, and longer chunks."""
    carried: Tiles | None
    """Adapters of the step's rows."""
    sampled_carried: Tiles | None
    """The same among the sampled rows."""


@frozen(kw_only=True, eq=False)
class Frame:
    """What all steps of a device have in common."""

    layout: StepLayout
    ratios: Mapping[int, int]
    """By group, heads of a kv head that share a tile."""
    tables: AdapterTables
    arena: Arena


@frozen(kw_only=True)
class Room:
    """What a captured step has room for, besides its rows."""

    max_keys: int
    """Positions of a request."""
    with_adapters: bool


@frozen(eq=False)
class _Tables:
    """Block tables of a step, one behind the other."""

    blocks: "array[int]" = field(factory=lambda: array("i"))

    def add(self, table: Sequence[int]) -> int:
        start = len(self.blocks)
        self.blocks.extend(table)
        return start


def frame_of(
    layout: StepLayout, ratios: Mapping[int, int], tables: AdapterTables, limits: tuple[int, ...]
) -> Frame:
    """``limits``: most rows of a step, most chunks, and most positions of a request."""
    return Frame(
        layout=layout,
        ratios=ratios,
        tables=tables,
        arena=Arena(layout.device, _step_bytes(layout, *limits)),
    )


def _step_bytes(layout: StepLayout, num_rows: int, num_chunks: int, max_context: int) -> int:
    """Bytes of the largest step: a bound."""
    num_rows, num_groups = max(num_rows, num_chunks), len(layout.groups)
    rotated = sum(rope.num_rotated for rope in layout.ropes)
    blocks = -(-max_context // layout.block_size)
    per_row = 256 + 8 * num_groups + 4 * rotated
    return num_rows * per_row + num_chunks * num_groups * (128 + 4 * blocks) + (1 << 14)


def build_cuda_step(batch: Batch, frame: Frame, room: Room | None = None) -> CudaStep:
    """On its way to the device. With ``room`` of single rows only, for a captured step: then all
    rows are sampled.

    Raises IndexError when a block table does not cover its chunk, KeyError for an adapter that is
    not loaded.
    """
    chunks, arena, layout = batch.chunks, frame.arena, frame.layout
    arena.begin()
    members = _members(chunks)
    split = [part for part in _split(members) if part]
    positions = torch.tensor(
        [p for chunk in chunks for p in range(chunk.start, chunk.end)], dtype=torch.int64
    )
    attending = [i for i, group in enumerate(layout.groups) if group.state is None]
    recurrent = [i for i, group in enumerate(layout.groups) if group.state is not None]
    own_carried, sampled_carried = _carried(chunks, frame, room)
    runs = {i: _runs(members, i, arena) for i in recurrent}
    split_runs = {i: tuple(_runs(part, i, arena) for part in split) for i in recurrent}
    rows = range(len(chunks)) if room else _sampled(members)
    step = CudaStep(
        token_ids=arena.ints([t for chunk in chunks for t in chunk.token_ids], torch.int64),
        positions=arena.put(positions),
        rotations={rope: _rotation(rope, frame, positions) for rope in layout.ropes},
        groups={i: GroupStep(_slots(chunks, i, frame), ()) for i in attending},
        states={},
        sampled=arena.ints(rows, torch.int64),
        samples=tuple(chunk.sample for chunk in chunks if chunk.sample),
        adapters=None,
        sampled_adapters=None,
        queries=_all_queries(split, attending, frame, room),
        runs=runs,
        split_runs=split_runs,
        carried=own_carried,
        sampled_carried=sampled_carried,
    )
    arena.send()
    return step


def heads_of(spec: ModelSpec) -> dict[int, int]:
    """Query heads by layer with K and V."""
    attending = AttentionSpec | LatentAttentionSpec
    return {
        layer.index: layer.mixer.num_heads
        for layer in spec.layers
        if isinstance(layer.mixer, attending)
    }


def padded_ratios(groups: Sequence[LayerGroup], heads: Mapping[int, int]) -> dict[int, int]:
    """By group with K and V; ``heads``: query heads by layer.

    Raises BackendError where layers of one group differ in them: they share tiles.
    """
    for group in groups:
        if len({heads[layer] for layer in group.layers if layer in heads}) > 1:
            raise BackendError("backend cuda needs layers alike in heads where K and V are alike")
    return {
        i: _ratio(group, heads[group.layers[0]])
        for i, group in enumerate(groups)
        if group.state is None and group.layers
    }


def _ratio(group: LayerGroup, num_heads: int) -> int:
    is_latent = group.value_dim == 0
    return latent_ratio(num_heads) if is_latent else next_power(num_heads // group.num_kv_heads)


def _carried(
    chunks: Sequence[Chunk], frame: Frame, room: Room | None
) -> tuple[Tiles | None, Tiles | None]:
    """Adapters of all rows, and of the sampled ones."""
    if room is not None:
        if not room.with_adapters:
            return None, None
        tiles = carried_by_any(chunks, frame.tables.places(), frame.arena)
        return tiles, tiles
    if not any(chunk.adapters for chunk in chunks):
        return None, None
    places = frame.tables.places()
    require_loaded(chunks, places)
    counts = [len(chunk.token_ids) for chunk in chunks]
    sampled = [int(chunk.sample is not None) for chunk in chunks]
    own, theirs = (carried(chunks, each, places, frame.arena) for each in (counts, sampled))
    return own, theirs


def _members(chunks: Sequence[Chunk]) -> list[Member]:
    members, first = [], 0
    for chunk in chunks:
        members.append((chunk, first))
        first += len(chunk.token_ids)
    return members


def _split(members: list[Member]) -> tuple[list[Member], list[Member]]:
    singles = [member for member in members if len(member[0].token_ids) == 1]
    return singles, [member for member in members if len(member[0].token_ids) > 1]


def _sampled(members: list[Member]) -> list[int]:
    return [first + len(chunk.token_ids) - 1 for chunk, first in members if chunk.sample]


def _rotation(rope: RopeSpec, frame: Frame, positions: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = rotation(rope, frame.layout.ropes[rope], positions)
    return frame.arena.put(cos), frame.arena.put(sin)


def _slots(chunks: Sequence[Chunk], group: int, frame: Frame) -> Tensor:
    slots = [slot for chunk in chunks for slot in slots_of(chunk, group, frame.layout.block_size)]
    return frame.arena.ints(slots, torch.int64)


def _all_queries(
    split: list[list[Member]], groups: Sequence[int], frame: Frame, room: Room | None
) -> dict[int, tuple[Queries, ...]]:
    """By group, with the tables of all in one tensor."""
    tables = _Tables()
    found = {
        i: [_queries(part, (i, frame.ratios[i]), frame.arena, tables) for part in split]
        for i in groups
        if i in frame.ratios
    }
    blocks = frame.arena.ints(tables.blocks)
    if room is not None:
        found = {
            i: [replace(each, max_keys=room.max_keys) for each in parts]
            for i, parts in found.items()
        }
    return {i: tuple(replace(q, tables=blocks) for q in parts) for i, parts in found.items()}


def _queries(
    members: list[Member], group: tuple[int, int], arena: Arena, tables: _Tables
) -> Queries:
    """Without the tables themselves. ``group``: its index and ratio."""
    chunks = [chunk for chunk, _ in members]
    lengths = [len(chunk.token_ids) for chunk in chunks]
    block_q = queries_per_tile(group[1], max(lengths) == 1)
    tile_starts = [0]
    for length in lengths:
        tile_starts.append(tile_starts[-1] - (-length // block_q))
    first_rows = arena.ints([first for _, first in members])
    return Queries(
        first_rows=first_rows,
        starts=arena.ints([chunk.start for chunk in chunks]),
        lengths=arena.ints(lengths),
        tables=first_rows,
        table_starts=arena.ints([tables.add(chunk.block_tables[group[0]]) for chunk in chunks]),
        max_length=max(lengths),
        max_keys=max(chunk.end for chunk in chunks),
        num_tiles=tile_starts[-1],
        tile_starts=arena.ints(tile_starts),
    )


def _runs(members: list[Member], group: int, arena: Arena) -> Runs:
    chunks = [chunk for chunk, _ in members]
    lengths = [len(chunk.token_ids) for chunk in chunks]
    return Runs(
        first_rows=arena.ints([first for _, first in members]),
        starts=arena.ints([chunk.start for chunk in chunks]),
        lengths=arena.ints(lengths),
        slots=arena.ints([chunk.block_tables[group][0] for chunk in chunks], torch.int64),
        max_length=max(lengths),
    )


def padded(batch: Batch, padding: Chunk, size: int) -> Batch:
    """With as many chunks as ``size``."""
    rest = (padding,) * (size - len(batch.chunks))
    return evolve(batch, chunks=batch.chunks + rest)
