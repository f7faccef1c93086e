"""The state space of Mamba 2 in plain torch, row by row and in pieces.

A head keeps a matrix S. With dt_t > 0 and a decay a_t = exp(dt_t A):

    S = a_t S + dt_t x_t^T B_t,   y_t = C_t S^T + D x_t

Letters in shapes: R chunks of l rows, H heads, P values per head, G groups of heads with B and C in
common, S state size; all float32.
Source: Dao, Gu, "Transformers are SSMs", https://arxiv.org/abs/2405.21060, section 6.
"""

from torch import Tensor

from kvtrio.kernels.reference_recurrent import Inputs, decays


def state_space(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs of one piece, without D x, and the state behind it.

    inputs: dt x [R, l, H, P], B, C [R, l, G, S], log a [R, l, H]; state [R, H, P, S]; returns
    [R, l, H, P] and [R, H, P, S].
    """
    x, b, c, log_decay = (part.transpose(1, 2) for part in inputs)
    repeats = x.shape[1] // b.shape[1]
    parts = (x, b.repeat_interleave(repeats, 1), c.repeat_interleave(repeats, 1), log_decay)
    out, state = _row(parts, state) if x.shape[2] == 1 else _piece(parts, state)
    return out.transpose(1, 2), state


def _row(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence as it stands, for one row: [R, H, 1, ...]."""
    x, b, c, log_decay = inputs
    state = state * log_decay.exp()[..., None] + x.transpose(-1, -2) * b
    return c @ state.transpose(-1, -2), state


def _piece(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """All rows at once: [R, H, l, ...]: the recurrence, unrolled."""
    x, b, c, log_decay = inputs
    left, between = decays(log_decay)
    out = (c @ state.transpose(-1, -2)) * left[..., None]
    out = out + ((c @ b.transpose(-1, -2)) * between) @ x
    kept = x * between[..., -1, :, None]
    return out, state * left[..., -1, None, None] + kept.transpose(-1, -2) @ b
