"""Latent attention of ``Ops`` over the reference kernels."""

from collections.abc import Mapping

import torch
from torch import Tensor

from kvtrio.backends.torch_caches import LayerCache
from kvtrio.backends.torch_products import TorchProducts
from kvtrio.backends.torch_step import TorchStep
from kvtrio.kernels import reference as kernels
from kvtrio.kernels import reference_attention as attention
from kvtrio.model.spec import LatentAttentionSpec, LayerSpec, RopeStyle


class TorchLatent(TorchProducts):
    """The cache keeps one row per token: normed latent values, and behind them rotated ones."""

    _caches: Mapping[int, LayerCache]

    def latent_attention(self, step: TorchStep, x: Tensor, layer: LayerSpec, eps: float) -> Tensor:
        prefix, cache = f"blk.{layer.index}.attn_", self._caches[layer.index]
        row = self._row(step, x, layer, eps)
        kernels.write_cache(cache.keys, step.groups[cache.group].slots, row)
        q = self._queries(step, x, layer, eps).to(self._dtype)
        out = self._attended(step, q, layer)
        up = self._weights[prefix + "v_b.weight"]
        return torch.einsum("nhl,hvl->nhv", out, up).flatten(1)

    def _attended(self, step: TorchStep, q: Tensor, layer: LayerSpec) -> Tensor:
        """Compute type, [N, heads, key_dim] to [N, heads, latent_dim]."""
        spec, cache = layer.mixer_of(LatentAttentionSpec), self._caches[layer.index]
        out = q.new_empty(q.shape[0], spec.num_heads, spec.latent_dim)
        scoring = attention.Scoring(spec.scale)
        for run in step.groups[cache.group].runs:
            keys = attention.gather_blocks(cache.keys, run.blocks, run.unwritten)
            values = keys[..., : spec.latent_dim]
            out[run.rows] = attention.attend(q[run.rows], keys, values, run.mask, scoring)
        return out

    def _row(self, step: TorchStep, x: Tensor, layer: LayerSpec, eps: float) -> Tensor:
        """What the cache keeps of each token: float32 [N, 1, key_dim]."""
        spec, prefix = layer.mixer_of(LatentAttentionSpec), f"blk.{layer.index}.attn_"
        both = self.linear(step, x, prefix + "kv_a_mqa", False).float()
        latent, rotated = both.split_with_sizes((spec.latent_dim, spec.rope.num_rotated), -1)
        weight = self._weights[prefix + "kv_a_norm.weight"]
        latent = kernels.rms_norm(latent, weight, eps, torch.float32)
        return torch.cat((latent[:, None], self._rotated(step, rotated[:, None], spec)), -1)

    def _queries(self, step: TorchStep, x: Tensor, layer: LayerSpec, eps: float) -> Tensor:
        """Taken to where the cache's rows are: float32 [N, heads, key_dim]."""
        spec, prefix = layer.mixer_of(LatentAttentionSpec), f"blk.{layer.index}.attn_"
        if spec.query_rank is None:
            q = self.linear(step, x, prefix + "q", False)
        else:
            q = self.linear(step, x, prefix + "q_a", False)
            q = kernels.rms_norm(q, self._weights[prefix + "q_a_norm.weight"], eps, self._dtype)
            q = self.linear(step, q, prefix + "q_b", False)
        q = q.view(-1, spec.num_heads, spec.query_dim)
        plain, rotated = q.split_with_sizes((spec.plain_dim, spec.rope.num_rotated), -1)
        down = self._weights[prefix + "k_b.weight"]
        plain = torch.einsum("nhp,hlp->nhl", plain, down)
        return torch.cat((plain.float(), self._rotated(step, rotated.float(), spec)), -1)

    def _rotated(self, step: TorchStep, x: Tensor, spec: LatentAttentionSpec) -> Tensor:
        cos, sin = step.rotations[spec.rope]
        return kernels.rope(x, cos, sin, spec.rope.style is RopeStyle.NORM)
