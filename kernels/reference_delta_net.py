"""The gated delta rule in plain torch, row by row and in pieces.

A head keeps a matrix S. Row t forgets, corrects what S answers to its key, and reads:

    S' = g_t S,   u_t = beta_t (v_t - k_t S'),   S = S' + k_t^T u_t,   o_t = q_t S

Letters in shapes: R chunks of l rows, H value heads, K and V sizes of a key and a value; all
float32.
Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", https://arxiv.org/abs/2412.06464,
equation 10 and section 3.3.
"""

import torch
from torch import Tensor

from kvtrio.kernels.reference_recurrent import Inputs, decays


def unit_length(x: Tensor, eps: float) -> Tensor:
    """``x / sqrt(sum(x^2) + eps)`` over the last axis; shape and type stay."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def spread_heads(x: Tensor, num_heads: int, tiled: bool) -> Tensor:
    """A key head for each of ``num_heads`` value heads.

    x [..., heads, K]; value head h reads head ``h mod heads`` if ``tiled``, else
    ``h // (num_heads / heads)``; returns [..., num_heads, K].
    """
    repeats = num_heads // x.shape[-2]
    if not tiled:
        return x.repeat_interleave(repeats, -2)
    return x.repeat(*(1 for _ in x.shape[:-2]), repeats, 1)


def delta_rule(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs of one piece, and the state behind it.

    inputs: q, k [R, l, H, K], v [R, l, H, V], log g, beta [R, l, H]; state [R, H, K, V];
    returns [R, l, H, V] and [R, H, K, V].
    """
    by_head = tuple(x.transpose(1, 2) for x in inputs)
    is_single = inputs[0].shape[1] == 1
    out, state = _row(by_head, state) if is_single else _piece(by_head, state)
    return out.transpose(1, 2), state


def _row(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence as it stands, for one row: [R, H, 1, ...]."""
    q, k, v, log_decay, beta = inputs
    state = state * log_decay.exp()[..., None]
    change = (v - k @ state) * beta[..., None]
    state = state + k.transpose(-1, -2) * change
    return q @ state, state


def _piece(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """All rows at once: [R, H, l, ...].

    With D_ti what is left at row t of row i's addition and d_t of the first state S, the
    recurrence unrolls to u_t = beta_t (v_t - d_t k_t S - sum over i < t of D_ti (k_t k_i) u_i): a
    triangular system for all u.
    """
    q, k, v, log_decay, beta = inputs
    left, between = decays(log_decay)
    system = (k @ k.transpose(-1, -2)) * between * beta[..., None]
    wanted = (v - (k @ state) * left[..., None]) * beta[..., None]
    changes = torch.linalg.solve_triangular(
        system.tril(-1), wanted, upper=False, unitriangular=True
    )
    out = (q @ state) * left[..., None] + ((q @ k.transpose(-1, -2)) * between) @ changes
    kept = k * between[..., -1, :, None]
    return out, state * left[..., -1, None, None] + kept.transpose(-1, -2) @ changes
