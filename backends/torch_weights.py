"""A file's tensors as the torch backend keeps them: dequantised, and fused where used together."""

from collections.abc import Mapping
from math import prod
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from kvtrio.model.errors import ModelFileError
from kvtrio.model.gguf_file import TensorInfo
from kvtrio.model.layer_tensors import is_matrix, layer_tensors
from kvtrio.model.spec import LayerSpec, ModelSpec
from kvtrio.model.tensors import norm_biases

STACKS = (
    ("attn_qkv.weight", ("attn_q.weight", "attn_k.weight", "attn_v.weight")),
    ("attn_qkv.bias", ("attn_q.bias", "attn_k.bias", "attn_v.bias")),
    ("ffn_gate_up.weight", ("ffn_gate.weight", "ffn_up.weight")),
    ("ffn_gate_up_shexp.weight", ("ffn_gate_shexp.weight", "ffn_up_shexp.weight")),
    (
        "delta_in.weight",
        ("attn_qkv.weight", "attn_gate.weight", "ssm_beta.weight", "ssm_alpha.weight"),
    ),
    ("delta_in.weight", ("attn_qkv.weight", "attn_gate.weight", "ssm_ba.weight")),
)
"""Matrices that read the same rows, one below the other: one product instead of several."""
ROUTER = "ffn_gate_inp.weight"
"""Tiny, and a rounded one would send rows to other experts: it stays float32."""


class TensorFile(Protocol):
    """What loading needs of a model file."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def raw(self, name: str) -> np.ndarray: ...

    def dequantise(self, name: str) -> np.ndarray: ...


def weight_plan(spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """Names of the tensors to keep, each with the file's tensors that are stacked into it."""
    names = ["token_embd.weight", f"{spec.output_norm}.weight"]
    names += [] if spec.tied_output else ["output.weight"]
    names += norm_biases(spec)
    plan: dict[str, tuple[str, ...]] = {name: (name,) for name in names}
    for layer in spec.layers:
        plan |= _layer_plan(layer, spec.hidden_size)
    return plan


def _layer_plan(layer: LayerSpec, hidden: int) -> dict[str, tuple[str, ...]]:
    left = [name for name, _ in layer_tensors(layer, hidden)]
    plan: dict[str, tuple[str, ...]] = {}
    for stacked, parts in STACKS:
        if set(parts) <= set(left):
            plan[stacked] = parts
            left = [name for name in left if name not in parts]
    plan |= {name: (name,) for name in left}
    prefix = f"blk.{layer.index}."
    return {prefix + name: tuple(prefix + part for part in parts) for name, parts in plan.items()}


def weight_bytes(file: TensorFile, spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of all kept tensors."""
    return sum(
        prod(shape) * kept_type(name, shape, dtype).itemsize
        for name, shape in _shapes(file, spec).items()
    )


def passing_bytes(file: TensorFile, spec: ModelSpec) -> int:
    """Bytes that loading needs besides: the largest tensor as float32, on its way in."""
    return max(4 * prod(shape) for shape in _shapes(file, spec).values())


def _shapes(file: TensorFile, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    names = [part for parts in weight_plan(spec).values() for part in parts]
    return {name: file.tensors[name].shape for name in names}


def load_weights(
    file: TensorFile, spec: ModelSpec, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Matrices in ``dtype``; norms, biases, convolutions and routers in float32.

    Raises ModelFileError when a weight is not finite in its type.
    """
    plan = weight_plan(spec)
    total = sum(file.tensors[part].num_bytes for parts in plan.values() for part in parts)
    weights = {}
    # Shown only on a terminal (disable=None), and only when loading takes a while.
    with tqdm(total=total, desc="loading", unit="B", unit_scale=True, delay=1, disable=None) as bar:
        for name, parts in plan.items():
            weights[name] = load_stack(file, parts, dtype).to(device)
            bar.update(sum(file.tensors[part].num_bytes for part in parts))
    return weights


def load_stack(file: TensorFile, parts: tuple[str, ...], dtype: torch.dtype) -> Tensor:
    shapes = [file.tensors[part].shape for part in parts]
    shape = (sum(s[0] for s in shapes), *shapes[0][1:])
    out = torch.empty(shape, dtype=kept_type(parts[0], shape, dtype))
    for part, target in zip(parts, out.split_with_sizes([s[0] for s in shapes]), strict=True):
        target.copy_(torch.from_numpy(file.dequantise(part)))
        if not bool(torch.isfinite(target).all()):
            raise ModelFileError(f"tensor {part} holds a weight that is not a finite number")
    return out


def kept_type(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.dtype:
    is_narrow = is_matrix(name, shape) and not name.endswith(ROUTER)
    return dtype if is_narrow else torch.float32
