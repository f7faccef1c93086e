"""The cuda backend's kernels on a GPU. Set TRITON_INTERPRET=0; tests/bench/gpu.py does the rest."""

import pytest
import torch

from harness.gpu_checks import CHECKS, Where, checked
from harness.gpu_memory import memory_checks
from kvtrio.kernels.triton_common import is_interpreted

pytestmark = pytest.mark.gpu


def test_every_kernel_is_right():
    """Against float64, on fresh random inputs."""
    if is_interpreted() or not torch.cuda.is_available():
        pytest.skip("no GPU, or TRITON_INTERPRET is not 0")
    found = list(checked(Where("cuda", torch.seed() % (1 << 30))))
    assert len(found) == len(CHECKS)
    assert [check for check in found if not check.error <= check.limit] == []


def test_memory_is_kept_in_order_and_within_its_part():
    """Moves, layers on two devices, a step that does not fit, and what is taken in all."""
    if is_interpreted() or not torch.cuda.is_available():
        pytest.skip("no GPU, or TRITON_INTERPRET is not 0")
    found = memory_checks(Where("cuda", torch.seed() % (1 << 30)))
    assert [check for check in found if not check.error <= check.limit] == []
