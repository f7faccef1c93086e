"""Adapters as PEFT saves them: a folder with adapter_config.json and adapter_model.safetensors.

Tensors are ``base_model.model.<module>.lora_A.weight`` [rank, in] and ``.lora_B.weight``
[out, rank], under the names and in the row order of the training library; both are turned into the
base file's here.
"""

import re

import numpy as np

from kvtrio.model.adapter_config import PeftConfig, read_peft_config
from kvtrio.model.adapter_pairs import (
    HEAD,
    UNMATCHED,
    Content,
    Half,
    LowRank,
    Pair,
    Side,
    low_rank,
    pair_up,
    refuse_listed,
)
from kvtrio.model.errors import ModelFileError
from kvtrio.model.families import FAMILIES
from kvtrio.model.paths import OpenPath
from kvtrio.model.safetensors_file import SafetensorsFile, read_safetensors
from kvtrio.model.spec import AttentionSpec, ModelSpec

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
MAX_CONFIG_BYTES = 1 << 20

_TENSOR = re.compile(r"base_model\.model\.([\w.-]+)\.lora_([AB])(?:\.default)?\.weight")
_LAYER = re.compile(r"(?:(?:model|language_model)\.)*layers\.(0|[1-9][0-9]{0,4})\.([a-z_.]+)")
_HEAD = re.compile(r"(?:(?:model|language_model)\.)*lm_head")
_TARGETS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}
_REFUSED = {
    "lora_magnitude_vector": "DoRA is not supported",
    "lora_embedding_": "adapters of the embedding are not supported",
    ".bias": "biases are not supported",
}


def read_peft_adapter(folder: OpenPath, spec: ModelSpec, max_bytes: int) -> Content:
    """Raises ModelFileError when the folder holds no LoRA adapter for this base."""
    if folder.has(PICKLE) and not folder.has(WEIGHTS):
        raise ModelFileError(f"{PICKLE} is a pickle, which can run code; save it as {WEIGHTS}")
    with folder.child(CONFIG) as child:
        config = read_peft_config(bytes(child.read(MAX_CONFIG_BYTES)))
    with folder.child(WEIGHTS) as child:
        file = read_safetensors(child.read(max_bytes))
        return Content(
            targets=_targets(file, config, spec), invocation_tokens=config.invocation_tokens
        )


def _targets(file: SafetensorsFile, config: PeftConfig, spec: ModelSpec) -> dict[str, LowRank]:
    for part, problem in _REFUSED.items():
        refuse_listed(problem, [name for name in file.tensors if part in name])
    refuse_listed("full modules are not supported", [n for n in file.tensors if ".lora_" not in n])
    found = {name: _TENSOR.fullmatch(name) for name in file.tensors}
    matches = {name: match for name, match in found.items() if match}
    refuse_listed(UNMATCHED, [name for name in found if name not in matches])
    halves = [
        Half(
            name=name,
            target=_target(match[1]),
            side=Side(match[2].lower()),
            shape=file.tensors[name].shape,
        )
        for name, match in matches.items()
    ]
    modules = {name: match[1] for name, match in matches.items()}
    return {
        pair.target: _low_rank(file, pair, config.scaling(modules[pair.a.name], pair.rank), spec)
        for pair in pair_up(halves, spec)
    }


def _target(module: str) -> str:
    """The base file's name of a module's weight, or the module's own, which matches nothing."""
    if _HEAD.fullmatch(module):
        return HEAD
    match = _LAYER.fullmatch(module)
    if match is None or match[2] not in _TARGETS:
        return module
    return f"blk.{match[1]}.{_TARGETS[match[2]]}.weight"


def _low_rank(file: SafetensorsFile, pair: Pair, scaling: float, spec: ModelSpec) -> LowRank:
    a, b = file.values(pair.a.name), file.values(pair.b.name)
    _, layer, kind, *_ = [*pair.target.split("."), "", ""]
    if kind in ("attn_q", "attn_k") and FAMILIES[spec.architecture].paired_rows:
        attention = spec.layers[int(layer)].attention
        b = _paired(b, _num_heads(attention, kind))
    return low_rank(a, b, scaling, pair)


def _num_heads(attention: AttentionSpec, kind: str) -> int:
    return attention.num_heads if kind == "attn_q" else attention.num_kv_heads


def _paired(b: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from halves (i, i + n / 2) to adjacent pairs, as in the base file."""
    num_out, rank = b.shape
    halves = b.reshape(num_heads, 2, num_out // num_heads // 2, rank)
    return halves.swapaxes(1, 2).reshape(num_out, rank)
