"""Triton's paged attention against float64, row by row, in the interpreter."""

from dataclasses import replace

import pytest
import torch
from attrs import evolve

from harness.triton_queries import Ragged, ragged
from kvtrio.kernels import triton_attention
from kvtrio.kernels.triton_attention import Shape, attend

pytestmark = pytest.mark.slow  # each program of a grid runs in Python

MIXED = ((0, 21), (40, 1), (17, 5), (33, 1), (0, 1))
SHAPE = Shape(num_heads=4, num_kv_heads=2, head_dim=8, value_dim=8, scale=0.4)
SHAPES = {
    "plain": SHAPE,
    "three heads of one": Shape(3, 1, 12, 20, 0.3),
    "window": Shape(4, 2, 8, 8, 0.4, window=7),
    "soft-cap": Shape(2, 2, 8, 8, 0.4, softcap=5.0),
}


def computed(batch: Ragged, shape: Shape, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Single rows by one launch and longer chunks by another, as the backend does."""
    out = batch.q.new_full((*batch.q.shape[:2], shape.value_dim), float("nan"))
    singles = [i for i, (_, length) in enumerate(batch.chunks) if length == 1]
    longer = [i for i, (_, length) in enumerate(batch.chunks) if length > 1]
    for chosen in filter(None, (singles, longer)):
        queries = batch.queries(shape, chosen)
        attend(batch.q, (batch.keys, batch.values), queries, shape, out, sinks)
    return out


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_ragged_batches(shape, has_sinks):
    """Prompts and decoding rows, over scattered blocks."""
    batch = ragged(shape, MIXED)
    sinks = torch.linspace(-1, 2, shape.num_heads) if has_sinks else None
    expected = batch.expected(shape, sinks)
    torch.testing.assert_close(computed(batch, shape, sinks).double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("places", [16, 32, 64])
def test_block_sizes_and_bfloat16(places):
    """Blocks of 16 to 64 tokens, in the type that a GPU computes in."""
    batch = ragged(SHAPE, ((0, 70), (65, 1)), places=places, dtype=torch.bfloat16)
    out = computed(batch, SHAPE).double()
    torch.testing.assert_close(out, batch.expected(SHAPE), rtol=0, atol=0.03)


@pytest.mark.parametrize("most", [2, 32])
@pytest.mark.parametrize("window", [None, 40])
def test_segments_of_a_decoding_row(window, most, monkeypatch):
    """Keys beyond one segment are added in the order of segments, to any length; of long rows the
    segments are longer."""
    monkeypatch.setattr(triton_attention, "SEGMENT", 32)
    monkeypatch.setattr(triton_attention, "MOST_SEGMENTS", most)
    shape = Shape(4, 2, 8, 8, 0.4, window=window)
    batch = ragged(shape, ((0, 1), (31, 1), (32, 1), (110, 1)))
    sinks = torch.linspace(-1, 2, 4)
    expected = batch.expected(shape, sinks)
    torch.testing.assert_close(computed(batch, shape, sinks).double(), expected, rtol=0, atol=1e-5)


def test_a_decoding_row_has_the_same_bits_in_any_company():
    """Alone, and beside others."""
    batch = ragged(SHAPE, MIXED)
    whole = computed(batch, SHAPE)
    out = torch.empty_like(whole)
    attend(batch.q, (batch.keys, batch.values), batch.queries(SHAPE, [1]), SHAPE, out)
    assert torch.equal(out[21], whole[21])


def test_room_for_longer_rows_changes_nothing():
    """A launch that may stand for any row up to a length gives the bits of a fitting one."""
    batch = ragged(SHAPE, ((0, 1), (90, 1)))
    fitting, roomy = torch.empty_like(batch.q), torch.empty_like(batch.q)
    queries = batch.queries(SHAPE)
    cache = (batch.keys, batch.values)
    attend(batch.q, cache, queries, SHAPE, fitting)
    attend(batch.q, cache, replace(queries, max_keys=100_000), SHAPE, roomy)
    assert torch.equal(fitting, roomy)


def test_a_prompt_may_be_cut_anywhere():
    """In the interpreter up to rounding: numpy's own product depends on a row's place in a tile."""
    batch = ragged(SHAPE, MIXED)
    cut = evolve(
        batch, chunks=((0, 9), (9, 12), *MIXED[1:]), tables=(batch.tables[0], *batch.tables)
    )
    torch.testing.assert_close(computed(cut, SHAPE), computed(batch, SHAPE), rtol=0, atol=1e-6)


def test_what_is_outside_a_window_is_not_read():
    """Its blocks may hold anything, somebody else's infinities for one."""
    shape = Shape(4, 2, 8, 8, 0.4, window=7)
    batch = ragged(shape, ((60, 4), (50, 1)))
    expected = computed(batch, shape)
    for table, oldest in zip(batch.tables, (54, 44), strict=True):
        for block in table[: oldest // 16]:
            batch.keys[block] = batch.values[block] = float("inf")
    assert torch.equal(computed(batch, shape), expected)
