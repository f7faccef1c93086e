"""What a step brings to the device lands in one copy, at addresses that follow from sizes alone."""

import torch

from kvtrio.backends.cuda_arena import Arena
from kvtrio.kernels.triton_common import ALIGNMENT


def filled(arena: Arena, first: int) -> list[torch.Tensor]:
    """Three tensors of two types, on the device behind ``send``."""
    arena.begin()
    parts = [
        arena.ints([first, first + 1, first + 2]),
        arena.put(torch.full((2, 3), float(first))),
        arena.ints(range(first, first + 5), torch.int64),
    ]
    arena.send()
    return parts


def test_values_arrive_when_they_are_sent_and_where_those_before_were():
    """Who kept the tensors of one step reads the next one's values there; all are aligned."""
    arena = Arena(torch.device("cpu"), 1000)
    first, second = filled(arena, 1), filled(arena, 7)
    assert [part.data_ptr() for part in first] == [part.data_ptr() for part in second]
    assert all(part.data_ptr() % ALIGNMENT == first[0].data_ptr() % ALIGNMENT for part in first)
    assert first[0].tolist() == [7, 8, 9]
    assert first[1].tolist() == [[7.0] * 3] * 2
    assert first[2].tolist() == [7, 8, 9, 10, 11]
    arena.begin()
    late = arena.ints([3, 2, 1])
    assert late.tolist() == [7, 8, 9]
    arena.send()
    assert late.tolist() == [3, 2, 1]


def test_what_does_not_fit_goes_by_itself():
    """And is noted until the next step, as no captured one could read it."""
    arena = Arena(torch.device("cpu"), 40)
    parts = filled(arena, 4)
    assert arena.is_overfull
    assert parts[2].tolist() == [4, 5, 6, 7, 8]
    assert parts[0].tolist() == [4, 5, 6]
    assert arena.put(torch.zeros(0)).shape == (0,)
    arena.begin()
    assert not arena.is_overfull
