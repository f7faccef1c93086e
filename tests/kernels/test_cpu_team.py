"""The thread pool as Python sees it; ``native/stress.cpp`` looks closer."""

import ctypes

import numpy as np
import pytest

from harness.kernel_calls import kernels
from harness.native import isas, library
from kvtrio.kernels import cpu_abi as abi


@pytest.fixture(params=isas())
def cdll(request: pytest.FixtureRequest) -> ctypes.CDLL:
    found = library(request.param).cdll
    abi.declare(found)
    return found


@pytest.mark.parametrize("num_threads", [-1, 0, 1025])
def test_impossible_teams_are_refused(cdll: ctypes.CDLL, num_threads: int) -> None:
    """An error with a text, and no team."""
    team = ctypes.c_void_p()
    assert cdll.kvt_team_new(num_threads, ctypes.byref(team)) < 0
    assert b"threads" in cdll.kvt_error_text()
    assert not team


def test_teams_come_and_go(cdll: ctypes.CDLL) -> None:
    """Threads that have not begun, that spin, and that were woken for nothing all end."""
    for num_threads in (1, 2, 5):
        team = ctypes.c_void_p()
        abi.check(cdll, cdll.kvt_team_new(num_threads, ctypes.byref(team)))
        cdll.kvt_team_wake(team)
        cdll.kvt_team_free(team)
    cdll.kvt_team_free(None)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_all_threads_meet(isa: str, num_threads: int) -> None:
    """Barriers pass with fewer and with more threads than cores."""
    with kernels(isa, num_threads) as native:
        native.sample(np.zeros((3, 20_000), np.float32), [1, 1, 1])
        native.sample(np.zeros((1, 10), np.float32), [10])


@pytest.mark.slow
@pytest.mark.parametrize("isa", isas())
def test_a_barrier_has_a_cost(isa: str) -> None:
    """What the measurement reports is a time."""
    with kernels(isa, 2) as native:
        assert 0 < native.cdll.kvt_barrier_nanoseconds(native.team) < 1e9


@pytest.mark.parametrize("isa", isas())
def test_memory_is_zeroed_and_aligned(isa: str) -> None:
    """Small and large pieces; what the system does not have is null and no crash."""
    with kernels(isa) as native:
        for num_bytes in (0, 100, 5 << 20):
            address = native.cdll.kvt_alloc(num_bytes)
            assert address % 64 == 0
            assert not any(ctypes.string_at(address, num_bytes)[:: 1 << 12])
            native.cdll.kvt_free(address, num_bytes)
        assert native.cdll.kvt_alloc(1 << 62) is None
        assert native.cdll.kvt_alloc(-1) is None
        native.cdll.kvt_free(None, 0)
