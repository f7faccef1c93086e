"""A file's tensors as the torch backend keeps them: dequantised, and fused where used together."""

from collections.abc import Iterator, Mapping
from math import prod
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from kvtrio.model.errors import ModelFileError
from kvtrio.model.gguf_file import TensorInfo
from kvtrio.model.spec import LayerSpec, ModelSpec


class TensorFile(Protocol):
    """What loading needs of a model file."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def dequantise(self, name: str) -> np.ndarray: ...


def weight_plan(spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """Names of the tensors to keep, each with the file's tensors that are stacked into it."""
    names = ["token_embd.weight", "output_norm.weight"]
    names += [] if spec.tied_output else ["output.weight"]
    plan: dict[str, tuple[str, ...]] = {name: (name,) for name in names}
    for layer in spec.layers:
        plan |= dict(_layer_plan(layer))
    return plan


def _layer_plan(layer: LayerSpec) -> Iterator[tuple[str, tuple[str, ...]]]:
    prefix, spec = f"blk.{layer.index}.", layer.attention
    single = ["attn_norm.weight", "attn_output.weight", "ffn_norm.weight", "ffn_down.weight"]
    single += ["attn_output.bias"] if spec.output_bias else []
    single += ["attn_q_norm.weight", "attn_k_norm.weight"] if spec.qk_norm else []
    single += ["post_attention_norm.weight", "post_ffw_norm.weight"] if layer.post_norms else []
    yield from ((prefix + name, (prefix + name,)) for name in single)
    for kind in ("weight", "bias") if spec.bias else ("weight",):
        yield f"{prefix}attn_qkv.{kind}", tuple(f"{prefix}attn_{p}.{kind}" for p in "qkv")
    parts = (f"{prefix}ffn_gate.weight", f"{prefix}ffn_up.weight")
    yield f"{prefix}ffn_gate_up.weight", parts


def weight_bytes(file: TensorFile, spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of all kept tensors."""
    return sum(prod(s) * _kept_type(s, dtype).itemsize for s in _shapes(file, spec))


def passing_bytes(file: TensorFile, spec: ModelSpec) -> int:
    """Bytes that loading needs besides: the largest tensor as float32, on its way in."""
    return max(4 * prod(shape) for shape in _shapes(file, spec))


def _shapes(file: TensorFile, spec: ModelSpec) -> list[tuple[int, ...]]:
    return [file.tensors[part].shape for parts in weight_plan(spec).values() for part in parts]


def load_weights(
    file: TensorFile, spec: ModelSpec, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Matrices in ``dtype``, vectors (norms and biases) in float32.

    Raises ModelFileError when a weight is not finite in its type.
    """
    plan = weight_plan(spec)
    total = sum(file.tensors[part].num_bytes for parts in plan.values() for part in parts)
    weights = {}
    # Shown only on a terminal (disable=None), and only when loading takes a while.
    with tqdm(total=total, desc="loading", unit="B", unit_scale=True, delay=1, disable=None) as bar:
        for name, parts in plan.items():
            weights[name] = _load(file, parts, dtype).to(device)
            bar.update(sum(file.tensors[part].num_bytes for part in parts))
    return weights


def _load(file: TensorFile, parts: tuple[str, ...], dtype: torch.dtype) -> Tensor:
    shapes = [file.tensors[part].shape for part in parts]
    shape = (sum(s[0] for s in shapes), *shapes[0][1:])
    out = torch.empty(shape, dtype=_kept_type(shape, dtype))
    for part, target in zip(parts, out.split_with_sizes([s[0] for s in shapes]), strict=True):
        target.copy_(torch.from_numpy(file.dequantise(part)))
        if not bool(torch.isfinite(target).all()):
            raise ModelFileError(f"tensor {part} holds a weight that is not a finite number")
    return out


def _kept_type(shape: tuple[int, ...], dtype: torch.dtype) -> torch.dtype:
    return dtype if len(shape) > 1 else torch.float32
