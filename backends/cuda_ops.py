"""``Ops`` over Triton's kernels.

1. ``add`` only remembers what is to be added; the operation that next reads the sum adds it, in
   place: the norm in its own kernel, all others at once. Until then the tensor from before the
   addition, another view of the same memory, still reads as before; parallel layers do that.
2. What has no kernel here (routers, norms of all heads together, LayerNorm) is the torch backend's,
   on the device.
3. Nothing here looks at a value on the device: decoding steps are captured.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from kvtrio.backends.cuda_adapters import AdapterTables
from kvtrio.backends.cuda_step import CudaStep
from kvtrio.backends.cuda_weights import Matrix, Weights, num_rows
from kvtrio.backends.torch_caches import LayerCache
from kvtrio.backends.torch_ops import TorchOps
from kvtrio.backends.torch_recurrent import delta_heads
from kvtrio.backends.torch_states import LayerStates
from kvtrio.backends.torch_step import TorchStep
from kvtrio.kernels import reference as kernels
from kvtrio.kernels.triton_attention import Shape, attend
from kvtrio.kernels.triton_experts import Experts, Stack, apply_experts
from kvtrio.kernels.triton_latent import LatentShape, attend_latent
from kvtrio.kernels.triton_mamba2 import SpaceShape, state_space
from kvtrio.kernels.triton_matmul import multiply, take_rows
from kvtrio.kernels.triton_pack import Packed
from kvtrio.kernels.triton_qkv import QkvRows, QkvShape, write_qkv
from kvtrio.kernels.triton_recurrent import DeltaShape, causal_conv, delta_rule
from kvtrio.kernels.triton_rows import Act, add_norm, gated
from kvtrio.model.adapter_pairs import HEAD
from kvtrio.model.spec import (
    Activation,
    AttentionSpec,
    DeltaNetSpec,
    ExpertsSpec,
    LatentAttentionSpec,
    LayerSpec,
    Mamba2Spec,
    RopeStyle,
    ShortConvSpec,
)

ACTS = {
    Activation.SILU: Act.SILU,
    Activation.GELU_TANH: Act.GELU_TANH,
    Activation.CLAMPED: Act.CLAMPED,
}


class CudaOps(TorchOps):
    """Implements ``Ops[CudaStep, Tensor, tuple[Sampled, ...]]``; types as ``TorchOps``."""

    def __init__(
        self,
        weights: Weights,
        caches: Mapping[int, LayerCache],
        states: Mapping[int, LayerStates],
        adapters: AdapterTables,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(weights.tensors, caches, states, dtype)
        self._packed = weights.matrices
        self._adapters = adapters
        self._pending: tuple[Tensor, Tensor] | None = None

    def embed(self, step: TorchStep, weight: str, scale: float) -> Tensor:
        self._pending = None
        matrix = self._packed.get(weight + ".weight")
        if matrix is None:
            return super().embed(step, weight, scale)
        (table,) = matrix.parts
        assert isinstance(table, Packed)
        rows = take_rows(table, step.token_ids)
        return rows if scale == 1.0 else rows * scale

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        self.settle(x)
        total = x.view_as(x)
        self._pending = (total, y)
        return total

    def norm(self, x: Tensor, weight: str, eps: float) -> Tensor:
        change = None
        if self._pending is not None and self._pending[0] is x:
            change, self._pending = self._pending[1], None
        return add_norm(x, change, self._weights[weight + ".weight"], eps, self._dtype)

    def layer_norm(self, x: Tensor, weight: str, bias: bool, eps: float) -> Tensor:
        self.settle(x)
        return super().layer_norm(x, weight, bias, eps)

    def narrowed(self, x: Tensor) -> Tensor:
        self.settle(x)
        # A copy even of float32: sums go on in the same memory.
        return x.to(self._dtype, copy=True)

    def post_norm(self, x: Tensor, weight: str, eps: float) -> Tensor:
        return add_norm(x, None, self._weights[weight + ".weight"], eps, torch.float32)

    def sampled_rows(self, step: TorchStep, x: Tensor) -> Tensor:
        self.settle(x)
        return super().sampled_rows(step, x)

    def linear(self, step: TorchStep, x: Tensor, weight: str, bias: bool) -> Tensor:
        name = weight + ".weight"
        matrix = self._packed.get(name)
        added = self._weights[weight + ".bias"] if bias else None
        if matrix is None:
            out = kernels.linear(x, self._weights[name], added)
        else:
            out = self._product(x, matrix, x.dtype)
            out = out if added is None else (out.float() + added).to(x.dtype)
        return self._adapters.add(_own(step).carried, x, out, name)

    def qkv(self, step: TorchStep, x: Tensor, layer: LayerSpec, eps: float) -> Tensor:
        spec, prefix = layer.attention, f"blk.{layer.index}."
        if spec.joint_norm or spec.temperature is not None:
            return super().qkv(step, x, layer, eps)
        cache = self._caches[layer.index]
        turned = spec.rope.style is not RopeStyle.NONE
        cos, sin = step.rotations[spec.rope] if turned else (None, None)
        norms = None
        if spec.qk_norm:
            norms = tuple(self._weights[f"{prefix}attn_{part}_norm.weight"] for part in "qk")
        return write_qkv(
            self.linear(step, x, prefix + "attn_qkv", spec.bias),
            (norms[0], norms[1]) if norms else None,
            QkvRows(step.groups[cache.group].slots, cos, sin),
            (cache.keys, cache.values),
            _qkv_shape(spec, eps),
        )

    def attention(self, step: TorchStep, q: Tensor, index: int, spec: AttentionSpec) -> Tensor:
        cache = self._caches[index]
        out = q.new_empty(q.shape[0], spec.num_heads, spec.value_dim)
        sizes = (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.value_dim)
        shape = Shape(*sizes, spec.scale, spec.softcap, spec.window)
        sinks = self._weights[f"blk.{index}.attn_sinks.weight"] if spec.sinks else None
        for queries in _own(step).queries[cache.group]:
            attend(q, (cache.keys, cache.values), queries, shape, out, sinks)
        if not spec.gated:
            return out.flatten(1)
        gates = q.flatten(0, 1)[:, spec.head_dim :]
        return gated(gates, out.flatten(0, 1), Act.SIGMOID).view(out.shape).flatten(1)

    def _attended(self, step: TorchStep, q: Tensor, layer: LayerSpec) -> Tensor:
        spec, cache = layer.mixer_of(LatentAttentionSpec), self._caches[layer.index]
        out = q.new_empty(q.shape[0], spec.num_heads, spec.latent_dim)
        sizes = (spec.num_heads, spec.latent_dim, spec.rope.num_rotated, spec.scale)
        for queries in _own(step).queries[cache.group]:
            attend_latent(q, cache.keys, queries, LatentShape(*sizes), out)
        return out

    def logits(self, step: TorchStep, x: Tensor, weight: str, softcap: float | None) -> Tensor:
        matrix = self._packed.get(weight + ".weight")
        if matrix is None:
            out = kernels.head(x, self._weights[weight + ".weight"])
        else:
            out = self._product(x, matrix, torch.float32)
        out = self._adapters.add(_own(step).sampled_carried, x, out, HEAD)
        return out if softcap is None else kernels.softcap(out, softcap)

    def short_conv(self, step: TorchStep, x: Tensor, layer: LayerSpec) -> Tensor:
        prefix = f"blk.{layer.index}.shortconv."
        assert isinstance(layer.mixer, ShortConvSpec)
        b, c, x = self.linear(step, x, prefix + "in_proj", False).float().chunk(3, -1)
        states = self._states[layer.index]
        runs = _own(step).runs[states.group]
        weight = self._weights[prefix + "conv.weight"]
        out = causal_conv((b * x).contiguous(), weight, None, states.history, runs, False)
        return (c * out).to(self._dtype)

    def _delta_rows(
        self, step: TorchStep, layer: LayerSpec, rows: tuple[Tensor, Tensor, Tensor], eps: float
    ) -> Tensor:
        mixed, log_decay, beta = rows
        spec, prefix = layer.mixer_of(DeltaNetSpec), f"blk.{layer.index}."
        states, own = self._states[layer.index], _own(step)
        weight = self._weights[prefix + "ssm_conv1d.weight"]
        bias = self._weights.get(prefix + "ssm_conv1d.bias")
        runs = own.runs[states.group]
        turned = causal_conv(mixed.contiguous(), weight, bias, states.history, runs, True)
        q, k, v = (part[0].contiguous() for part in delta_heads(spec, turned[None], eps))
        out = torch.empty_like(v)
        shape = DeltaShape(spec.num_value_heads, spec.key_dim, spec.value_dim)
        inputs = (q, k, v, log_decay.contiguous(), beta.contiguous())
        for part in own.split_runs[states.group]:
            delta_rule(inputs, states.matrices, part, shape, out)
        return out

    def _mamba2_rows(
        self, step: TorchStep, layer: LayerSpec, rows: tuple[Tensor, Tensor, Tensor]
    ) -> Tensor:
        mixed, dt, log_decay = rows
        spec, prefix = layer.mixer_of(Mamba2Spec), f"blk.{layer.index}."
        states, own = self._states[layer.index], _own(step)
        weight = self._weights[prefix + "ssm_conv1d.weight"]
        bias = self._weights[prefix + "ssm_conv1d.bias"]
        runs = own.runs[states.group]
        turned = causal_conv(mixed.contiguous(), weight, bias, states.history, runs, True)
        out = mixed.new_empty(mixed.shape[0], spec.num_heads, spec.head_dim)
        shape = SpaceShape(spec.num_heads, spec.head_dim, spec.num_groups, spec.state_size)
        inputs, skip = (turned, dt.contiguous(), log_decay), self._weights[prefix + "ssm_d"]
        for part in own.split_runs[states.group]:
            state_space(inputs, skip, states.matrices, part, shape, out)
        return out

    def _gated(
        self, step: TorchStep, x: Tensor, names: tuple[str, str], activation: Activation
    ) -> Tensor:
        prefix, suffix = names
        gate, up = self.linear(step, x, f"{prefix}ffn_gate_up{suffix}", False).chunk(2, -1)
        hidden = gated(gate, up, ACTS[activation])
        return self.linear(step, hidden, f"{prefix}ffn_down{suffix}", False)

    def _chosen(
        self, x: Tensor, choice: tuple[Tensor, Tensor], prefix: str, spec: ExpertsSpec
    ) -> Tensor:
        names = (f"{prefix}ffn_{part}_exps" for part in ("gate", "up", "down"))
        gate, up, down = (self._stack(name, spec) for name in names)
        return apply_experts(x, choice, Experts(gate, up, down, ACTS[spec.activation]))

    def _stack(self, name: str, spec: ExpertsSpec) -> Stack:
        bias = self._weights[name + ".bias"] if spec.biases else None
        found = self._packed.get(name + ".weight")
        matrix = found.parts[0] if found else self._weights[name + ".weight"].flatten(0, 1)
        return Stack(matrix, num_rows(matrix) // spec.num_experts, bias)

    def _product(self, x: Tensor, matrix: Matrix, dtype: torch.dtype) -> Tensor:
        x = x.contiguous()
        out = torch.empty((x.shape[0], matrix.num_outputs), dtype=dtype, device=x.device)
        first = 0
        for part in matrix.parts:
            target = out[:, first : first + num_rows(part)]
            if isinstance(part, Packed):
                multiply(x, part, target)
            else:
                target.copy_(kernels.linear(x, part))
            first += num_rows(part)
        return out

    def settle(self, x: Tensor) -> None:
        """Add what was to be added to ``x``."""
        if self._pending is not None and self._pending[0] is x:
            x += self._pending[1]
            self._pending = None


def _own(step: TorchStep) -> CudaStep:
    assert isinstance(step, CudaStep)
    return step


def _qkv_shape(spec: AttentionSpec, eps: float) -> QkvShape:
    return QkvShape(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        value_dim=spec.value_dim,
        num_rotated=0 if spec.rope.style is RopeStyle.NONE else spec.rope.num_rotated,
        adjacent=spec.rope.style is RopeStyle.NORM,
        gated=spec.gated,
        eps=eps,
    )
