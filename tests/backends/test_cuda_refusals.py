"""Where the cuda backend cannot be had, one line says why."""

import os
import subprocess
import sys

import pytest
import torch

from kvtrio.backends import cuda_devices
from kvtrio.backends.base import BackendError

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


@pytest.mark.parametrize(
    ("name", "count", "line"),
    [
        ("cuda", 1, "GPU 0 has compute capability 7.5; backend cuda needs 8.0 or more"),
        ("cuda:2", 1, "there is no GPU 2; there are 2"),
        ("cuda", 3, "--tensor-split names 3 GPUs; there are 2"),
        ("cuda:1", 2, "--tensor-split takes the GPUs from the first on: leave --device out"),
        ("xpu", 1, cuda_devices.NO_GPU),
    ],
)
def test_gpus_that_are_too_few_or_too_old_are_refused(name, count, line, monkeypatch):
    """On a machine with two of an old kind."""
    monkeypatch.setattr(cuda_devices, "is_interpreted", lambda: False)
    figures = {"is_available": True, "device_count": 2, "current_device": 0}
    for function, value in figures.items():
        monkeypatch.setattr(torch.cuda, function, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    with pytest.raises(BackendError) as refused:
        cuda_devices.find_devices(name, count)
    assert str(refused.value) == line
