"""Specs of architectures with fused tensors, latent attention, sinks or factors by context."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import frozen

from kvtrio.backends.groups import layer_groups
from kvtrio.model.architectures import read_spec
from kvtrio.model.errors import ModelFileError
from kvtrio.model.gguf_file import GGUFFile, TensorInfo, open_gguf
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


@frozen
class Changed:
    """A file with some of its metadata changed."""

    file: GGUFFile
    metadata: dict[str, Any]

    @property
    def path(self) -> Path:
        return self.file.path

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self.file.tensors

    def dequantise(self, name: str) -> np.ndarray:
        return self.file.dequantise(name)


@pytest.mark.parametrize(
    ("name", "key", "value", "says"),
    [
        ("gpt-oss", "rope.scaling.factor", 0.5, "rope.scaling.factor is outside"),
        ("gpt-oss", "rope.scaling.factor", None, "rope.scaling.factor is missing"),
        ("gpt-oss", "rope.freq_base", 1.0, "yarn needs a rope.freq_base above 1"),
        ("gpt-oss", "rope.scaling.type", "longrope", "rope scaling longrope is not supported"),
        ("gpt-oss", "expert_gating_func", 2, "another expert_gating_func than 1"),
        ("gpt-oss", "expert_weights_scale", 2.0, "another expert_weights_scale than 1"),
        ("glm4moe", "expert_gating_func", 9, "expert_gating_func 9 are not supported"),
        ("glm4moe", "expert_group_count", 3, "8 experts do not fit into 3 groups"),
        ("glm4moe", "expert_group_count", 8, "groups of experts of this kind"),
        ("glm4moe", "leading_dense_block_count", 5, "leading_dense_block_count is outside 0 to 4"),
        ("glm4moe", "nextn_predict_layers", 4, "nextn_predict_layers is outside 0 to 3"),
        ("deepseek2", "expert_gating_func", 1, "groups of experts of this kind"),
        ("deepseek2", "attention.key_length_mla", None, "key_length_mla is missing"),
        ("deepseek2", "attention.kv_lora_rank", 31, "has shape"),
        ("deepseek2", "rope.dimension_count", 24, "rope.dimension_count is outside 1 to 23"),
        ("phi3", "attention.head_count_kv", 1, "attn_k.weight has shape"),
    ],
)
def test_numbers_that_make_no_model(shared, name, key, value, says):
    """Each gives one line that names what is wrong."""
    path = shared / "tiny" / "models" / f"{name}.gguf"
    with open_gguf(path) as file:
        metadata = dict(file.metadata) | {f"{name}.{key}": value}
        metadata = {key: value for key, value in metadata.items() if value is not None}
        with pytest.raises(ModelFileError, match=says):
            read_spec(Changed(file, metadata))


def test_layers_that_guess_ahead_are_left_out(shared):
    """They come last, and nobody reads their tensors."""
    with open_gguf(shared / "tiny" / "models" / "glm4moe.gguf") as file:
        metadata = dict(file.metadata) | {"glm4moe.nextn_predict_layers": 1}
        spec = read_spec(Changed(file, metadata))
    assert len(spec.layers) == 3
    assert not any(name.startswith("blk.3.") for name in needed_tensors(spec))
