"""Sampling against a naive implementation that looks at one row in plain Python."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from harness.naive_sampling import BANNED, VOCAB, Close, Row, naive, rows, vocabularies
from kvtrio.kernels import sampling as kernels


def filters(rows: list[Row]) -> kernels.Filters:
    def column(name: str, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.tensor([getattr(row, name) for row in rows], dtype=dtype)

    return kernels.Filters(
        top_n_sigma=column("top_n_sigma"),
        top_k=column("top_k", torch.int64),
        typical_p=column("typical_p"),
        top_p=column("top_p"),
        min_p=column("min_p"),
        temperature=column("temperature"),
        draw=column("draw"),
    )


def choose(logits: list[list[float]], rows: list[Row]) -> list[int]:
    return kernels.choose(torch.tensor(logits), filters(rows)).tolist()


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(vocabularies, rows), min_size=1, max_size=4))
def test_choose_equals_the_naive_filters(cases):
    """Every row of a mixed batch gets the token that the plain filters give it."""
    try:
        expected = [naive(logits, row) for logits, row in cases]
    except Close:
        assume(False)
    assert choose([logits for logits, _ in cases], [row for _, row in cases]) == expected


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(vocabularies, rows), min_size=2, max_size=6))
def test_choose_does_not_depend_on_the_other_rows(cases):
    """A row alone and the same row among others give the same token."""
    together = choose([logits for logits, _ in cases], [row for _, row in cases])
    assert together == [choose([logits], [row])[0] for logits, row in cases]


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(vocabularies, st.integers(1, VOCAB)), min_size=1, max_size=4))
def test_best_ranks_by_value_then_id(cases):
    """The best few are exact even among equals, and short rows are padded."""
    logits = torch.tensor([row for row, _ in cases])
    counts = torch.tensor([count for _, count in cases])
    ranked, ids = kernels.best(logits, counts)
    for n, (row, count) in enumerate(cases):
        order = sorted(range(VOCAB), key=lambda i: (-row[i], i))[:count]
        assert ids[n, :count].tolist() == order
        assert ranked[n].tolist() == [row[i] for i in order] + [BANNED] * (
            int(counts.max()) - count
        )


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(vocabularies, min_size=1, max_size=3))
def test_greedy_takes_the_lowest_id_among_the_largest(logits):
    """Equal best logits are decided by id."""
    expected = [row.index(max(row)) for row in logits]
    assert kernels.greedy(torch.tensor(logits)).tolist() == expected


def test_the_largest_draw_takes_a_token_that_can_be_drawn():
    """A draw that rounds to the whole still ends at the last token with a chance."""
    row = Row(draw=1.0 - 2.0**-53)
    assert choose([[5.0, 4.0, BANNED, -2000.0]], [row]) == [1]


def test_draws_are_spread_as_the_softmax_says():
    """Evenly spread draws choose each token as often as its probability, within one draw."""
    logits, count = [1.0, 3.0, 2.0, 0.0], 1000
    chosen = choose([logits] * count, [Row(draw=(n + 0.5) / count) for n in range(count)])
    weights = np.exp(logits)
    for token, chance in enumerate(weights / weights.sum()):
        assert abs(chosen.count(token) - chance * count) <= 1


def test_a_tiny_temperature_is_greedy_and_harmless():
    """Dividing by almost nothing leaves the best token, without a NaN."""
    assert choose([[1.0, 50.0, -50.0]], [Row(temperature=1e-300, draw=0.999)]) == [1]


def edits(bias: list[tuple[int, int, float]], seen: list[tuple[int, int, float, float]]):
    bias_columns = list(zip(*bias, strict=True)) or [(), (), ()]
    seen_columns = list(zip(*seen, strict=True)) or [(), (), (), ()]
    rows, ids = (torch.tensor(column, dtype=torch.int64) for column in bias_columns[:2])
    added = torch.tensor(bias_columns[2], dtype=torch.float32)
    seen_rows, seen_ids = (torch.tensor(column, dtype=torch.int64) for column in seen_columns[:2])
    repeat, offset = (torch.tensor(column, dtype=torch.float32) for column in seen_columns[2:])
    return kernels.Bias(rows, ids, added), kernels.Penalties(seen_rows, seen_ids, repeat, offset)


def test_adjust_adds_bias_before_penalties():
    """Bias adds up; then seen logits shrink towards unlikely by sign, and lose the offset."""
    logits = torch.tensor([[2.0, -2.0, 1.0], [4.0, 4.0, 4.0]])
    before = logits.clone()
    bias, seen = edits(
        [(0, 0, 1.0), (0, 0, 1.0), (0, 2, BANNED)], [(0, 0, 2.0, 0.5), (0, 1, 2.0, 0.0)]
    )
    out = kernels.adjust(logits, bias, seen)
    assert out.tolist() == [[1.5, -4.0, BANNED], [4.0, 4.0, 4.0]]
    assert torch.equal(logits, before)


def test_adjust_survives_extremes():
    """Overflow is clamped, and a row whose every token is banned chooses as if unbiased."""
    logits = torch.tensor([[1.0, 2.0], [3.0, 1.0]])
    bias, seen = edits(
        [(0, 0, 3e38), (1, 0, BANNED), (1, 1, BANNED)], [(0, 0, 1e-10, 0.0), (0, 1, 1.0, 1e38)]
    )
    out = kernels.adjust(logits, bias, seen)
    assert not bool(torch.isnan(out).any())
    assert kernels.greedy(out).tolist() == [0, 0]
    assert choose(out.tolist(), [Row(draw=0.5), Row(draw=0.99)]) == [0, 1]
