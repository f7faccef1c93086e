"""What a batch becomes before the layers run."""

import pytest
import torch

from harness.torch_models import GREEDY, WINDOWED
from kvtrio.backends.groups import layer_groups
from kvtrio.backends.torch_step import StepLayout, build_step
from kvtrio.core.batch import Batch, Chunk
from kvtrio.core.types import BlockId, RequestId

LAYOUT = StepLayout(
    groups=layer_groups(WINDOWED),
    ropes={},
    block_size=4,
    dtype=torch.float32,
    device=torch.device("cpu"),
)
FULL, NARROW = 1, 2
"""Groups: everything, and a window of seven."""


def chunk(start: int, num_tokens: int, sampled: bool = True) -> Chunk:
    """Block i of every group has id 100 + i."""
    num_blocks = (start + num_tokens + 3) // 4
    table = tuple(BlockId(100 + i) for i in range(num_blocks))
    tokens = tuple(range(start, start + num_tokens))
    return Chunk(RequestId(start), start, tokens, (table,) * 3, GREEDY if sampled else None)


def test_rows_follow_the_chunks():
    """Tokens, slots and sampled rows are in the order of the batch."""
    step = build_step(Batch(0, (chunk(5, 3), chunk(9, 1), chunk(2, 2, sampled=False))), LAYOUT)
    assert step.token_ids.tolist() == [5, 6, 7, 9, 2, 3]
    assert step.sampled.tolist() == [2, 3]
    assert step.groups[FULL].slots.tolist() == [405, 406, 407, 409, 402, 403]
    assert len(step.samples) == 2


def test_a_window_reads_only_its_blocks():
    """A chunk at 21..22 with a window of seven sees positions 15..22: blocks 3 to 5."""
    step = build_step(Batch(0, (chunk(21, 2),)), LAYOUT)
    assert step.groups[NARROW].runs[0].blocks.tolist() == [[103, 104, 105]]
    assert step.groups[FULL].runs[0].blocks.tolist() == [[100, 101, 102, 103, 104, 105]]


def test_blocks_before_the_window_may_be_gone():
    """The table of a window group is not looked at before the window."""
    whole = chunk(21, 2)
    gone = tuple(BlockId(-1) for _ in range(3))
    narrow = gone + whole.block_tables[NARROW][3:]
    tables = (*whole.block_tables[:NARROW], narrow)
    step = build_step(Batch(0, (Chunk(RequestId(1), 21, (1, 2), tables, None),)), LAYOUT)
    assert step.groups[NARROW].runs[0].blocks.tolist() == [[103, 104, 105]]


def test_single_rows_run_together_padded():
    """Decode rows of similar length share a run; the shorter repeats its last block, unseen."""
    step = build_step(Batch(0, (chunk(17, 1), chunk(0, 6), chunk(28, 1))), LAYOUT)
    runs = step.groups[FULL].runs
    assert [run.rows.tolist() for run in runs] == [[[0], [7]], [[1, 2, 3, 4, 5, 6]]]
    assert runs[0].blocks[0].tolist() == [100, 101, 102, 103, 104, 104, 104, 104]
    assert torch.isfinite(runs[0].mask).sum(-1).flatten().tolist() == [18, 29]


def test_single_rows_of_very_different_length_run_apart():
    """A long context does not make every short row as wide as itself."""
    step = build_step(Batch(0, (chunk(3, 1), chunk(200, 1))), LAYOUT)
    assert [run.blocks.shape[1] for run in step.groups[FULL].runs] == [1, 51]


def test_a_table_that_is_too_short_is_an_error():
    """A chunk without the blocks to write to is a bug, found before anything is written."""
    short = Chunk(RequestId(1), 4, (1,), ((BlockId(0),),) * 3, None)
    with pytest.raises(IndexError):
        build_step(Batch(0, (short,)), LAYOUT)
