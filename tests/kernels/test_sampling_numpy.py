"""The numpy rules against the naive filters, and where they meet the limits of numbers."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from harness.naive_sampling import BANNED, VOCAB, Close, Row, naive, rows, vocabularies
from kvtrio.kernels import sampling_numpy as kernels


def choose(logits: list[float], row: Row) -> int:
    """Rank the row, then the filters on it, in both ways where both can."""
    line = np.array(logits, np.float32)
    ranked, ids = kernels.best(line, min(row.top_k or VOCAB, len(logits)))
    if row.top_n_sigma > 0:
        kept = ranked >= kernels.sigma_floor(line, row.top_n_sigma)
        ranked, ids = ranked[kept], ids[kept]
    filters = kernels.Filters(
        row.typical_p,
        row.top_p,
        math.log(row.min_p) if row.min_p else -math.inf,
        row.temperature,
        row.draw,
    )
    token = kernels.choose(ranked.astype(np.float64), ids, filters)
    if row.typical_p >= 1:
        assert kernels.choose_of_few(ranked.tolist(), ids.tolist(), filters) == token
    return token


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(vocabularies, rows)
def test_choose_equals_the_naive_filters(logits, row):
    """Few or many, the candidates give the token that the plain filters give."""
    try:
        expected = naive(logits, row)
    except Close:
        assume(False)
    assert choose(logits, row) == expected


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
    assert choose([5.0, 4.0, BANNED, -2000.0], row) == 1


def test_a_tiny_temperature_is_greedy_and_harmless():
    """Dividing by almost nothing leaves the best token, without a NaN or a warning."""
    assert choose([1.0, 50.0, -50.0], Row(temperature=5e-324, draw=0.999)) == 1


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
