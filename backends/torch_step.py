"""A batch as tensors: what differs between rows, worked out once per step for all layers."""

from collections.abc import Mapping

import torch
from attrs import frozen
from torch import Tensor

from kvtrio.backends.groups import LayerGroup
from kvtrio.backends.torch_adapters import NO_ADAPTERS, AdapterRows, Loaded, adapter_rows
from kvtrio.backends.torch_states import StateRun, state_runs
from kvtrio.core.batch import Batch, Chunk, SampleRow
from kvtrio.kernels.reference import rope_angles
from kvtrio.kernels.reference_attention import causal_mask
from kvtrio.model.spec import RopeSpec


@frozen(eq=False)
class Run:
    """Chunks of one length that attention computes together: R chunks of L rows."""

    rows: Tensor
    """int64 [R, L]: rows of the step."""
    blocks: Tensor
    """int64 [R, B]: the blocks that the queries can see, padded by repeating the last."""
    unwritten: Tensor
    """int64: places in all runs' blocks that lie behind the end of their chunk."""
    mask: Tensor
    """Compute type [R, 1, L, B * block_size], added to the scores."""


@frozen(eq=False)
class GroupStep:
    """The step as one group of layers sees it."""

    slots: Tensor
    """int64 [N]: where each row's K and V go."""
    runs: tuple[Run, ...]


@frozen(eq=False)
class TorchStep:
    """One step; tensors are on the model's device."""

    token_ids: Tensor
    """int64 [N]."""
    positions: Tensor
    """int64 [N]."""
    rotations: Mapping[RopeSpec, tuple[Tensor, Tensor]]
    """Per kind of rope cos and sin, float32 [N, num_rotated / 2]."""
    groups: Mapping[int, GroupStep]
    """By index, those with K and V."""
    states: Mapping[int, tuple[StateRun, ...]]
    """By index, the recurrent ones."""
    sampled: Tensor
    """int64 [M]: rows after which a token is sampled."""
    samples: tuple[SampleRow, ...]
    adapters: AdapterRows | None
    """Of the step's rows; None: no row has any."""
    sampled_adapters: AdapterRows | None
    """The same among the M sampled rows."""


@frozen(kw_only=True, eq=False)
class StepLayout:
    """What all steps of a model have in common."""

    groups: tuple[LayerGroup, ...]
    ropes: Mapping[RopeSpec, Tensor | None]
    """The kinds of rope in the model, with their divisors, float [num_rotated / 2]."""
    block_size: int
    dtype: torch.dtype
    device: torch.device


def build_step(
    batch: Batch, layout: StepLayout, loaded: Loaded = NO_ADAPTERS, with_runs: bool = True
) -> TorchStep:
    """``loaded``: the adapters that chunks may name. Without runs groups have slots only.

    Raises IndexError when a block table does not cover its chunk, KeyError for another adapter.
    """
    chunks = batch.chunks
    token_ids = [token for chunk in chunks for token in chunk.token_ids]
    positions = _ints([p for chunk in chunks for p in range(chunk.start, chunk.end)])
    ends = _row_ends(chunks)
    lengths = [len(chunk.token_ids) for chunk in chunks]
    num_sampled = [int(chunk.sample is not None) for chunk in chunks]
    recurrent = [i for i, group in enumerate(layout.groups) if group.state is not None]
    attending = [i for i, group in enumerate(layout.groups) if group.state is None]
    sampled = [end - 1 for chunk, end in zip(chunks, ends, strict=True) if chunk.sample]
    return TorchStep(
        token_ids=_ints(token_ids).to(layout.device),
        positions=positions.to(layout.device),
        rotations={
            rope: _rotated(rope, factors, positions, layout.device)
            for rope, factors in layout.ropes.items()
        },
        groups={i: _group_step(chunks, i, layout, with_runs) for i in attending},
        states={i: state_runs(chunks, i, layout.device) for i in recurrent},
        sampled=_ints(sampled).to(layout.device),
        samples=tuple(chunk.sample for chunk in chunks if chunk.sample),
        adapters=adapter_rows(chunks, lengths, loaded, layout.device),
        sampled_adapters=adapter_rows(chunks, num_sampled, loaded, layout.device),
    )


def _ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _row_ends(chunks: tuple[Chunk, ...]) -> list[int]:
    """Per chunk, the row behind its last."""
    ends, end = [], 0
    for chunk in chunks:
        end += len(chunk.token_ids)
        ends.append(end)
    return ends


def rotation(rope: RopeSpec, factors: Tensor | None, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of each position's angles: int64 [N] to float32 [N, num_rotated / 2], in RAM."""
    angles = rope_angles(positions, rope.num_rotated, rope.base, rope.scale, factors)
    cos, sin = angles.cos() * rope.magnitude, angles.sin() * rope.magnitude
    return cos.float(), sin.float()


def _rotated(
    rope: RopeSpec, factors: Tensor | None, positions: Tensor, device: torch.device
) -> tuple[Tensor, Tensor]:
    cos, sin = rotation(rope, factors, positions)
    return cos.to(device), sin.to(device)


def _group_step(
    chunks: tuple[Chunk, ...], group: int, layout: StepLayout, with_runs: bool
) -> GroupStep:
    slots = [slot for chunk in chunks for slot in slots_of(chunk, group, layout.block_size)]
    if not with_runs:
        return GroupStep(_ints(slots).to(layout.device), ())
    rows: dict[tuple[int, int], list[tuple[Chunk, int]]] = {}
    for i, (chunk, end) in enumerate(zip(chunks, _row_ends(chunks), strict=True)):
        rows.setdefault(_run_key(chunk, i, layout), []).append((chunk, end - len(chunk.token_ids)))
    return GroupStep(
        slots=_ints(slots).to(layout.device),
        runs=tuple(_run(members, group, layout) for members in rows.values()),
    )


def slots_of(chunk: Chunk, group: int, block_size: int) -> list[int]:
    """Where each of its rows goes. Raises IndexError when its table does not cover it."""
    table = chunk.block_tables[group]
    positions = range(chunk.start, chunk.end)
    return [table[p // block_size] * block_size + p % block_size for p in positions]


def _run_key(chunk: Chunk, index: int, layout: StepLayout) -> tuple[int, int]:
    """Single rows go together when their contexts are alike, so that padding at most doubles the
    work; a longer chunk goes alone."""
    if len(chunk.token_ids) == 1:
        return (0, (chunk.end // layout.block_size).bit_length())
    return (1, index)


def _run(members: list[tuple[Chunk, int]], group: int, layout: StepLayout) -> Run:
    """``members``: chunks of one length, with their first rows."""
    window = layout.groups[group].window
    length = len(members[0][0].token_ids)
    firsts, tables = zip(*(_visible(chunk, group, layout) for chunk, _ in members), strict=True)
    num_blocks = max(map(len, tables))
    blocks = [table + table[-1:] * (num_blocks - len(table)) for table in tables]
    steps = torch.arange(length)
    queries = torch.tensor([chunk.start for chunk, _ in members])[:, None] + steps
    first_key = torch.tensor(firsts) * layout.block_size
    num_keys = num_blocks * layout.block_size
    mask = causal_mask(queries, first_key, num_keys, window)
    ends = torch.tensor([chunk.end for chunk, _ in members])
    unwritten = (first_key[:, None] + torch.arange(num_keys) >= ends[:, None]).flatten().nonzero()
    return Run(
        rows=(torch.tensor([row for _, row in members])[:, None] + steps).to(layout.device),
        blocks=torch.tensor(blocks).to(layout.device),
        unwritten=unwritten.flatten().to(layout.device),
        mask=mask.to(layout.device, layout.dtype),
    )


def _visible(chunk: Chunk, group: int, layout: StepLayout) -> tuple[int, tuple[int, ...]]:
    """Index of the first block that some query sees, and the blocks from there on."""
    window = layout.groups[group].window
    oldest = 0 if window is None else max(0, chunk.start - window + 1)
    first = oldest // layout.block_size
    last = (chunk.end - 1) // layout.block_size
    table = chunk.block_tables[group][first : last + 1]
    return first, tuple(table)
