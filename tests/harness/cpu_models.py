"""The cpu backend with small random models and with model files."""

from pathlib import Path

import pytest

from harness.native import chosen_isa
from harness.torch_models import random_file, settings
from kvtrio.backends.base import BackendSettings
from kvtrio.backends.cpu_backend import CpuBackend
from kvtrio.kernels.cpu_library import LibraryMissing, load_library
from kvtrio.model.architectures import read_spec
from kvtrio.model.gguf_file import open_gguf
from kvtrio.model.spec import ModelSpec


def cpu_settings(**changes: object) -> BackendSettings:
    """Room for a few short requests; K and V as they are computed, on two threads."""
    chosen: dict[str, object] = {"num_threads": 2, "key_type": "f32", "value_type": "f32"}
    return settings(**(chosen | changes))


def require_kernels() -> None:
    """Skip a test where no kernels are built."""
    try:
        load_library()
    except LibraryMissing as error:
        pytest.skip(error.reason)


def load_cpu(path: Path, **changes: object) -> CpuBackend:
    """The cpu backend with a model file."""
    require_kernels()
    with open_gguf(path) as file:
        return CpuBackend.load(file, read_spec(file), cpu_settings(**changes))


def random_cpu(model: ModelSpec, isa: str = "", **changes: object) -> CpuBackend:
    """The cpu backend with the weights of ``random_file``; ``isa``: the best if empty."""
    require_kernels()
    if not isa:
        return CpuBackend.load(random_file(model), model, cpu_settings(**changes))
    with chosen_isa(isa):
        return CpuBackend.load(random_file(model), model, cpu_settings(**changes))
