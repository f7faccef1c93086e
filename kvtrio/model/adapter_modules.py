"""Modules as transformers names them, and where an adapter's change of one goes in the base file.

Base files hold some matrices in another arrangement than the library that an adapter was trained
with: rows of B follow the rows of the matrix, columns of A its columns. A matrix that the base file
holds as two is changed by one A and the rows of B that each has.

The arrangements are facts from llama.cpp's convert_hf_to_gguf.py; see ``folder_tensors``.
"""

import re
from collections.abc import Mapping

import numpy as np
from attrs import frozen

from kvtrio.model.adapter_pairs import HEAD
from kvtrio.model.families import FAMILIES
from kvtrio.model.folder_delta_net import Heads
from kvtrio.model.layer_tensors import Shape
from kvtrio.model.spec import (
    AttentionSpec,
    DeltaNetSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LayerSpec,
    ModelSpec,
)
from kvtrio.model.spec_feed_forward import SharedExpertSpec

_GATED = ("gate", "up", "down")
_LAYER = re.compile(
    r"(?:(?:model|language_model|backbone)\.)*layers\.(0|[1-9][0-9]{0,4})\.([a-z0-9_.]+)"
)
_HEAD = re.compile(r"(?:(?:model|language_model)\.)*lm_head")
_TARGETS: Mapping[str, str] = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.out_proj": "attn_output",
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
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in _GATED},
    **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in _GATED},
    **{f"feed_forward.w{i}": f"ffn_{part}" for i, part in ((1, "gate"), (2, "down"), (3, "up"))},
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    **{f"{name}.in_proj": "ssm_in" for name in ("mixer", "mamba")},
    **{f"{name}.out_proj": "ssm_out" for name in ("mixer", "mamba")},
}
_GROUPED: Mapping[str, str] = {
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.out_proj": "ssm_out",
}
"""Of delta nets whose projections are fused head by head (Qwen3-Next)."""
_TILED: Mapping[str, str] = {
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.out_proj": "ssm_out",
}
"""Of those whose value heads the base file has in another order (Qwen3.5)."""
_QKVZ, _INPUT = "linear_attn.in_proj_qkvz", "shared_mlp.input_linear"


@frozen(eq=False)
class Split:
    """A matrix [out, in] of the library's that the base file holds as several."""

    shape: Shape
    rows: Mapping[str, np.ndarray]
    """Of the matrix, in the order of each part."""


def target_of(spec: ModelSpec, module: str) -> str:
    """The base file's name of a module's weight; the module's own where there is a ``Split`` of it,
    or nothing."""
    if _HEAD.fullmatch(module):
        return HEAD
    match = _LAYER.fullmatch(module)
    if match is None or int(match[1]) >= len(spec.layers):
        return module
    name = match[2]
    if name in (_QKVZ, _INPUT):
        return f"blk.{match[1]}.{name}"
    ours = _names(spec.layers[int(match[1])]).get(name)
    return f"blk.{match[1]}.{ours}.weight" if ours else module


def _names(layer: LayerSpec) -> Mapping[str, str]:
    if isinstance(layer.mixer, DeltaNetSpec):
        return {**_TARGETS, **(_GROUPED if layer.mixer.fused_gates else _TILED)}
    if isinstance(layer.feed_forward, ExpertsSpec):
        return {**_TARGETS, "shared_mlp.output_linear": "ffn_down_shexp"}
    return {**_TARGETS, "shared_mlp.output_linear": "ffn_down"}


def splits(spec: ModelSpec) -> dict[str, Split]:
    """By the name that ``target_of`` gives."""
    found = {}
    for layer in spec.layers:
        prefix, mixer, hidden = f"blk.{layer.index}.", layer.mixer, spec.hidden_size
        if isinstance(mixer, DeltaNetSpec) and mixer.fused_gates:
            found[prefix + _QKVZ] = _qkvz(Heads.of(mixer), prefix, hidden)
        if (size := _shared_size(layer)) and FAMILIES[spec.architecture].granite_scales:
            end = "_shexp" if isinstance(layer.feed_forward, ExpertsSpec) else ""
            gate, up = np.split(np.arange(2 * size), 2)
            names = (f"{prefix}ffn_gate{end}.weight", f"{prefix}ffn_up{end}.weight")
            parts = dict(zip(names, (gate, up), strict=True))
            found[prefix + _INPUT] = Split((2 * size, hidden), parts)
    return found


def _qkvz(heads: Heads, prefix: str, hidden: int) -> Split:
    rows = np.arange(heads.num_mixed + heads.num_values * heads.value_dim)
    parts = {
        f"{prefix}attn_qkv.weight": heads.part(rows, is_gate=False),
        f"{prefix}attn_gate.weight": heads.part(rows, is_gate=True),
    }
    return Split((len(rows), hidden), parts)


def _shared_size(layer: LayerSpec) -> int:
    match layer.feed_forward:
        case FeedForwardSpec(size=size):
            return size
        case ExpertsSpec(shared=SharedExpertSpec(size=size)):
            return size
    return 0


def arranged(
    spec: ModelSpec, target: str, a: np.ndarray, b: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """A [rank, in] and B [out, rank] of one base matrix, in the base file's arrangement."""
    _, number, kind, *_ = [*target.split("."), "", ""]
    mixer = spec.layers[int(number)].mixer if number.isdecimal() else None
    match mixer:
        case AttentionSpec() if FAMILIES[spec.architecture].paired_rows:
            heads = {"attn_q": mixer.num_heads, "attn_k": mixer.num_kv_heads}
            return a, _paired(b, heads[kind]) if kind in heads else b
        case DeltaNetSpec(fused_gates=False):
            return _tiled(Heads.of(mixer), kind, a, b)
    return a, b


def _tiled(heads: Heads, kind: str, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    match kind:
        case "attn_qkv":
            return a, heads.tiled_tail(b)
        case "attn_gate" | "ssm_alpha" | "ssm_beta":
            return a, heads.tiled(b)
        case "ssm_out":
            return heads.tiled(a.T).T, b
    return a, b


def _paired(b: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from halves (i, i + n / 2) to adjacent pairs, as in the base file."""
    num_out, rank = b.shape
    halves = b.reshape(num_heads, 2, num_out // num_heads // 2, rank)
    return halves.swapaxes(1, 2).reshape(num_out, rank)
