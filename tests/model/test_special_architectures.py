"""Specs of architectures with fused tensors, latent attention, sinks or factors by context."""

from pathlib import Path

import pytest

from kvtrio.backends.base import BackendError
from kvtrio.backends.cpu_model import require_kernels
from kvtrio.backends.groups import layer_groups
from kvtrio.model.architectures import read_spec
from kvtrio.model.gguf_file import open_gguf
from kvtrio.model.spec import ModelSpec
from kvtrio.model.tensors import needed_tensors


def load(path: Path) -> ModelSpec:
    with open_gguf(path) as file:
        return read_spec(file)


@pytest.mark.parametrize("name", ["deepseek2", "gpt-oss", "glm4moe", "phi3"])
def test_tiny_models_of_special_architectures(shared, name):
    """The same of those with fused, latent or biased tensors."""
    with open_gguf(shared / "tiny" / "models" / f"{name}.gguf") as file:
        assert set(needed_tensors(read_spec(file))) == set(file.tensors)


@pytest.mark.parametrize(
    ("name", "classes", "sizes"),
    [
        ("phi3", ["TOKEN"], [4 * 2 * 2 * 16]),
        ("gpt-oss", ["WINDOW", "TOKEN"], [2 * 2 * 2 * 16] * 2),
        ("glm4moe", ["TOKEN"], [4 * 2 * 2 * 16]),
        ("deepseek2", ["TOKEN"], [4 * 40]),
    ],
)
def test_what_a_token_leaves(shared, name, classes, sizes):
    """Values in all layers of a group; of latent attention one row, and not K and V."""
    groups = layer_groups(load(shared / "tiny" / "models" / f"{name}.gguf"))
    assert [group.state_class.name for group in groups] == classes
    assert [group.values_per_token() for group in groups] == sizes


def test_the_context_decides_between_rope_factors(shared):
    """Long ones beyond the original context: another spec, so another identity of all state."""
    spec = load(shared / "tiny" / "models" / "phi3.gguf")
    factors = {
        context: {layer.attention.rope.factors for layer in spec.for_context(context).layers}
        for context in (1024, 1025)
    }
    assert factors == {1024: {"rope_factors_short.weight"}, 1025: {"rope_factors_long.weight"}}
    assert spec.for_context(1024).for_context(4096) == spec.for_context(1024)
    assert repr(spec.for_context(1024)) != repr(spec.for_context(1025))
    assert set(needed_tensors(spec.for_context(1024))) < set(needed_tensors(spec))


@pytest.mark.parametrize("name", ["gpt-oss", "glm4moe", "deepseek2"])
def test_models_without_compiled_kernels(shared, name):
    """Backend cpu refuses what it does not compute, so that torch serves it."""
    with pytest.raises(BackendError, match="has no kernels"):
        require_kernels(load(shared / "tiny" / "models" / f"{name}.gguf"))
