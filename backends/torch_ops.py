"""``Ops`` over the reference kernels."""

from collections.abc import Mapping

import torch
from torch import Tensor

from kvtrio.backends.torch_adapters import add_changes
from kvtrio.backends.torch_caches import LayerCache
from kvtrio.backends.torch_feed_forward import TorchFeedForward
from kvtrio.backends.torch_latent import TorchLatent
from kvtrio.backends.torch_recurrent import TorchRecurrent
from kvtrio.backends.torch_sampling import sample_rows
from kvtrio.backends.torch_states import LayerStates
from kvtrio.backends.torch_step import TorchStep
from kvtrio.core.batch import Sampled
from kvtrio.kernels import reference as kernels
from kvtrio.kernels import reference_attention as attention
from kvtrio.model.adapter_pairs import HEAD
from kvtrio.model.spec import AttentionSpec, LayerSpec, RopeStyle


class TorchOps(TorchRecurrent, TorchLatent, TorchFeedForward):
    """Implements ``Ops[TorchStep, Tensor, tuple[Sampled | None, ...]]``.

    The residual stream, and q and k between projection and cache, are float32; what enters or
    leaves a matrix has the compute type. Types of the operations as their kernels say.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        caches: Mapping[int, LayerCache],
        states: Mapping[int, LayerStates],
        dtype: torch.dtype,
    ) -> None:
        super().__init__(weights, states, dtype)
        self._caches = caches

    def embed(self, step: TorchStep, weight: str, scale: float) -> Tensor:
        return kernels.embed(step.token_ids, self._weights[weight + ".weight"], scale)

    def norm(self, x: Tensor, weight: str, eps: float) -> Tensor:
        return kernels.rms_norm(x, self._weights[weight + ".weight"], eps, self._dtype)

    def layer_norm(self, x: Tensor, weight: str, bias: bool, eps: float) -> Tensor:
        added = self._weights[weight + ".bias"] if bias else None
        return kernels.layer_norm(x, self._weights[weight + ".weight"], added, eps, self._dtype)

    def narrowed(self, x: Tensor) -> Tensor:
        return x.to(self._dtype)

    def post_norm(self, x: Tensor, weight: str, eps: float) -> Tensor:
        return kernels.rms_norm(x, self._weights[weight + ".weight"], eps, torch.float32)

    def qkv(self, step: TorchStep, x: Tensor, layer: LayerSpec, eps: float) -> Tensor:
        spec, prefix = layer.attention, f"blk.{layer.index}."
        q, k, v = self._project(step, x, spec, prefix)
        q, gate = q.split_with_sizes((spec.head_dim, q.shape[-1] - spec.head_dim), -1)
        if spec.qk_norm:
            q, k = (
                self._head_norm(part, f"{prefix}attn_{n}_norm.weight", spec, eps)
                for n, part in (("q", q), ("k", k))
            )
        if spec.rope.style is not RopeStyle.NONE:
            cos, sin = step.rotations[spec.rope]
            adjacent = spec.rope.style is RopeStyle.NORM
            q, k = (kernels.rope(part, cos, sin, adjacent) for part in (q, k))
        if spec.temperature is not None:
            scale, length = spec.temperature.scale, spec.temperature.length
            q = q * attention.temperature(step.positions, scale, length)
        cache = self._caches[layer.index]
        slots = step.groups[cache.group].slots
        kernels.write_cache(cache.keys, slots, k)
        kernels.write_cache(cache.values, slots, v)
        return torch.cat((q, gate), -1).to(self._dtype) if spec.gated else q.to(self._dtype)

    def attention(self, step: TorchStep, q: Tensor, index: int, spec: AttentionSpec) -> Tensor:
        cache = self._caches[index]
        q, gate = q.split_with_sizes((spec.head_dim, q.shape[-1] - spec.head_dim), -1)
        out = q.new_empty(q.shape[0], spec.num_heads, spec.value_dim)
        sinks = self._weights[f"blk.{index}.attn_sinks.weight"] if spec.sinks else None
        scoring = attention.Scoring(spec.scale, spec.softcap, sinks)
        for run in step.groups[cache.group].runs:
            keys = attention.gather_blocks(cache.keys, run.blocks, run.unwritten)
            values = attention.gather_blocks(cache.values, run.blocks, run.unwritten)
            out[run.rows] = attention.attend(q[run.rows], keys, values, run.mask, scoring)
        return (attention.gate(out, gate) if spec.gated else out).flatten(1)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def scaled(self, x: Tensor, factor: float) -> Tensor:
        return x.float() * factor

    def sampled_rows(self, step: TorchStep, x: Tensor) -> Tensor:
        return x[step.sampled]

    def logits(self, step: TorchStep, x: Tensor, weight: str, softcap: float | None) -> Tensor:
        out = kernels.head(x, self._weights[weight + ".weight"])
        out = add_changes(step.sampled_adapters, x, out, HEAD)
        return out if softcap is None else kernels.softcap(out, softcap)

    def sample(self, step: TorchStep, logits: Tensor) -> tuple[Sampled | None, ...]:
        return sample_rows(logits, step.samples)

    def _project(
        self, step: TorchStep, x: Tensor, spec: AttentionSpec, prefix: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, with its gate behind it in each head if there is one, k and v: [N, heads, dim]."""
        fused = self.linear(step, x, prefix + "attn_qkv", spec.bias).float()
        key_size = spec.num_kv_heads * spec.head_dim
        value_size = spec.num_kv_heads * spec.value_dim
        query_size = fused.shape[-1] - key_size - value_size
        q, k, v = fused.split_with_sizes((query_size, key_size, value_size), -1)
        return (
            q.reshape(-1, spec.num_heads, query_size // spec.num_heads),
            k.reshape(-1, spec.num_kv_heads, spec.head_dim),
            v.reshape(-1, spec.num_kv_heads, spec.value_dim),
        )

    def _head_norm(self, x: Tensor, weight: str, spec: AttentionSpec, eps: float) -> Tensor:
        rows = x.flatten(1) if spec.joint_norm else x
        return kernels.rms_norm(rows, self._weights[weight], eps, torch.float32).view_as(x)
