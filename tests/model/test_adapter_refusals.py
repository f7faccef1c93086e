"""Adapters that do not fit or do more than we compute: refused by name, never loaded in part."""

from pathlib import Path

import numpy as np
import pytest
from model.adapter_builder import (
    PREFIX,
    Pairs,
    config,
    gguf_adapter,
    peft_folder,
    peft_tensors,
    random_pairs,
    tiny_spec,
)

from kvtrio.model.adapters import AdapterData, load_adapter
from kvtrio.model.errors import ModelFileError
from kvtrio.model.spec import ModelSpec


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    return tiny_spec(tmp_path)


def load_gguf(folder: Path, spec: ModelSpec, raw: bytes) -> AdapterData:
    path = folder / "adapter.gguf"
    path.write_bytes(raw)
    return load_adapter(path, spec)


REFUSED_SETTINGS = [
    ({"use_dora": True}, "DoRA"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"bias": "all"}, "bias"),
    ({"bias": "lora_only"}, "bias"),
    ({"lora_bias": True}, "lora_bias"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out"),
    ({"layer_replication": [[0, 1], [0, 1]]}, "layer_replication"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    ({"target_parameters": ["mlp.experts"]}, "target_parameters"),
    ({"use_qalora": True}, "use_qalora"),
    ({"use_something_new": {"a": 1}}, "use_something_new"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
    ({"init_lora_weights": "loftq"}, "init_lora_weights"),
    ({"init_lora_weights": ["gaussian"]}, "init_lora_weights"),
    ({"peft_type": "IA3"}, "peft_type"),
    ({"peft_type": None}, "peft_type"),
    ({"alora_invocation_string": "<x>"}, "alora_invocation_tokens"),
    ({"alora_invocation_tokens": [1.5]}, "alora_invocation_tokens"),
    ({"alora_invocation_tokens": [5]}, "invocation tokens"),
    ({"alora_invocation_tokens": [-1]}, "invocation tokens"),
    ({"alora_invocation_tokens": [1] * 257}, "invocation tokens"),
    ({"r": 3}, "has rank 2, but its config says 3"),
    ({"r": 0}, "r is not a whole number"),
    ({"r": True}, "r is not a whole number"),
    ({"r": 1 << 20}, "r is not a whole number"),
    ({"r": None}, "r is not a whole number"),
    ({"lora_alpha": None}, "lora_alpha"),
    ({"lora_alpha": "16"}, "lora_alpha"),
    ({"lora_alpha": True}, "lora_alpha"),
    ({"lora_alpha": 10**400}, "lora_alpha"),
    ({"lora_alpha": 1e300}, "lora_alpha"),
    ({"lora_alpha": 0}, "scaling"),
    ({"alpha_pattern": {"q_proj": 0}}, "scaling"),
    ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern"),
    ({"alpha_pattern": ["q_proj"]}, "alpha_pattern"),
    ({"alpha_pattern": {"(a+)+": 1}}, "alpha_pattern"),
    ({"alpha_pattern": {".*.*.*": 1}}, "alpha_pattern"),
    ({"alpha_pattern": {"(": 1}}, "alpha_pattern"),
    ({"alpha_pattern": {"x" * 300: 1}}, "alpha_pattern"),
    ({"alpha_pattern": {str(i): 1 for i in range(4097)}}, "alpha_pattern"),
    ({"rank_pattern": {"q_proj": 0.5}}, "rank_pattern"),
    ({"rank_pattern": {"q_proj": 16}}, "config says 16"),
    ({"use_rslora": "yes"}, "use_rslora"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED_SETTINGS, ids=str)
def test_settings_that_change_the_result_are_refused_by_name(tmp_path, spec, settings, message):
    """Nothing is loaded in part: what we do not compute is named in one line."""
    folder = peft_folder(
        tmp_path / "peft", peft_tensors(random_pairs(spec), spec), config() | settings
    )
    with pytest.raises(ModelFileError, match=message) as caught:
        load_adapter(folder, spec)
    assert str(caught.value).startswith("peft: ")
    assert "\n" not in str(caught.value)


def put(name: str, *shape: int) -> dict[str, np.ndarray]:
    return {PREFIX + name: np.ones(shape, np.float32)}


Q = "model.layers.0.self_attn.q_proj"
REFUSED_TENSORS = [
    (put(f"{Q}.lora_magnitude_vector", 8), "DoRA"),
    (put("model.embed_tokens.lora_embedding_A", 2, 5), "embedding"),
    (put(f"{Q}.lora_B.bias", 8), "biases"),
    (put("lm_head.weight", 5, 8), "full modules"),
    (put("model.embed_tokens.weight", 5, 8), "full modules"),
    (put(f"{Q}.base_layer.weight", 8, 8), "full modules"),
    (put("model.layers.2.mlp.up_proj.lora_A.weight", 2, 8)
     | put("model.layers.2.mlp.up_proj.lora_B.weight", 12, 2), "2 tensors: no such matrix"),
    (put("model.layers.0.self_attn.qkv_proj.lora_A.weight", 2, 8), "1 tensor: no such matrix"),
    (put("model.layers.00.mlp.up_proj.lora_A.weight", 2, 8), "no such matrix"),
    (put("transformer.h.0.attn.lora_A.weight", 2, 8), "no such matrix"),
    (put(f"{Q}.lora_A.other.weight", 2, 8), "no such matrix"),
    (put("layers.0.self_attn.q_proj.lora_A.weight", 2, 8), "has one already"),
    ({f"{Q}.lora_A.weight": np.ones((2, 8), np.float32)}, "no such matrix"),
]  # fmt: skip


@pytest.mark.parametrize(("extra", "message"), REFUSED_TENSORS, ids=str)
def test_tensors_that_match_nothing_are_refused_with_a_list(tmp_path, spec, extra, message):
    """Every tensor is used or the load fails; unknown ones are counted and the first few named."""
    tensors = peft_tensors(random_pairs(spec), spec) | extra
    with pytest.raises(ModelFileError, match=message):
        load_adapter(peft_folder(tmp_path / "peft", tensors, config()), spec)


def test_a_long_list_is_cut(tmp_path, spec):
    """Three names and the number of all."""
    tensors = {}
    for layer in range(9):
        tensors |= put(f"x.{layer}.lora_A.weight", 2, 8)
    with pytest.raises(ModelFileError, match=r"9 tensors: .*x\.0.*x\.1.*x\.2[^,]*, \.\.\.$"):
        load_adapter(peft_folder(tmp_path / "peft", tensors, config()), spec)


def cut(name: str, what: str) -> Pairs:
    """A pair for the tiny model with something wrong about it."""
    a, b = np.ones((2, 8), np.float32), np.ones((8, 2), np.float32)
    wrong: dict[str, tuple[np.ndarray, np.ndarray]] = {
        "rank": (a, np.ones((8, 3), np.float32)),
        "in": (np.ones((2, 9), np.float32), b),
        "out": (a, np.ones((9, 2), np.float32)),
        "axes": (a.T, b.T),
        "flat": (a, np.ones(8, np.float32)),
        "deep": (a, np.ones((8, 2, 2), np.float32)),
        "nan": (a, b * np.float32("nan")),
        "inf": (a * np.float32("inf"), b),
        "huge": (np.ones((4097, 8), np.float32), np.ones((8, 4097), np.float32)),
        "good": (a, b),
    }
    return {name: wrong[what]}


REFUSED_PAIRS = {
    "rank": "has shape",
    "in": "has shape",
    "out": "has shape",
    "axes": "has",
    "flat": "has shape",
    "deep": "has shape",
    "nan": "not finite",
    "inf": "not finite",
    "huge": "has rank 4097",
}


@pytest.mark.parametrize("what", REFUSED_PAIRS)
def test_matrices_that_do_not_fit_are_refused(tmp_path, spec, what):
    """Wrong shapes (axes of a square matrix too), absurd ranks, broken numbers; in both forms."""
    pairs = cut("blk.0.attn_q.weight", what)
    with pytest.raises(ModelFileError, match=REFUSED_PAIRS[what]):
        load_gguf(tmp_path, spec, gguf_adapter(pairs))
    a, b = pairs["blk.0.attn_q.weight"]
    tensors = {f"{PREFIX}{Q}.lora_A.weight": a, f"{PREFIX}{Q}.lora_B.weight": b}
    with pytest.raises(ModelFileError, match=REFUSED_PAIRS[what]):
        load_adapter(peft_folder(tmp_path / "peft", tensors, config()), spec)


@pytest.mark.parametrize("target", ["blk.2.attn_q.weight", "blk.0.attn_norm.weight", "nonsense"])
def test_gguf_targets_outside_the_base_are_refused(tmp_path, spec, target):
    """Another number of layers, a norm, or no tensor of the base at all."""
    with pytest.raises(ModelFileError, match="2 tensors: no such matrix"):
        load_gguf(tmp_path, spec, gguf_adapter(cut(target, "good")))


def test_gguf_embedding_adapters_are_refused_by_name(tmp_path, spec):
    """They store A the other way round and would act on a tied head too."""
    with pytest.raises(ModelFileError, match="embedding"):
        load_gguf(tmp_path, spec, gguf_adapter(cut("token_embd.weight", "good")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general__type": "model"}, "no adapter but something of type model"),
        ({"general__type": None}, "no adapter but something of type model"),
        ({"adapter__type": "control"}, "type control"),
        ({"adapter__type": None}, "adapter.type is missing"),
        ({"architecture": "qwen3"}, "architecture qwen3, not llama"),
        ({"alpha": float("nan")}, "alpha is outside"),
        ({"alpha": float("inf")}, "alpha is outside"),
        ({"adapter__alora__invocation_tokens": "x"}, "invocation_tokens"),
        ({"adapter__alora__invocation_tokens": np.array([9], np.uint32)}, "invocation tokens"),
        ({"adapter__lora__task_name": 3}, "task_name is not text"),
        ({"adapter__lora__prompt_prefix": "x" * 70000}, "prompt_prefix"),
        ({"split__count": 2}, "split"),
    ],
)
def test_gguf_files_that_are_something_else_are_refused(tmp_path, spec, changes, message):
    """Models, control vectors, other architectures and broken metadata."""
    with pytest.raises(ModelFileError, match=message):
        load_gguf(tmp_path, spec, gguf_adapter(random_pairs(spec), **changes))


def test_a_missing_half_is_refused_in_both_forms(tmp_path, spec):
    """The lonely tensor is named."""
    tensors = peft_tensors(random_pairs(spec), spec)
    del tensors[f"{PREFIX}{Q}.lora_B.weight"]
    with pytest.raises(ModelFileError, match=r"the other half is missing: .*q_proj\.lora_A"):
        load_adapter(peft_folder(tmp_path / "peft", tensors, config()), spec)
    raw = gguf_adapter(random_pairs(spec)).replace(b"attn_q.weight.lora_b", b"attn_q.weight.lora_c")
    with pytest.raises(ModelFileError, match="neither lora_a nor lora_b"):
        load_gguf(tmp_path, spec, raw)


def test_an_empty_adapter_is_refused(tmp_path, spec):
    """It would be the base model under another name."""
    with pytest.raises(ModelFileError, match="no low-rank pair"):
        load_gguf(tmp_path, spec, gguf_adapter({}))
    with pytest.raises(ModelFileError, match="no low-rank pair"):
        load_adapter(peft_folder(tmp_path / "peft", {}, config()), spec)


@pytest.mark.parametrize("kind", ["F64", "I64"])
def test_other_types_of_numbers_are_refused(tmp_path, spec, kind):
    """Only floats of 16 and 32 bits are weights."""
    dtype = {"F64": np.float64, "I64": np.int64}[kind]
    tensors = {n: v.astype(dtype) for n, v in peft_tensors(random_pairs(spec), spec).items()}
    with pytest.raises(ModelFileError, match=f"type {kind}"):
        load_adapter(peft_folder(tmp_path / "peft", tensors, config()), spec)


def test_pickles_are_never_opened(tmp_path, spec):
    """A folder with only adapter_model.bin, and a pickle given as the file, are refused as such."""
    folder = peft_folder(tmp_path / "peft", {}, config())
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(ModelFileError, match="is a pickle"):
        load_adapter(folder, spec)
    for start in (b"PK\x03\x04", b"\x80\x02}q\x00."):
        (tmp_path / "adapter_model.bin").write_bytes(start + bytes(50))
        with pytest.raises(ModelFileError, match="a pickle"):
            load_adapter(tmp_path / "adapter_model.bin", spec)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_folders_without_their_files_are_refused(tmp_path, spec, name):
    """The missing file is named."""
    folder = peft_folder(tmp_path / "peft", peft_tensors(random_pairs(spec), spec), config())
    (folder / name).unlink()
    with pytest.raises(ModelFileError, match=f"peft: {name}: no such file"):
        load_adapter(folder, spec)


def test_a_path_that_is_nothing_is_refused(tmp_path, spec):
    """Missing paths get one line with the safe part of the name."""
    with pytest.raises(ModelFileError, match=r"^absent\?: no such file$"):
        load_adapter(tmp_path / "absent\x1b", spec)


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"null", b'{"r": 1, "r": 1}', b'{"r": NaN}', b"\xff", b"[" * 100_000]
)
def test_broken_configs_are_refused(tmp_path, spec, raw):
    """Whatever is no JSON object, repeats a key or holds numbers that are none."""
    folder = peft_folder(tmp_path / "peft", {}, {})
    (folder / "adapter_config.json").write_bytes(raw)
    with pytest.raises(ModelFileError, match=r"adapter_config\.json: (not a JSON object|empty)"):
        load_adapter(folder, spec)


def test_a_huge_config_is_not_read(tmp_path, spec):
    """A mebibyte is more than any config needs."""
    folder = peft_folder(tmp_path / "peft", {}, config(junk="x" * (1 << 20)))
    with pytest.raises(ModelFileError, match=r"adapter_config\.json: larger than 1048576 bytes"):
        load_adapter(folder, spec)
