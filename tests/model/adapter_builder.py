"""Adapters for tests: both published forms, good and broken."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from model.gguf_builder import gguf_bytes, tensor, tiny_model

from kvtrio.model.adapter_pairs import adaptable
from kvtrio.model.architectures import read_spec
from kvtrio.model.gguf_file import open_gguf
from kvtrio.model.spec import ModelSpec

Pairs = dict[str, tuple[np.ndarray, np.ndarray]]
"""A [rank, in] and B [out, rank] by base tensor name."""
MODULES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
PREFIX = "base_model.model."


def tiny_spec(folder: Path, architecture: str = "llama", num_layers: int = 2) -> ModelSpec:
    """Of a model of ``gguf_builder``, which is written to ``folder``."""
    path = folder / f"{architecture}.gguf"
    path.write_bytes(tiny_model(architecture, num_layers))
    with open_gguf(path) as file:
        return read_spec(file)


def random_pairs(spec: ModelSpec, rank: int = 2, seed: int = 0) -> Pairs:
    """For every matrix that can have an adapter, in the base file's order of rows."""
    rng = np.random.default_rng(seed)
    return {
        name: (
            rng.standard_normal((rank, num_in)).astype(np.float32),
            rng.standard_normal((num_out, rank)).astype(np.float32),
        )
        for name, (num_out, num_in) in adaptable(spec).items()
    }


def module_of(target: str) -> str:
    """What a training library calls the module of a base tensor."""
    if target == "output.weight":
        return "lm_head"
    _, layer, kind, _ = target.split(".")
    return f"model.layers.{layer}.{MODULES[kind]}"


def gguf_adapter(
    pairs: Pairs, architecture: str = "llama", alpha: float | None = 4.0, **changes: object
) -> bytes:
    """``changes``: metadata keys with "_" for "."; None takes a key away."""
    metadata: dict[str, object] = {
        "general.type": "adapter",
        "general.architecture": architecture,
        "adapter.type": "lora",
    }
    metadata |= {} if alpha is None else {"adapter.lora.alpha": float(alpha)}
    metadata |= {key.replace("__", "."): value for key, value in changes.items()}
    tensors = []
    for name, (a, b) in pairs.items():
        tensors += [tensor(name + ".lora_a", a), tensor(name + ".lora_b", b)]
    return gguf_bytes({key: v for key, v in metadata.items() if v is not None}, tensors)


def config(rank: int = 2, alpha: float = 4.0, **changes: object) -> dict[str, object]:
    """As PEFT writes it, with the settings that do not matter here."""
    plain: dict[str, object] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "somebody/some-model",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.05,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "use_qalora": False,
        "qalora_group_size": 16,
        "fan_in_fan_out": False,
        "lora_bias": False,
        "modules_to_save": None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "layer_replication": None,
        "init_lora_weights": True,
        "rank_pattern": {},
        "alpha_pattern": {},
        "loftq_config": {},
        "megatron_core": "megatron.core",
        "trainable_token_indices": None,
        "peft_version": "0.18.0",
    }
    return plain | changes


def in_halves(b: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of B from the base file's order to the training library's, one by one."""
    size = len(b) // num_heads
    rows = [
        head * size + 2 * i + side for head in range(num_heads) for side in (0, 1)
        for i in range(size // 2)
    ]  # fmt: skip
    return b[rows]


def peft_tensors(pairs: Pairs, spec: ModelSpec) -> dict[str, np.ndarray]:
    """The tensors of an adapter_model.safetensors that means the same as ``pairs``."""
    tensors = {}
    for target, (a, b) in pairs.items():
        kind = target.split(".")[-2]
        if spec.architecture == "llama" and kind in ("attn_q", "attn_k"):
            attention = spec.layers[0].attention
            heads = attention.num_heads if kind == "attn_q" else attention.num_kv_heads
            b = in_halves(b, heads)
        module = PREFIX + module_of(target)
        tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    return tensors


def peft_folder(
    folder: Path, tensors: Mapping[str, np.ndarray], settings: Mapping[str, object]
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "adapter_model.safetensors").write_bytes(safetensors_bytes(tensors))
    return folder


DTYPES = {"float32": "F32", "float16": "F16", "uint16": "BF16", "float64": "F64", "int64": "I64"}
"""Names in the format; uint16 arrays stand for bfloat16."""


def safetensors_bytes(tensors: Mapping[str, np.ndarray]) -> bytes:
    """A whole file, written without the library: it must not be the judge of itself."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name, values in tensors.items():
        raw = values.tobytes()
        places = [len(body), len(body) + len(raw)]
        kind = DTYPES[values.dtype.name]
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": places}
        body += raw
    return with_header(header, body)


def with_header(header: object, body: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + body
