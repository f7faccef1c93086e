"""The checks that ``tests/bench/gpu.py`` makes on a GPU, in the interpreter."""

import pytest

from harness.gpu_checks import CHECKS, Where, checked
from harness.gpu_memory import memory_checks


@pytest.mark.slow
def test_the_checks_for_a_gpu_pass_where_there_is_none():
    """Every kernel against float64; only what numpy's product cannot promise is given room."""
    found = list(checked(Where("cpu", 5)))
    assert len(found) == len(CHECKS)
    assert [check for check in found if not check.error <= max(check.limit, 1e-6)] == []


@pytest.mark.slow
def test_the_checks_of_a_gpus_memory_pass_where_there_is_none():
    """On what stands for one."""
    found = list(memory_checks(Where("cpu", 5)))
    assert len(found) == 4
    assert [check for check in found if not check.error <= check.limit] == []
