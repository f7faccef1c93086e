"""Copies of blocks in one launch, in the interpreter."""

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from kvtrio.kernels.triton_blocks import Pairs, Places, copy_parts

pytestmark = pytest.mark.slow  # each program of a grid runs in Python


@pytest.mark.parametrize(
    ("dtype", "dim"), [(torch.float32, 5), (torch.bfloat16, 8), (torch.bfloat16, 3)]
)
def test_parts_go_where_they_are_told_and_nothing_else_changes(dtype, dim):
    """Into memory of another order of layers and places, in words of two bytes or four."""
    source = torch.randn(3, 6, 16, 1, dim).to(dtype)
    target = torch.randn(5, 3, 16, 1, dim).to(dtype).transpose(0, 1)
    wanted = target.clone()
    wanted[:, 4] = source[:, 2]
    wanted[:, 0, :4] = source[:, 5, :4]
    of, to = Places.of(source), Places.of(target)
    words = [n * dim * source.itemsize // of.words.itemsize for n in (16, 4)]
    sources, targets = torch.tensor([2, 5]), torch.tensor([4, 0])
    copy_parts(of, to, Pairs(sources, targets, torch.tensor(words, dtype=torch.int32)))
    assert torch.equal(target, wanted)


def test_no_copies_are_no_launch():
    """A step without moves launches nothing."""
    nothing = torch.tensor([], dtype=torch.int64)
    places = Places.of(torch.zeros(1, 2, 16, 1, 4))
    copy_parts(places, places, Pairs(nothing, nothing, nothing.int()))


def test_no_state_has_more_pieces_than_a_launch_may_have(monkeypatch):
    """One of 400 MB: only the first axis of a grid goes beyond 65535."""
    grids = []
    run = lambda kernel, *args, grid, **kw: grids.append(grid)  # noqa: E731
    monkeypatch.setattr(InterpretedFunction, "run", run)
    states = Places(torch.empty(1, 2, 100_000 << 10, dtype=torch.int32, device="meta"))
    pairs = Pairs(*(torch.empty(1, dtype=torch.int64, device="meta"),) * 3)
    copy_parts(states, states, pairs)
    assert grids == [(100_000, 1, 1)]
