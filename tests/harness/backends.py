"""Backends that compute, as one suite sees them: how each is made, and what it promises of bits."""

from collections.abc import Callable, Mapping
from typing import Any

from attrs import frozen

from harness.cpu_models import cpu_settings, random_cpu, require_kernels
from harness.torch_models import (
    MODELS,
    RandomFile,
    random_backend,
    settings,
)
from kvtrio.backends.cpu_backend import CpuBackend
from kvtrio.backends.torch_backend import TorchBackend
from kvtrio.model.spec import ModelSpec

CLOSE = {"rtol": 0.0, "atol": 1e-4}
SAME = {"rtol": 0.0, "atol": 0.0}


@frozen
class Kind:
    """One backend under test, with weights and cache in float32 unless a setting says otherwise."""

    name: str
    make: Callable[..., Any]
    """(model, settings...): with the weights of ``random_file``."""
    load: Callable[[RandomFile, ModelSpec], Any]
    models: Mapping[str, ModelSpec]
    """Those that it computes."""
    alike: Mapping[str, float]
    """How close a row is to itself in other chunks and other company, without recurrent layers."""
    usual: Mapping[str, object]
    """Settings as users have them, where float32 is not the default."""
    memory: str
    """The function that it asks how much there is, by name; ``free`` makes another of it."""
    free: Callable[[int], Callable[..., int]]

    def alike_in(self, name: str) -> Mapping[str, float]:
        """The same in any of its models: the chunks of recurrent layers decide bits."""
        return CLOSE if self.models[name].has_states else self.alike


def _load_torch(file: RandomFile, model: ModelSpec) -> TorchBackend:
    return TorchBackend.load(file, model, settings())


def _load_cpu(file: RandomFile, model: ModelSpec) -> CpuBackend:
    require_kernels()
    return CpuBackend.load(file, model, cpu_settings())


TORCH = Kind(
    name="torch",
    make=random_backend,
    load=_load_torch,
    models=MODELS,
    alike=CLOSE,
    usual={},
    memory="kvtrio.backends.torch_backend.available_memory",
    free=lambda size: lambda device: size,
)
CPU = Kind(
    name="cpu",
    make=random_cpu,
    load=_load_cpu,
    models=MODELS,
    alike=SAME,
    usual={"key_type": "f16", "value_type": "f16"},
    memory="kvtrio.backends.cpu_sizing.ram_available",
    free=lambda size: lambda: size,
)
KINDS = {kind.name: kind for kind in (TORCH, CPU)}
CASES = [(kind, name) for kind in KINDS for name in KINDS[kind].models]
"""(backend, model): all that any computes."""
