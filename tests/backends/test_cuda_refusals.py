"""Where the cuda backend cannot be had, one line says why."""

import os
import subprocess
import sys

import pytest

CODE = """
import torch
from harness.cuda_models import random_cuda
from harness.torch_models import PLAIN
from kvtrio.backends.base import BackendError
torch.cuda.is_available = lambda: False
try:
    random_cuda(PLAIN)
except BackendError as error:
    print(error)
"""


@pytest.mark.slow
def test_without_a_gpu_one_line_says_so():
    """Not interpreted, as for a user: refused before anything is loaded."""
    paths = [os.path.dirname(os.path.dirname(__file__)), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", CODE],
        env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("backend cuda found no NVIDIA GPU")
    assert done.stdout.count("\n") == 1


@pytest.mark.slow
def test_backends_that_were_not_chosen_load_no_triton():
    """Neither the others nor what they share."""
    code = (
        "import sys, kvtrio.backends.torch_backend, kvtrio.backends.cpu_backend;"
        "import kvtrio.cli.backend;"
        "print('triton' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
