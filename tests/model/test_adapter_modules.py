"""Adapters of modules that a base file arranges in another way, against merged weights."""

from pathlib import Path

import numpy as np
import pytest
import torch
from model.adapter_builder import PREFIX, config, peft_folder

from harness.model_folders import make_folder
from kvtrio.model.adapters import load_adapter
from kvtrio.model.architectures import read_spec
from kvtrio.model.errors import ModelFileError
from kvtrio.model.folder import open_folder

RANK, ALPHA = 2, 3.0
KINDS = ["qwen3_next", "qwen3_5_text", "lfm2", "mamba2", "granitemoehybrid"]
UNSUPPORTED = ("shared_expert_gate", "router.layer")
"""Of one row, and of the choice of experts: no activations go on from there."""
Tensors = dict[str, np.ndarray]


def changed(model: torch.nn.Module) -> Tensors:
    """Give every linear module of a layer a change; returns the changes as PEFT names them."""
    tensors: Tensors = {}
    rng = torch.Generator().manual_seed(1)
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or ".layers." not in name:
            continue
        if name.endswith(UNSUPPORTED):
            continue
        num_out, num_in = module.weight.shape
        a = torch.randn(RANK, num_in, generator=rng)
        b = torch.randn(num_out, RANK, generator=rng)
        with torch.no_grad():
            module.weight += ALPHA / RANK * (b @ a)
        tensors[f"{PREFIX}{name}.lora_A.weight"] = a.numpy()
        tensors[f"{PREFIX}{name}.lora_B.weight"] = b.numpy()
    return tensors


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_change_is_that_of_the_merged_folder(kind: str, tmp_path: Path) -> None:
    """Of every matrix of every layer: recurrent ones, attention, feed-forwards and what all tokens
    share beside experts. What is not changed is the same in both."""
    model = make_folder(tmp_path / "base", kind)
    tensors = changed(model)
    (tmp_path / "merged").mkdir()
    for path in (tmp_path / "base").iterdir():
        (tmp_path / "merged" / path.name).write_bytes(path.read_bytes())
    model.save_pretrained(tmp_path / "merged")
    peft = peft_folder(tmp_path / "peft", tensors, config(RANK, ALPHA))
    with open_folder(tmp_path / "base") as base, open_folder(tmp_path / "merged") as merged:
        adapter = load_adapter(peft, read_spec(base))
        for name in base.tensors:
            expected, found = merged.dequantise(name), base.dequantise(name)
            if change := adapter.targets.get(name):
                found = found + change.scaling * (change.b @ change.a)
            np.testing.assert_allclose(found, expected, atol=1e-4, err_msg=name)
    assert len(adapter.targets) >= len(tensors) // 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "module"),
    [
        ("qwen3_next", "linear_attn.in_proj_qkv"),
        ("qwen3_5_text", "linear_attn.in_proj_qkvz"),
        ("qwen3_5_text", "linear_attn.conv1d"),
        ("lfm2", "conv.conv"),
        ("mamba2", "mixer.conv1d"),
        ("qwen3_next", "mlp.shared_expert_gate"),
    ],
)
def test_what_cannot_be_mapped_is_refused_by_name(kind: str, module: str, tmp_path: Path) -> None:
    """A module of another kind of model, a convolution, a gate of one row."""
    make_folder(tmp_path / "base", kind)
    prefix = "backbone" if kind == "mamba2" else "model"
    path = f"{PREFIX}{prefix}.layers.0.{module}"
    tensors = {
        f"{path}.lora_A.weight": np.ones((2, 64), np.float32),
        f"{path}.lora_B.weight": np.ones((64, 2), np.float32),
    }
    peft = peft_folder(tmp_path / "peft", tensors, config(RANK, ALPHA))
    with (
        open_folder(tmp_path / "base") as base,
        pytest.raises(ModelFileError, match=module.replace(".", r"\.")),
    ):
        load_adapter(peft, read_spec(base))
