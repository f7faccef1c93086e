"""gpt-oss as it is published: a folder whose experts are MXFP4 codes and scales."""

import json
from pathlib import Path
from random import Random

import gguf
import numpy as np
import pytest
from attrs import evolve
from model.adapter_builder import with_header

from harness.torch_models import Driver, greedy, random_prompt, settings
from kvtrio.backends.torch_backend import TorchBackend
from kvtrio.model.architectures import read_spec
from kvtrio.model.errors import ModelFileError
from kvtrio.model.folder import open_folder
from kvtrio.model.gguf_file import GGUFFile, open_gguf

NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp.weight": "mlp.router.weight",
    "ffn_gate_inp.bias": "mlp.router.bias",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
    **{
        f"attn_{ours}.{end}": f"self_attn.{theirs}_proj.{end}"
        for ours, theirs in (("q", "q"), ("k", "k"), ("v", "v"), ("output", "o"))
        for end in ("weight", "bias")
    },
}
OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
DTYPES = {"float32": "F32", "uint8": "U8"}


def published(file: GGUFFile) -> dict[str, np.ndarray]:
    """Its tensors as the folder has them: the inverse of what llama.cpp's conversion does."""
    made = {theirs: file.dequantise(ours) for ours, theirs in OUTSIDE.items()}
    for layer in range(4):
        ours, theirs = f"blk.{layer}.", f"model.layers.{layer}."
        for own, name in NAMES.items():
            made[theirs + name] = file.dequantise(ours + own)
        experts = f"{theirs}mlp.experts."
        biases = [file.dequantise(f"{ours}ffn_{side}_exps.bias") for side in ("gate", "up")]
        made[f"{experts}gate_up_proj_bias"] = np.stack(biases, 2).reshape(8, -1)
        pairs = [codes_and_scales(file, f"{ours}ffn_{side}_exps.weight") for side in ("gate", "up")]
        for end, gate, up in zip(("blocks", "scales"), *pairs, strict=True):
            rows = np.stack((gate, up), 2)
            made[f"{experts}gate_up_proj_{end}"] = rows.reshape(8, -1, *gate.shape[2:])
        down = codes_and_scales(file, f"{ours}ffn_down_exps.weight")
        made[f"{experts}down_proj_blocks"], made[f"{experts}down_proj_scales"] = down
    return made


def codes_and_scales(file: GGUFFile, name: str) -> tuple[np.ndarray, np.ndarray]:
    """[experts, rows, blocks, 16], two neighbours in a byte; and [experts, rows, blocks]."""
    experts, rows, _ = file.tensors[name].shape
    blocks = file.raw(name).reshape(experts, rows, -1, 17)
    codes = np.concatenate((blocks[..., 1:] & 15, blocks[..., 1:] >> 4), -1)
    return codes[..., ::2] | codes[..., 1::2] << 4, blocks[..., 0]


def write_folder(folder: Path, file: GGUFFile, tensors: dict[str, np.ndarray]) -> None:
    header: dict[str, object] = {}
    body = b""
    for name, values in tensors.items():
        raw = np.ascontiguousarray(values).tobytes()
        places = [len(body), len(body) + len(raw)]
        kind = DTYPES[values.dtype.name]
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": places}
        body += raw
    (folder / "model.safetensors").write_bytes(with_header(header, body))
    tokens, merges = (file.metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "merges"))
    vocab = {text: number for number, text in enumerate(tokens)}
    cutting = {"type": "ByteLevel", "add_prefix_space": False}
    model = {"type": "BPE", "vocab": vocab, "merges": merges}
    (folder / "tokenizer.json").write_text(json.dumps({"model": model, "pre_tokenizer": cutting}))
    config = {
        "model_type": "gpt_oss",
        "vocab_size": len(vocab),
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 4,
        "sliding_window": 32,
        "max_position_embeddings": 131072,
        "rms_norm_eps": file.metadata["gpt-oss.attention.layer_norm_rms_epsilon"],
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
        },
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


@pytest.mark.slow
def test_the_published_form_is_the_gguf_file(shared: Path, tmp_path: Path) -> None:
    """The same bytes in the same type, the same architecture, and the same ids."""
    prompt = random_prompt(Random(4), 60, 8192)
    with open_gguf(shared / "tiny" / "models" / "gpt-oss-mxfp4.gguf") as file:
        write_folder(tmp_path, file, published(file))
        with open_folder(tmp_path) as folder:
            for name, info in file.tensors.items():
                assert folder.tensors[name].ggml_type is info.ggml_type
                np.testing.assert_array_equal(folder.raw(name), file.raw(name), name)
                np.testing.assert_array_equal(folder.dequantise(name), file.dequantise(name))
            mine, theirs = read_spec(folder), read_spec(file)
            assert evolve(mine, name="") == evolve(theirs, name="")
            ids = [
                greedy(Driver(TorchBackend.load(each, read_spec(each), settings())), 0, prompt, 8)
                for each in (folder, file)
            ]
    assert ids[0] == ids[1]
    kinds = {info.ggml_type for name, info in folder.tensors.items() if "_exps.weight" in name}
    assert kinds == {gguf.GGMLQuantizationType.MXFP4}


@pytest.mark.parametrize("fault", ["no scales", "odd rows", "short", "float"])
def test_codes_without_their_scales(shared: Path, tmp_path: Path, fault: str) -> None:
    """What does not go together is refused by name."""
    with open_gguf(shared / "tiny" / "models" / "gpt-oss-mxfp4.gguf") as file:
        tensors = published(file)
        name = "model.layers.2.mlp.experts.gate_up_proj"
        codes, scales = tensors[f"{name}_blocks"], tensors.pop(f"{name}_scales")
        if fault == "short":
            tensors[f"{name}_scales"] = scales[:, :, :1]
        if fault == "float":
            tensors[f"{name}_scales"] = scales.astype(np.float32)
        if fault == "odd rows":
            tensors |= {f"{name}_blocks": codes[:, 1:], f"{name}_scales": scales[:, 1:]}
        write_folder(tmp_path, file, tensors)
    with pytest.raises(ModelFileError, match="gate_up_proj"):
        open_folder(tmp_path)
