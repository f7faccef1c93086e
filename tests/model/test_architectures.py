"""From metadata and tensor index to a ModelSpec."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from model.gguf_builder import (
    HEAD_DIM,
    HIDDEN,
    VOCAB,
    Tensor,
    gguf_bytes,
    scalar,
    tensor,
    tiny_metadata,
    tiny_tensors,
)

from kvtrio.core.types import StateClass
from kvtrio.model.architectures import read_spec
from kvtrio.model.errors import ModelFileError
from kvtrio.model.families import FAMILIES
from kvtrio.model.gguf_file import open_gguf
from kvtrio.model.spec import Activation, ModelSpec, RopeStyle
from kvtrio.model.tensors import needed_tensors

SUPPORTED = ["llama", "qwen2", "qwen3", "gemma3"]
OTHERS = [
    "qwen3moe", "gemma2", "phi3", "gpt-oss", "glm4", "glm4moe", "deepseek2", "olmo2", "granite",
    "granitemoe", "starcoder2", "command-r", "cohere2", "mistral3",
]  # fmt: skip
HYBRIDS = ["qwen35", "qwen3next", "lfm2", "mamba2", "granitehybrid"]


def load(path: Path) -> ModelSpec:
    with open_gguf(path) as file:
        return read_spec(file)


def spec_of(
    folder: Path, architecture: str = "llama", layers: int = 1, **keys: object
) -> ModelSpec:
    """The spec of a tiny model; ``keys`` change its metadata, "__" for "." and None to drop."""
    named = {f"{architecture}.{key.replace('__', '.')}": value for key, value in keys.items()}
    metadata = tiny_metadata(architecture, layers) | named
    metadata = {key: value for key, value in metadata.items() if value is not None}
    path = folder / "model.gguf"
    path.write_bytes(gguf_bytes(metadata, tiny_tensors(architecture, layers)))
    return load(path)


def spec_with(folder: Path, architecture: str, tensors: list[Tensor]) -> ModelSpec:
    path = folder / "model.gguf"
    path.write_bytes(gguf_bytes(tiny_metadata(architecture), tensors))
    return load(path)


def test_the_families():
    """What is supported, and said so in errors."""
    assert set(FAMILIES) == {*SUPPORTED, *OTHERS, *HYBRIDS}


def test_llama(tmp_path):
    """Adjacent pairs are rotated, and nothing is special."""
    spec = spec_of(tmp_path)
    attention = spec.layers[0].attention
    assert (spec.architecture, spec.name) == ("llama", "tiny")
    assert (spec.vocab_size, spec.hidden_size, spec.context_length) == (VOCAB, HIDDEN, 64)
    assert spec.norm_eps == pytest.approx(1e-5)
    assert spec.embedding_scale == 1
    assert spec.tied_output
    assert (attention.num_heads, attention.num_kv_heads) == (2, 1)
    assert attention.head_dim == attention.value_dim == attention.rope.num_rotated == HEAD_DIM
    assert attention.scale == HEAD_DIM**-0.5
    assert attention.rope.style is RopeStyle.NORM
    assert (attention.rope.base, attention.rope.scale, attention.rope.factors) == (1e6, 1, None)
    assert not attention.bias
    assert not attention.qk_norm
    assert not spec.layers[0].post_norms
    assert spec.layers[0].feed_forward.activation is Activation.SILU
    assert spec.layers[0].state_class is StateClass.TOKEN


def test_qwen2_has_biases(tmp_path):
    """Halves are rotated; q, k and v have a bias."""
    attention = spec_of(tmp_path, "qwen2").layers[0].attention
    assert attention.bias
    assert attention.rope.style is RopeStyle.NEOX


def test_qwen3_norms_heads(tmp_path):
    """q and k are normalised per head."""
    attention = spec_of(tmp_path, "qwen3").layers[0].attention
    assert attention.qk_norm
    assert not attention.bias


def test_gemma3(tmp_path):
    """Five sliding layers and a full one; the linear factor is for the full ones only."""
    keys = {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0}
    spec = spec_of(tmp_path, "gemma3", layers=13, **keys)
    assert spec.embedding_scale == HIDDEN**0.5
    for i, layer in enumerate(spec.layers):
        is_full = i in (5, 11)
        assert layer.attention.window == (None if is_full else 16)
        assert layer.state_class is (StateClass.TOKEN if is_full else StateClass.WINDOW)
        assert layer.attention.rope.base == (1e6 if is_full else 1e4)
        assert layer.attention.rope.scale == (1 / 8 if is_full else 1)
        assert layer.attention.qk_norm
        assert layer.post_norms
        assert layer.feed_forward.activation is Activation.GELU_TANH


@pytest.mark.parametrize(
    ("pattern", "full"),
    [
        (3, [2, 5]),
        (1, [0, 1, 2, 3, 4, 5]),
        (0, []),
        (np.array([True, False, True, True, False, True]), [1, 4]),
    ],
)
def test_sliding_pattern_of_the_file(tmp_path, pattern, full):
    """The key holds a period or a flag per layer."""
    spec = spec_of(tmp_path, "gemma3", layers=6, attention__sliding_window_pattern=pattern)
    assert [i for i, layer in enumerate(spec.layers) if layer.attention.window is None] == full


def test_sliding_base_of_the_file(tmp_path):
    """A file may name the base of its sliding layers."""
    spec = spec_of(tmp_path, "gemma3", layers=6, rope__freq_base_swa=5e3)
    assert [layer.attention.rope.base for layer in spec.layers] == [5e3] * 5 + [1e6]


@pytest.mark.parametrize("window", [None, 0])
def test_gemma3_without_a_window(tmp_path, window):
    """No window: every layer is full, with the global base."""
    spec = spec_of(tmp_path, "gemma3", attention__sliding_window=window)
    assert spec.layers[0].attention.window is None
    assert spec.layers[0].attention.rope.base == 1e6


def test_a_window_elsewhere_is_ignored(tmp_path):
    """llama.cpp reads the key for gemma only, although Mistral's converter wrote it."""
    assert spec_of(tmp_path, attention__sliding_window=16).layers[0].attention.window is None


def test_gemma3_27b_scales_by_the_hidden_size(tmp_path):
    """The largest size is known by its layers."""
    spec = spec_of(tmp_path, "gemma3", layers=62)
    assert spec.layers[0].attention.scale == (HIDDEN / 2) ** -0.5


def test_final_softcap(tmp_path):
    """Zero means none."""
    assert spec_of(tmp_path, "gemma3").final_softcap is None
    assert spec_of(tmp_path, "gemma3", final_logit_softcapping=0.0).final_softcap is None
    assert spec_of(tmp_path, "gemma3", final_logit_softcapping=30.0).final_softcap == 30


def test_values_per_layer(tmp_path):
    """Counts may differ from layer to layer."""
    spec = spec_of(
        tmp_path,
        layers=2,
        feed_forward_length=np.array([12, 12], np.uint32),
        attention__head_count=np.array([2, 2], np.int32),
        attention__head_count_kv=np.array([1, 1], np.int32),
    )
    assert [layer.feed_forward.size for layer in spec.layers] == [12, 12]


def test_defaults(tmp_path):
    """Without the keys: as many key heads as heads, base 10000, head size from the hidden size."""
    path = tmp_path / "model.gguf"
    metadata = tiny_metadata("llama")
    del metadata["llama.attention.head_count_kv"], metadata["llama.rope.freq_base"]
    metadata["llama.attention.head_count"] = 1
    tensors = [
        tensor(item.name, np.zeros((8, 8)))
        if "attn_k.w" in item.name or "attn_v.w" in item.name
        else item
        for item in tiny_tensors("llama")
    ]
    path.write_bytes(gguf_bytes(metadata, tensors))
    attention = load(path).layers[0].attention
    assert (attention.num_kv_heads, attention.head_dim, attention.rope.base) == (1, 8, 1e4)


@pytest.mark.parametrize(
    ("keys", "scale"),
    [
        ({}, 1),
        ({"rope__scaling__factor": 4.0}, 0.25),
        ({"rope__scale_linear": 2.0}, 0.5),
        ({"rope__scaling__factor": 0.0, "rope__scale_linear": 2.0}, 0.5),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, 1),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 4}, 0.25),
    ],
)
def test_linear_rope_scaling(tmp_path, keys, scale):
    """Positions are divided by the factor, under its new key or its old one."""
    assert spec_of(tmp_path, **keys).layers[0].attention.rope.scale == scale


def test_rope_factors(tmp_path):
    """Llama 3 brings a divisor per pair."""
    factors = tensor("rope_freqs.weight", np.array([1.0, 8.0]))
    spec = spec_with(tmp_path, "llama", [*tiny_tensors("llama"), factors])
    assert spec.layers[0].attention.rope.factors == "rope_freqs.weight"


@pytest.mark.parametrize("value", [0.0, -1.0, np.inf, np.nan])
def test_rope_factors_that_are_no_divisors(tmp_path, value):
    """A factor of zero would make every angle infinite."""
    factors = tensor("rope_freqs.weight", np.array([1.0, value]))
    with pytest.raises(ModelFileError, match="holds a factor that is not above zero"):
        spec_with(tmp_path, "llama", [*tiny_tensors("llama"), factors])


def test_rope_factors_of_another_architecture(tmp_path):
    """Where nobody would apply them, factors are refused and not ignored."""
    factors = tensor("rope_freqs.weight", np.array([1.0, 8.0]))
    with pytest.raises(ModelFileError, match=r"rope_freqs\.weight is not known"):
        spec_with(tmp_path, "qwen3", [*tiny_tensors("qwen3"), factors])


def test_optional_biases_of_llama(tmp_path):
    """Some llama files have biases; then all of q, k and v must."""
    biases = [
        tensor(f"blk.0.attn_{x}.bias", np.zeros(n)) for x, n in (("q", 8), ("k", 4), ("v", 4))
    ]
    output = tensor("blk.0.attn_output.bias", np.zeros(8))
    tensors = [*tiny_tensors("llama"), *biases, output]
    attention = spec_with(tmp_path, "llama", tensors).layers[0].attention
    assert attention.bias
    assert attention.output_bias
    with pytest.raises(ModelFileError, match=r"blk\.0\.attn_v\.bias is missing"):
        spec_with(tmp_path, "llama", tensors[:-2])


def test_own_output_matrix(tmp_path):
    """A model with an output matrix does not tie it to the embedding."""
    output = tensor("output.weight", np.zeros((VOCAB, HIDDEN)))
    assert not spec_with(tmp_path, "llama", [*tiny_tensors("llama"), output]).tied_output


@pytest.mark.parametrize("architecture", SUPPORTED)
def test_every_tensor_is_needed(tmp_path, architecture):
    """Without any one of its tensors a model is refused, and that tensor is named."""
    tensors = tiny_tensors(architecture)
    for left_out in tensors:
        with pytest.raises(ModelFileError) as caught:
            spec_with(tmp_path, architecture, [item for item in tensors if item is not left_out])
        # The first norm of the last layer stands for the whole layer.
        text = "layer 0" if left_out.name == "blk.0.attn_norm.weight" else left_out.name
        assert text in str(caught.value)
        assert "missing" in str(caught.value)


@pytest.mark.parametrize("architecture", SUPPORTED)
def test_every_shape_is_checked(tmp_path, architecture):
    """A tensor that is one row or value longer is refused."""
    tensors = tiny_tensors(architecture)
    for i, item in enumerate(tensors):
        shape = (item.dims[-1] + 1, *reversed(item.dims[:-1]))
        changed = [*tensors[:i], tensor(item.name, np.zeros(shape)), *tensors[i + 1 :]]
        with pytest.raises(ModelFileError, match=r"has shape|has 5 tokens but 6 embeddings"):
            spec_with(tmp_path, architecture, changed)


def test_transposed_matrix(tmp_path):
    """The same number of values in another shape is not the same matrix."""
    tensors = [
        tensor(item.name, np.zeros((8, 12))) if "ffn_up" in item.name else item
        for item in tiny_tensors("llama")
    ]
    with pytest.raises(ModelFileError, match=r"ffn_up.weight has shape \[8, 12\], not \[12, 8\]"):
        spec_with(tmp_path, "llama", tensors)


def test_type_without_a_formula(tmp_path):
    """A matrix of whole numbers is no matrix of weights."""
    kind = gguf.GGMLQuantizationType.I32.value
    tensors = [
        Tensor(item.name, item.dims, kind, item.data) if "ffn_up" in item.name else item
        for item in tiny_tensors("llama")
    ]
    with pytest.raises(ModelFileError, match=r"ffn_up\.weight has type I32, which is unsupported"):
        spec_with(tmp_path, "llama", tensors)


def test_tensor_that_nobody_reads(tmp_path):
    """A tensor beyond the known ones means another computation than ours."""
    extra = tensor("blk.0.attn_sinks.weight", np.zeros(2))
    with pytest.raises(ModelFileError, match=r"blk\.0\.attn_sinks\.weight is not known"):
        spec_with(tmp_path, "llama", [*tiny_tensors("llama"), extra])


LAYERS = {"layers": 2}


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"block_count": None}, "llama.block_count is missing"),
        ({"block_count": 0}, "llama.block_count is outside 1 to 1024"),
        ({"block_count": 1025}, "llama.block_count is outside 1 to 1024"),
        ({"block_count": 1.0}, "llama.block_count is not a whole number"),
        ({"block_count": True}, "llama.block_count is not a whole number"),
        ({"block_count": "1"}, "llama.block_count is not a whole number"),
        ({"block_count": 900}, "tensors of layer 899 are missing"),
        ({"block_count": 1, **LAYERS}, "blk.1.attn_norm.weight is not known"),
        ({"embedding_length": scalar("Q", 2**63)}, "embedding_length is outside"),
        ({"embedding_length": scalar("i", -8)}, "embedding_length is outside"),
        ({"context_length": 0}, "context_length is outside"),
        ({"attention__head_count": 3, "attention__head_count_kv": 3}, "3 heads do not divide 8"),
        ({"attention__head_count_kv": 0}, "head_count_kv is outside"),
        ({"attention__head_count": 4, "attention__head_count_kv": 3}, "4 heads cannot share 3"),
        ({"attention__key_length": 0}, "key_length is outside"),
        ({"attention__layer_norm_rms_epsilon": float("nan")}, "epsilon is outside"),
        ({"attention__layer_norm_rms_epsilon": 0.0}, "epsilon is outside"),
        ({"attention__layer_norm_rms_epsilon": "x"}, "epsilon is not a number"),
        ({"rope__freq_base": float("inf")}, "freq_base is outside"),
        ({"rope__freq_base": -1.0}, "freq_base is outside"),
        ({"rope__dimension_count": 6}, "dimension_count is outside 1 to 4"),
        ({"rope__dimension_count": 3}, "odd number of rotated values"),
        ({"rope__scaling__type": "yarn"}, "rope.scaling.factor is missing"),
        ({"rope__scaling__type": "dynamic"}, "rope scaling dynamic is not supported"),
        ({"rope__scaling__type": "longrope"}, "rope scaling longrope is not supported"),
        ({"rope__scaling__type": 3}, "rope.scaling.type is not text"),
        ({"rope__scaling__factor": -2.0}, "rope.scaling.factor is outside"),
        ({"rope__scaling__factor": scalar("d", 1e-300)}, "rope.scaling.factor is outside"),
        ({"feed_forward_length": np.array([12, 12, 12]), **LAYERS}, "each of 2 layers"),
        ({"feed_forward_length": np.array([12]), **LAYERS}, "each of 2 layers"),
        ({"feed_forward_length": np.array([12.0, 12.0]), **LAYERS}, "each of 2 layers"),
        ({"feed_forward_length": np.array([12, 0]), **LAYERS}, "feed_forward_length is outside"),
        ({"feed_forward_length": ["12"]}, "feed_forward_length is not a whole number"),
        ({"attention__head_count_kv": np.array([1, 0]), **LAYERS}, "head_count_kv is outside"),
    ],
)
def test_numbers_that_make_no_model(tmp_path, keys, problem):
    """Each bad value gives one line that names its key."""
    with pytest.raises(ModelFileError, match=problem):
        spec_of(tmp_path, **keys)


@pytest.mark.parametrize("pattern", [np.array([True]), "5:1", -1, 6.0])
def test_sliding_patterns_that_make_no_sense(tmp_path, pattern):
    """The pattern is a period or a flag per layer, nothing else."""
    value = scalar("i", pattern) if pattern == -1 else pattern
    with pytest.raises(ModelFileError, match="sliding_window_pattern is"):
        spec_of(tmp_path, "gemma3", layers=2, attention__sliding_window_pattern=value)


def test_wrong_number_of_tokens(tmp_path):
    """Tokenizer and embedding must agree, or a prompt could name a row that is not there."""
    path = tmp_path / "model.gguf"
    metadata = tiny_metadata("llama") | {"tokenizer.ggml.tokens": ["a"] * 6}
    path.write_bytes(gguf_bytes(metadata, tiny_tensors("llama")))
    with pytest.raises(ModelFileError, match="it has 6 tokens but 5 embeddings"):
        load(path)


def test_unknown_architecture(tmp_path):
    """The error names it, and says where what is supported can be found."""
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes({"general.architecture": "gpt-osm"}))
    with pytest.raises(ModelFileError) as caught:
        load(path)
    assert str(caught.value) == (
        f"model.gguf: architecture gpt-osm is not supported; {len(FAMILIES)} are: "
        "the README lists them"
    )


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({}, "general.architecture is missing"),
        ({"general.architecture": 7}, "general.architecture is not text"),
        ({"general.architecture": "llama", "general.type": "adapter"}, "something of type adapter"),
        ({"general.architecture": "llama", "general.type": 1}, "general.type is not text"),
    ],
)
def test_files_that_hold_no_model(tmp_path, metadata, problem):
    """Adapters and files without an architecture are refused by name."""
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(metadata))
    with pytest.raises(ModelFileError, match=problem):
        load(path)


def test_the_name_of_a_model_is_fit_to_show(tmp_path):
    """Control codes and broken bytes are replaced, and the length is bounded."""
    path = tmp_path / "model.gguf"
    metadata = tiny_metadata("llama") | {"general.name": "Möge\x1b[2J\n\udcff" + "x" * 999}
    path.write_bytes(gguf_bytes(metadata, tiny_tensors("llama")))
    name = load(path).name
    assert name.startswith("Möge?[2J??xxx")
    assert len(name) == 200


@pytest.mark.parametrize("name", ["llama3", "llama256-q4_0", "qwen2", "qwen3", "gemma3"])
def test_tiny_models(shared, name):
    """The shared tiny models are read, and hold exactly the tensors that their spec needs."""
    with open_gguf(shared / "tiny" / "models" / f"{name}.gguf") as file:
        spec = read_spec(file)
        assert set(needed_tensors(spec)) == set(file.tensors)
    assert spec.layers[0].attention.rope.factors == (
        "rope_freqs.weight" if name == "llama3" else None
    )


@pytest.mark.models
def test_real_smollm2(smollm2):
    """SmolLM2 135M as its model card says."""
    spec = load(smollm2)
    assert (spec.architecture, len(spec.layers), spec.hidden_size) == ("llama", 30, 576)
    assert (spec.vocab_size, spec.context_length, spec.tied_output) == (49152, 8192, True)
    attention = spec.layers[0].attention
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (9, 3, 64)
    assert attention.rope.base == 1e5


@pytest.mark.models
def test_real_gemma3(gemma3):
    """Gemma 3 270M: three full layers among eighteen, window 512."""
    spec = load(gemma3)
    windows = [layer.attention.window for layer in spec.layers]
    assert windows == ([512] * 5 + [None]) * 3
    assert (spec.vocab_size, spec.hidden_size, spec.context_length) == (262144, 640, 32768)
    assert spec.layers[0].attention.scale == 256**-0.5
