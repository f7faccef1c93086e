"""A folder and the GGUF file of the same weights are one model."""

from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from model.adapter_builder import PREFIX, config, peft_folder
from model.gguf_builder import gguf_bytes, tensor

from harness.model_folders import MODELS, VOCAB, make_folder
from harness.torch_models import Driver, greedy, random_prompt, settings
from kvtrio.backends.torch_backend import TorchBackend
from kvtrio.model.adapters import load_adapter
from kvtrio.model.architectures import read_spec
from kvtrio.model.folder import FolderFile, open_folder
from kvtrio.model.gguf_file import open_gguf

pytestmark = pytest.mark.slow
FUSED = {
    "attn_qkv.weight": ("attn_q.weight", "attn_k.weight", "attn_v.weight"),
    "ffn_up.weight": ("ffn_gate.weight", "ffn_up.weight"),
}


OUTPUTS = (".o_proj", ".self_attn.out_proj")
WITHOUT = ("mamba2",)
"""Of attention."""


def write_gguf(file: FolderFile, path: Path, *, fused: bool) -> None:
    """With q, k and v, and gate and up, as one matrix each if ``fused``."""
    arrays = {name: file.dequantise(name) for name in file.tensors}
    for layer in range(4 if fused else 0):
        for whole, parts in FUSED.items():
            rows = [arrays.pop(f"blk.{layer}.{part}") for part in parts]
            arrays[f"blk.{layer}.{whole}"] = np.concatenate(rows)
    metadata = {key: value for key, value in file.metadata.items() if "general" not in key}
    metadata |= {"general.architecture": file.metadata["general.architecture"]}
    path.write_bytes(gguf_bytes(metadata, [tensor(*item) for item in arrays.items()]))


def peft_adapter(model: torch.nn.Module, folder: Path) -> Path:
    """Changes of every matrix of attention's output, as training libraries save them."""
    rng, tensors = np.random.default_rng(3), {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.endswith(OUTPUTS):
            a = rng.normal(size=(2, module.in_features)).astype(np.float32)
            b = rng.normal(size=(module.out_features, 2)).astype(np.float32)
            tensors |= {f"{PREFIX}{name}.lora_A.weight": a, f"{PREFIX}{name}.lora_B.weight": b}
    return peft_folder(folder, tensors, config())


@pytest.mark.parametrize("kind", MODELS)
def test_both_give_the_same_ids(kind, tmp_path):
    """And nearly the same log-probabilities: a GGUF file's numbers are narrower. An adapter in
    PEFT's form is the same one on both."""
    model = make_folder(tmp_path, kind)
    prompt = random_prompt(Random(8), 40, VOCAB)
    with open_folder(tmp_path) as folder:
        write_gguf(folder, tmp_path / "model.gguf", fused=kind == "phi3")
        with open_gguf(tmp_path / "model.gguf") as file:
            specs = [read_spec(each) for each in (folder, file)]
            drivers = [
                Driver(TorchBackend.load(each, spec, settings()))
                for each, spec in zip((folder, file), specs, strict=True)
            ]
    ids = [greedy(driver, 0, prompt, 6) for driver in drivers]
    assert ids[0] == ids[1]
    rows = [driver.logprobs(driver.chunk(1, 0, prompt)) for driver in drivers]
    torch.testing.assert_close(*rows, rtol=0.0, atol=1e-4)
    if kind not in WITHOUT:
        path = peft_adapter(model, tmp_path / "adapter")
        adapters = [load_adapter(path, spec) for spec in specs]
        assert adapters[0].targets.keys() == adapters[1].targets.keys() != set()
        assert adapters[0].digest == adapters[1].digest
