"""States of recurrent layers on the device, and which of them a step reads and writes."""

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from kvtrio.backends.groups import LayerGroup
from kvtrio.core.batch import Chunk
from kvtrio.kernels.reference_recurrent import pieces


@frozen(eq=False)
class StatePool:
    """The slots of one group: float32 [slots, layers, values]; see ``StateShape`` on values."""

    group: LayerGroup
    states: Tensor


@frozen(eq=False)
class StateRun:
    """Chunks of one length that a recurrent layer computes together: R chunks of L rows."""

    rows: Tensor
    """int64 [R, L]: rows of the step."""
    slots: Tensor
    """int64 [R]."""
    is_fresh: Tensor
    """bool [R]: the chunk is its request's first, and whatever the slot holds is not its own."""
    pieces: tuple[int, ...]
    """Sizes of the parts in which the L rows are computed."""


@frozen(eq=False)
class LayerStates:
    """The states of one layer: views of its group's pool."""

    group: int
    history: Tensor
    """float32 [slots, rows, channels]."""
    matrices: Tensor
    """float32 [slots, heads, rows, columns]."""

    def read(self, run: StateRun) -> tuple[Tensor, Tensor]:
        """History [R, rows, channels] and matrices [R, heads, rows, columns], zero where fresh."""
        return (
            self.history[run.slots].masked_fill_(run.is_fresh[:, None, None], 0.0),
            self.matrices[run.slots].masked_fill_(run.is_fresh[:, None, None, None], 0.0),
        )

    def write(self, run: StateRun, history: Tensor, matrices: Tensor) -> None:
        """In place of what ``read`` gave."""
        self.history[run.slots] = history
        self.matrices[run.slots] = matrices


def layer_states(pools: Sequence[object]) -> dict[int, LayerStates]:
    """Per index of a recurrent layer, its part of its group's pool."""
    return {
        layer: _layer_states(i, pool, place)
        for i, pool in enumerate(pools)
        if isinstance(pool, StatePool)
        for place, layer in enumerate(pool.group.layers)
    }


def state_runs(chunks: Sequence[Chunk], group: int, device: torch.device) -> tuple[StateRun, ...]:
    """All single rows together, since states have one size; a longer chunk goes alone.

    Raises IndexError for a chunk without a slot.
    """
    firsts, first = [], 0
    for chunk in chunks:
        firsts.append(first)
        first += len(chunk.token_ids)
    members = list(zip(chunks, firsts, strict=True))
    singles = [member for member in members if len(member[0].token_ids) == 1]
    longer = [[member] for member in members if len(member[0].token_ids) > 1]
    return tuple(_run(run, group, device) for run in ([singles] if singles else []) + longer)


def _run(members: list[tuple[Chunk, int]], group: int, device: torch.device) -> StateRun:
    """``members``: chunks of one length, with their first rows."""
    chunks = [chunk for chunk, _ in members]
    length = len(chunks[0].token_ids)
    rows = torch.tensor([first for _, first in members])[:, None] + torch.arange(length)
    return StateRun(
        rows=rows.to(device),
        slots=torch.tensor([chunk.block_tables[group][0] for chunk in chunks]).to(device),
        is_fresh=torch.tensor([chunk.start == 0 for chunk in chunks]).to(device),
        pieces=pieces(chunks[0].start, length),
    )


def _layer_states(index: int, pool: StatePool, place: int) -> LayerStates:
    shape = pool.group.state
    assert shape is not None
    history, matrices = pool.states[:, place].tensor_split([shape.num_history_values], -1)
    num_slots = len(pool.states)
    return LayerStates(
        index,
        history.view(num_slots, *shape.history),
        matrices.view(num_slots, *shape.matrices),
    )
