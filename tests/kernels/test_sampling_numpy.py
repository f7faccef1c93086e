"""The numpy rules against the naive filters, and where they meet the limits of numbers."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from harness.naive_sampling import BANNED, VOCAB, Close, Row, naive, rows, vocabularies
from kvtrio.kernels import sampling_numpy as kernels


def filters(each: list[Row]) -> kernels.Filters:
    def column(values: list[float]) -> kernels.Floats:
        return np.array(values)[:, None]

    return kernels.Filters(
        typical_p=column([row.typical_p for row in each]),
        top_p=column([row.top_p if row.top_p < 1 else math.inf for row in each]),
        min_gap=column([math.log(row.min_p) if row.min_p else -math.inf for row in each]),
        temperature=column([row.temperature for row in each]),
        draw=column([row.draw for row in each]),
    )


def choose(logits: list[list[float]], each: list[Row]) -> list[int]:
    """Rank every row, then the filters on all of them together."""
    values = np.full((len(each), VOCAB), BANNED)
    ids = np.zeros((len(each), VOCAB), np.int64)
    for n, (raw, row) in enumerate(zip(logits, each, strict=True)):
        line = np.array(raw, np.float32)
        ranked, places = kernels.best(line, min(row.top_k or VOCAB, len(raw)))
        values[n, : len(ranked)], ids[n, : len(ranked)] = ranked, places
        if row.top_n_sigma > 0:
            values[n, values[n] < kernels.sigma_floor(line, row.top_n_sigma)] = BANNED
    return kernels.choose(values, ids, filters(each)).tolist()


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
@given(vocabularies, st.integers(1, VOCAB))
def test_best_ranks_by_value_then_id(logits, count):
    """The best few are exact even among equals, and 0 equals -0."""
    line = np.array(logits, np.float32)
    line[::2] *= np.float32(-1) * (line[::2] == 0) + (line[::2] != 0)
    ranked, ids = kernels.best(line, count)
    order = sorted(range(VOCAB), key=lambda i: (-logits[i], i))[:count]
    assert ids.tolist() == order
    assert ranked.tolist() == [logits[i] for i in order]


def test_the_largest_draw_takes_a_token_that_can_be_drawn():
    """A draw that rounds to the whole still ends at the last token with a chance."""
    row = Row(draw=1.0 - 2.0**-53)
    assert choose([[5.0, 4.0, BANNED, -2000.0]], [row]) == [1]


def test_a_tiny_temperature_is_greedy_and_harmless():
    """Dividing by almost nothing leaves the best token, without a NaN or a warning."""
    assert choose([[1.0, 50.0, -50.0]], [Row(temperature=5e-324, draw=0.999)]) == [1]


def test_edits_add_bias_before_penalties():
    """Bias adds up; then seen logits shrink towards unlikely by sign, and lose the offset."""
    edits = kernels.Edits(
        ids=np.array([0, 1, 2]),
        bias_places=np.array([0, 0, 2]),
        bias=np.array([1.0, 1.0, BANNED], np.float32),
        repeat=np.array([2.0, 2.0, 1.0], np.float32),
        offset=np.array([0.5, 0.0, 0.0], np.float32),
    )
    raw = np.array([2.0, -2.0, 1.0, 9.0], np.float32)
    assert kernels.edited(raw[:3], edits, 4).tolist() == [1.5, -4.0, BANNED]
    assert kernels.edited_row(raw, edits).tolist() == [1.5, -4.0, BANNED, 9.0]
    assert raw.tolist() == [2.0, -2.0, 1.0, 9.0]


def test_edits_that_overflow_are_clamped():
    """A bias near the largest number and a tiny penalty leave numbers that rank."""
    edits = kernels.Edits(
        ids=np.array([0, 1]),
        bias_places=np.array([0]),
        bias=np.array([3e38], np.float32),
        repeat=np.array([1e-10, 1.0], np.float32),
        offset=np.array([0.0, 3e38], np.float32),
    )
    out = kernels.edited(np.array([1.0, -3e38], np.float32), edits, 4)
    assert out.tolist() == [pytest.approx(3.4028235e38), BANNED]


def test_log_sum_is_exact_for_large_logits():
    """The largest logit is taken out first."""
    assert kernels.log_sum(np.array([1000.0, 1000.0], np.float32)) == pytest.approx(
        1000 + math.log(2)
    )
