"""Draws depend on seed and index alone."""

from hypothesis import given
from hypothesis import strategies as st

from kvtrio.core.sampling import SamplingParams, draw


@given(st.integers(-(2**63), 2**64), st.integers(0, 2**31))
def test_draws_are_repeatable_and_in_range(seed, index):
    """Any seed and index give the same number in [0, 1) each time."""
    assert 0.0 <= draw(seed, index) < 1.0
    assert draw(seed, index) == draw(seed, index)


def test_draws_look_uniform():
    """The mean over neighbouring seeds and indices is near one half."""
    values = [draw(seed, index) for seed in range(50) for index in range(200)]
    assert abs(sum(values) / len(values) - 0.5) < 0.01
    assert len(set(values)) == len(values)


def test_penalties_need_a_window():
    """Without a window of recent tokens there is nothing to penalise."""
    assert SamplingParams(repeat_penalty=1.2).has_penalties
    assert SamplingParams(presence_penalty=0.5).has_penalties
    assert not SamplingParams(repeat_penalty=1.2, repeat_last_n=0).has_penalties
    assert not SamplingParams().has_penalties
