"""Copies of blocks in one launch, in the interpreter."""

import pytest
import torch

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
