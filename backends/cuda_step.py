"""A batch as the cuda backend's kernels take it."""

from collections.abc import Mapping, Sequence

import torch
from attrs import asdict, evolve, frozen
from torch import Tensor

from kvtrio.backends.base import BackendError
from kvtrio.backends.cuda_adapters import Carried, carried
from kvtrio.backends.groups import LayerGroup
from kvtrio.backends.torch_step import StepLayout, TorchStep, build_step
from kvtrio.core.batch import Batch, Chunk
from kvtrio.kernels.triton_attention import Queries, queries_per_tile
from kvtrio.kernels.triton_common import next_power
from kvtrio.kernels.triton_recurrent import Runs

Member = tuple[Chunk, int]
"""A chunk, and its first row in the step."""


@frozen(eq=False)
class CudaStep(TorchStep):
    """One step, without what only the reference's attention and adapters want."""

    queries: Mapping[int, tuple[Queries, ...]]
    """By group with K and V: single rows, and longer chunks."""
    runs: Mapping[int, Runs]
    """By recurrent group: all chunks."""
    split_runs: Mapping[int, tuple[Runs, ...]]
    """The same as single rows, and longer chunks."""
    carried: Carried | None
    """Adapters of the step's rows."""
    sampled_carried: Carried | None
    """The same among the sampled rows."""


def build_cuda_step(batch: Batch, layout: StepLayout, ratios: Mapping[int, int]) -> CudaStep:
    """``ratios``: by group, heads of a kv head. Raises IndexError when a block table does not
    cover its chunk."""
    chunks, device = batch.chunks, layout.device
    bare = build_step(_without_adapters(batch), layout, with_runs=False)
    members = _members(chunks)
    split = [part for part in _split(members) if part]
    counts = [len(chunk.token_ids) for chunk in chunks]
    sampled = [int(chunk.sample is not None) for chunk in chunks]
    attending = [i for i, group in enumerate(layout.groups) if group.state is None]
    recurrent = [i for i, group in enumerate(layout.groups) if group.state is not None]
    return CudaStep(
        **asdict(bare, recurse=False),
        queries={
            i: tuple(_queries(part, i, ratios[i], device) for part in split)
            for i in attending
            if i in ratios
        },
        runs={i: _runs(members, i, device) for i in recurrent},
        split_runs={i: tuple(_runs(part, i, device) for part in split) for i in recurrent},
        carried=carried(chunks, counts, device),
        sampled_carried=carried(chunks, sampled, device),
    )


def padded_ratios(groups: Sequence[LayerGroup], heads: Mapping[int, int]) -> dict[int, int]:
    """By group with K and V; ``heads``: query heads by layer.

    Raises BackendError where layers of one group differ in them: they share tiles.
    """
    for group in groups:
        if len({heads[layer] for layer in group.layers if layer in heads}) > 1:
            raise BackendError("backend cuda needs layers alike in heads where K and V are alike")
    return {
        i: next_power(heads[group.layers[0]] // group.num_kv_heads)
        for i, group in enumerate(groups)
        if group.state is None and group.layers
    }


def _without_adapters(batch: Batch) -> Batch:
    if not any(chunk.adapters for chunk in batch.chunks):
        return batch
    return evolve(batch, chunks=tuple(evolve(chunk, adapters=()) for chunk in batch.chunks))


def _members(chunks: Sequence[Chunk]) -> list[Member]:
    members, first = [], 0
    for chunk in chunks:
        members.append((chunk, first))
        first += len(chunk.token_ids)
    return members


def _split(members: list[Member]) -> tuple[list[Member], list[Member]]:
    singles = [member for member in members if len(member[0].token_ids) == 1]
    return singles, [member for member in members if len(member[0].token_ids) > 1]


def _queries(members: list[Member], group: int, ratio: int, device: torch.device) -> Queries:
    chunks = [chunk for chunk, _ in members]
    lengths = [len(chunk.token_ids) for chunk in chunks]
    block_q = queries_per_tile(ratio, max(lengths) == 1)
    tile_starts = [0]
    for length in lengths:
        tile_starts.append(tile_starts[-1] - (-length // block_q))
    tables = [chunk.block_tables[group] for chunk in chunks]
    width = max(map(len, tables))
    padded = [[*table, *[0] * (width - len(table))] for table in tables]
    return Queries(
        first_rows=_ints([first for _, first in members], device),
        starts=_ints([chunk.start for chunk in chunks], device),
        lengths=_ints(lengths, device),
        tables=_ints(padded, device),
        max_length=max(lengths),
        max_keys=max(chunk.end for chunk in chunks),
        num_tiles=tile_starts[-1],
        tile_starts=_ints(tile_starts, device),
    )


def _runs(members: list[Member], group: int, device: torch.device) -> Runs:
    chunks = [chunk for chunk, _ in members]
    lengths = [len(chunk.token_ids) for chunk in chunks]
    return Runs(
        first_rows=_ints([first for _, first in members], device),
        starts=_ints([chunk.start for chunk in chunks], device),
        lengths=_ints(lengths, device),
        slots=torch.tensor([chunk.block_tables[group][0] for chunk in chunks]).to(device),
        max_length=max(lengths),
    )


def _ints(values: object, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).to(device)
