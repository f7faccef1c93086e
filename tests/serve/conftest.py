"""Fixtures for the tests of the HTTP layer."""

import pytest
from trio.testing import MockClock


@pytest.fixture
def ticking_clock() -> MockClock:
    """A mock clock at the pace of the real one: the sim stack beside real sockets."""
    return MockClock(rate=1.0)
