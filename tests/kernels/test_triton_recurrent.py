"""Triton's recurrent kernels against the reference, in the interpreter."""

import pytest
import torch
import torch.nn.functional as F

from kvtrio.kernels import reference_recurrent as recurrent
from kvtrio.kernels.reference_delta_net import delta_rule as reference_rule
from kvtrio.kernels.reference_delta_net import unit_length
from kvtrio.kernels.reference_mamba2 import state_space as reference_space
from kvtrio.kernels.triton_mamba2 import SpaceShape, state_space
from kvtrio.kernels.triton_recurrent import DeltaShape, Runs, causal_conv, delta_rule

pytestmark = pytest.mark.slow  # each program of a grid runs in Python

CHUNKS = ((0, 5), (9, 1), (7, 2), (0, 1), (60, 70))
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def runs(chunks: tuple[tuple[int, int], ...]) -> Runs:
    """(start, rows) each, in slots of any order."""
    firsts = [sum(n for _, n in chunks[:i]) for i in range(len(chunks))]

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    starts, lengths = [s for s, _ in chunks], [n for _, n in chunks]
    slots = torch.arange(len(chunks), 0, -1)
    return Runs(ints(firsts), ints(starts), ints(lengths), slots, max(lengths))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("has_bias", "silu"), [(True, True), (False, False)])
def test_convolutions_go_on_from_the_rows_before(has_bias, silu):
    """Through chunks shorter and longer than what a state keeps, and from nothing."""
    num_rows, channels, width = sum(n for _, n in CHUNKS), 10, 4
    x, weight = random(num_rows, channels), random(channels, width, seed=1)
    bias = random(channels, seed=2) if has_bias else None
    states = random(len(CHUNKS) + 1, 99, seed=3)
    history = states[:, :30].unflatten(-1, (3, channels))
    wanted = history.clone()
    out = causal_conv(x, weight, bias, history, runs(CHUNKS), silu)
    first = 0
    for i, (start, length) in enumerate(CHUNKS):
        slot = len(CHUNKS) - i
        before = wanted[slot : slot + 1] * (start > 0)
        own = x[None, first : first + length]
        expected, wanted[slot] = recurrent.causal_conv(own, weight, bias, before)
        expected = F.silu(expected) if silu else expected
        torch.testing.assert_close(out[None, first : first + length], expected, **CLOSE)
        first += length
    torch.testing.assert_close(history, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("chunks", [CHUNKS[:1] + CHUNKS[2:3] + CHUNKS[4:], ((3, 1), (0, 1))])
def test_the_delta_rule_row_by_row_and_in_pieces(chunks, repeats):
    """Single rows and chunks over borders of pieces; also where one key comes again and again."""
    num_rows, heads, k, v = sum(n for _, n in chunks), 2, 6, 20
    keys = unit_length(random(num_rows, heads, k, seed=1), 1e-6)
    if repeats:
        keys = keys[:1].expand(num_rows, heads, k).contiguous()
    decay = -0.01 * random(num_rows, heads, seed=2).abs()
    beta = random(num_rows, heads, seed=3).sigmoid()
    inputs = (random(num_rows, heads, k), keys, random(num_rows, heads, v, seed=4), decay, beta)
    states = random(len(chunks) + 1, heads, k, v, seed=5)
    wanted, out = states.clone(), torch.empty(num_rows, heads, v)
    delta_rule(inputs, states, runs(chunks), DeltaShape(heads, k, v), out)
    first = 0
    for i, (start, length) in enumerate(chunks):
        slot = len(chunks) - i
        before = wanted[slot : slot + 1] * (start > 0)
        own = tuple(x[None, first : first + length] for x in inputs)
        sizes = recurrent.pieces(start, length)
        expected, wanted[slot] = recurrent.in_pieces(reference_rule, own, before, sizes)
        torch.testing.assert_close(out[None, first : first + length], expected, **CLOSE)
        first += length
    torch.testing.assert_close(states, wanted, **CLOSE)


@pytest.mark.parametrize("chunks", [CHUNKS[:1] + CHUNKS[2:3] + CHUNKS[4:], ((3, 1), (0, 1))])
def test_the_state_space_row_by_row_and_in_pieces(chunks):
    """Single rows and chunks over borders of pieces, with heads that share B and C."""
    num_rows, shape = sum(n for _, n in chunks), SpaceShape(4, 6, 2, 37)
    x, b, c = (random(num_rows, *n, seed=i) for i, n in enumerate(((4, 6), (2, 37), (2, 37))))
    dt, decay = random(num_rows, 4, seed=3).abs(), -0.05 * random(num_rows, 4, seed=4).abs()
    skip, states = random(4, 1, seed=5), random(len(chunks) + 1, 4, 6, 37, seed=6)
    wanted, out = states.clone(), torch.empty(num_rows, 4, 6)
    joined = torch.cat([part.flatten(1) for part in (x, b, c)], -1)
    state_space((joined, dt, decay), skip, states, runs(chunks), shape, out)
    first = 0
    for i, (start, length) in enumerate(chunks):
        slot, part = len(chunks) - i, slice(first, first + length)
        before = wanted[slot : slot + 1] * (start > 0)
        own = tuple(each[None, part] for each in (x * dt[..., None], b, c, decay))
        sizes = recurrent.pieces(start, length)
        expected, wanted[slot] = recurrent.in_pieces(reference_space, own, before, sizes)
        torch.testing.assert_close(out[None, part], expected + x[part] * skip, **CLOSE)
        first += length
    torch.testing.assert_close(states, wanted, **CLOSE)
