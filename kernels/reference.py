"""The operations of the forward pass in plain torch: the executable specification of every kernel.

Letters in shapes: N rows of a step (one row, one token), D hidden size, O and I outputs and inputs
of a matrix. "Compute type" is the type of matrices and KV cache, float32 or bfloat16. The residual
stream is float32 whatever the compute type: rounding it in every layer costs more accuracy than all
other roundings together. Faster kernels are held against these functions.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

NUM_EXACT = 64
"""Logits per row that are computed in float32."""


def embed(token_ids: Tensor, table: Tensor, scale: float) -> Tensor:
    """``table[token_ids] * scale``.

    token_ids int64 [N], table compute type [V, D]; returns float32 [N, D].
    """
    rows = F.embedding(token_ids, table).float()
    return rows if scale == 1.0 else rows * scale


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis, computed in float32.

    x [..., D] of any float type, weight float32 [D] or [..., D]; returns ``dtype`` [..., D].
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight).to(dtype)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype
) -> Tensor:
    """``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` over the last axis, in float32.

    x [..., D] of any float type, weight and bias float32 [D]; returns ``dtype`` [..., D].
    """
    return F.layer_norm(x.float(), weight.shape, weight, bias, eps).to(dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, sums in float32, rounded once to the compute type.

    x compute type [N, I], weight compute type [O, I], bias float32 [O]; returns compute type
    [N, O].
    """
    out = F.linear(x, weight)
    return out if bias is None else (out.float() + bias).to(x.dtype)


def head(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` for the logits, with the largest ``NUM_EXACT`` of each row in float32.

    A product rounded to bfloat16 has steps of 1/8 at 16 to 32, where logits lie: the best tokens
    would tie, and the lowest id would win. The few that can be chosen are computed once more from
    the same values; each row's are its own, so neighbours change nothing.

    x compute type [N, I], weight compute type [O, I]; returns float32 [N, O].
    """
    rough = F.linear(x, weight).float()
    if x.dtype is torch.float32:
        return rough
    best = rough.topk(min(NUM_EXACT, rough.shape[-1]), dim=-1).indices
    exact = torch.bmm(weight[best].float(), x.float().unsqueeze(-1)).squeeze(-1)
    return rough.scatter_(-1, best, exact)


def rope_angles(
    positions: Tensor, num_rotated: int, base: float, scale: float, factors: Tensor | None
) -> Tensor:
    """Angle of pair i at position p: ``p * scale * base^(-2i / num_rotated) / factors[i]``.

    positions int64 [N] on the CPU, factors float [num_rotated / 2]; returns float64
    [N, num_rotated / 2]: at position 100,000 a float32 angle is already wrong by 0.004.
    """
    pairs = torch.arange(0, num_rotated, 2, dtype=torch.float64)
    frequencies = base ** (-pairs / num_rotated) * scale
    if factors is not None:
        frequencies = frequencies / factors.double().cpu()
    return positions.double()[:, None] * frequencies


def rope(x: Tensor, cos: Tensor, sin: Tensor, adjacent: bool) -> Tensor:
    """Rotate pairs of the first ``2 R`` values of each head; the rest stays.

    Pair i is (2i, 2i + 1) if ``adjacent``, else (i, i + R); (a, b) becomes
    (a cos - b sin, a sin + b cos). x float32 [N, H, head_dim], cos and sin float32 [N, R];
    returns float32 [N, H, head_dim].
    """
    num_pairs = cos.shape[-1]
    rotated, rest = x[..., : 2 * num_pairs], x[..., 2 * num_pairs :]
    cos, sin = cos[:, None, :], sin[:, None, :]
    a, b = _pairs(rotated, num_pairs, adjacent)
    turned = (a * cos - b * sin, a * sin + b * cos)
    joined = torch.stack(turned, -1).flatten(-2) if adjacent else torch.cat(turned, -1)
    return joined if rest.shape[-1] == 0 else torch.cat((joined, rest), -1)


def _pairs(x: Tensor, num_pairs: int, adjacent: bool) -> tuple[Tensor, Tensor]:
    if adjacent:
        return x[..., 0::2], x[..., 1::2]
    return x[..., :num_pairs], x[..., num_pairs:]


def write_cache(cache: Tensor, slots: Tensor, values: Tensor) -> None:
    """Store row n in slot ``slots[n] = block * block_size + place``.

    cache compute type [num_blocks, block_size, kv_heads, dim], changed in place; slots int64 [N];
    values float [N, kv_heads, dim].
    """
    cache.view(-1, *cache.shape[2:])[slots] = values.to(cache.dtype)


def copy_places(source: Tensor, target: Tensor, num_tokens: int) -> None:
    """Copy the first ``num_tokens`` places of a block in all layers; devices may differ.

    source, target [layers, block_size, kv_heads, dim]: one block of a cache each; target is
    changed in place.
    """
    target[:, :num_tokens] = source[:, :num_tokens]


def gated(gate: Tensor, up: Tensor, gelu_tanh: bool) -> Tensor:
    """``act(gate) * up``: SiLU, ``g / (1 + exp(-g))``, or GELU in its tanh form,
    ``g / 2 (1 + tanh(sqrt(2 / pi) (g + 0.044715 g^3)))``; computed in float32.

    gate and up compute type [N, F]; returns compute type [N, F].
    """
    wide = gate.float()
    active = F.gelu(wide, approximate="tanh") if gelu_tanh else F.silu(wide)
    return (active * up).to(gate.dtype)


def gated_clamped(gate: Tensor, up: Tensor) -> Tensor:
    """``g / (1 + exp(-1.702 g)) * (u + 1)`` with ``g = min(gate, 7)`` and u = up within -7 to 7,
    computed in float32 (gpt-oss). Shapes and types as ``gated``."""
    wide, other = gate.float().clamp(max=7.0), up.float().clamp(-7.0, 7.0)
    return (wide * torch.sigmoid(1.702 * wide) * (other + 1.0)).to(gate.dtype)


def activated(up: Tensor, gelu_tanh: bool) -> Tensor:
    """``act(up)``, as in ``gated``; shape and type stay."""
    wide = up.float()
    return (F.gelu(wide, approximate="tanh") if gelu_tanh else F.silu(wide)).to(up.dtype)


def softcap(x: Tensor, cap: float) -> Tensor:
    """``cap * tanh(x / cap)``; shape and type stay."""
    return torch.tanh(x / cap) * cap
