"""Matrices that a file holds as one: cut at the index, and adapters of them."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from model.adapter_builder import config, gguf_adapter, peft_folder
from model.gguf_builder import gguf_bytes, tensor, tiny_metadata

from harness.torch_adapters import loaded
from harness.torch_models import Driver, RandomFile, settings
from kvtrio.backends.torch_backend import TorchBackend
from kvtrio.model.adapters import AdapterData, load_adapter
from kvtrio.model.architectures import read_spec
from kvtrio.model.errors import ModelFileError
from kvtrio.model.gguf_file import open_gguf
from kvtrio.model.spec import ModelSpec

QKV, UP = "blk.1.attn_qkv.weight", "blk.2.ffn_up.weight"
PARTS = {
    QKV: [("blk.1.attn_q.weight", 64), ("blk.1.attn_k.weight", 32), ("blk.1.attn_v.weight", 32)],
    UP: [("blk.2.ffn_gate.weight", 128), ("blk.2.ffn_up.weight", 128)],
}
MODULES = {QKV: "layers.1.self_attn.qkv_proj", UP: "layers.2.mlp.gate_up_proj"}


@pytest.fixture
def path(shared: Path) -> Path:
    return shared / "tiny" / "models" / "phi3.gguf"


def fused_pairs() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(5)
    shapes = {name: sum(rows for _, rows in parts) for name, parts in PARTS.items()}
    return {
        name: (
            rng.standard_normal((3, 64)).astype(np.float32),
            rng.standard_normal((rows, 3)).astype(np.float32),
        )
        for name, rows in shapes.items()
    }


def both_forms(folder: Path, spec: ModelSpec) -> list[AdapterData]:
    pairs = fused_pairs()
    (folder / "adapter.gguf").write_bytes(gguf_adapter(pairs, "phi3", alpha=6.0))
    tensors = {
        f"base_model.model.model.{MODULES[name]}.lora_{side}.weight": values
        for name, pair in pairs.items()
        for side, values in zip("AB", pair, strict=True)
    }
    peft = peft_folder(folder / "peft", tensors, config(3, 6.0))
    return [load_adapter(folder / "adapter.gguf", spec), load_adapter(peft, spec)]


def test_parts_are_the_rows_of_the_whole(path):
    """In order, by shape and by bytes."""
    whole = {each.name: each.data for each in gguf.GGUFReader(path).tensors}
    with open_gguf(path) as file:
        for name, parts in PARTS.items():
            assert name not in file.tensors or name == "blk.2.ffn_up.weight"
            assert [file.tensors[part].shape for part, _ in parts] == [(n, 64) for _, n in parts]
            raw = np.concatenate([file.raw(part) for part, _ in parts])
            np.testing.assert_array_equal(raw, whole[name].reshape(-1).view(np.uint8))


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ((17, 8), "attn_q.weight is missing"),
        ((15, 8), "attn_q.weight is missing"),
        ((16,), "has shape"),
    ],
)
def test_rows_that_do_not_add_up(tmp_path, shape, says):
    """Nothing is cut, and what is missing is named."""
    path = tmp_path / "model.gguf"
    tensors = [
        tensor(name, np.ones(size))
        for name, size in {
            "token_embd.weight": (5, 8),
            "output_norm.weight": (8,),
            "blk.0.attn_norm.weight": (8,),
            "blk.0.ffn_norm.weight": (8,),
            "blk.0.attn_qkv.weight": shape,
        }.items()
    ]
    path.write_bytes(gguf_bytes(tiny_metadata("phi3"), tensors))
    with pytest.raises(ModelFileError, match=says), open_gguf(path) as file:
        read_spec(file)


def test_an_adapter_of_a_fused_matrix_is_cut_as_that_is(path, tmp_path):
    """Both forms are one; its parts share their A; and it acts as the merged weights do."""
    with open_gguf(path) as file:
        spec = read_spec(file)
        arrays = {name: file.dequantise(name) for name in file.tensors}
    one, other = both_forms(tmp_path, spec)
    assert one.digest == other.digest
    pairs = fused_pairs()
    for name, parts in PARTS.items():
        a, b = pairs[name]
        np.testing.assert_array_equal(np.concatenate([one.targets[p].b for p, _ in parts]), b)
        changes = np.split(2.0 * b @ a, np.cumsum([rows for _, rows in parts])[:-1])
        for (part, _), change in zip(parts, changes, strict=True):
            np.testing.assert_array_equal(one.targets[part].a, a)
            arrays[part] = arrays[part] + 0.05 * change
    prompt = [5, 900, 17, 3, 3, 44]
    with open_gguf(path) as file:
        on = loaded(TorchBackend.load(file, spec, settings()), one)
    driver = Driver(on.backend)
    out = driver.logprobs(on.chunk(driver, 0, (0, prompt), [(one, 0.05)]))
    merged = Driver(TorchBackend.load(RandomFile(arrays), spec, settings()))
    expected = merged.logprobs(merged.chunk(0, 0, prompt))
    torch.testing.assert_close(out, expected, rtol=0.0, atol=1e-4)
    assert (driver.logprobs(driver.chunk(1, 0, prompt)) - expected).abs().max() > 0.01


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("phi3", "blk.1.attn_qk.weight"),
        ("gpt-oss", "blk.0.ffn_gate_exps.weight"),
        ("deepseek2", "blk.0.attn_k_b.weight"),
        ("llama3", "blk.0.attn_qkv.weight"),
    ],
)
def test_what_has_no_place_for_an_adapter_is_named(shared, tmp_path, model, name):
    """Experts and matrices per head among them."""
    with open_gguf(shared / "tiny" / "models" / f"{model}.gguf") as file:
        spec = read_spec(file)
    a, b = np.ones((2, 64), np.float32), np.ones((64, 2), np.float32)
    path = tmp_path / "adapter.gguf"
    path.write_bytes(gguf_adapter({name: (a, b)}, spec.architecture))
    with pytest.raises(ModelFileError, match=rf"no such matrix in the base model: {name}"):
        load_adapter(path, spec)


@pytest.mark.parametrize(
    ("model", "module", "name"),
    [
        ("deepseek2", "self_attn.q_a_proj", "attn_q_a"),
        ("deepseek2", "self_attn.q_b_proj", "attn_q_b"),
        ("deepseek2", "self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
        ("deepseek2", "mlp.shared_experts.down_proj", "ffn_down_shexp"),
        ("glm4moe", "mlp.shared_experts.up_proj", "ffn_up_shexp"),
        ("gpt-oss", "self_attn.o_proj", "attn_output"),
    ],
)
def test_modules_of_special_layers_have_their_names(shared, tmp_path, model, module, name):
    """A PEFT folder's modules are the base file's matrices."""
    with open_gguf(shared / "tiny" / "models" / f"{model}.gguf") as file:
        spec = read_spec(file)
        num_out, num_in = file.tensors[f"blk.1.{name}.weight"].shape
    path = f"base_model.model.model.layers.1.{module}"
    tensors = {
        f"{path}.lora_A.weight": np.ones((2, num_in), np.float32),
        f"{path}.lora_B.weight": np.ones((num_out, 2), np.float32),
    }
    data = load_adapter(peft_folder(tmp_path / "peft", tensors, config(2, 4.0)), spec)
    assert list(data.targets) == [f"blk.1.{name}.weight"]
