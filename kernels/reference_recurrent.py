"""What recurrent layers have in common, in plain torch: convolution, pieces, decays, gated norms.

Letters in shapes: R chunks of L rows each, C channels, H heads. Everything is float32 between the
matrix before and the matrix after such a layer: errors in a state stay in it.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kvtrio.kernels.reference import rms_norm

PIECE = 64
"""Rows that are computed together; a piece's cost grows with its square."""
Inputs = tuple[Tensor, ...]
Piece = Callable[[Inputs, Tensor], tuple[Tensor, Tensor]]
"""Inputs [R, l, ...] and state before them to outputs [R, l, ...] and state behind them."""


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor
) -> tuple[Tensor, Tensor]:
    """``out[t, c] = sum over j of weight[c, j] * x[t - width + 1 + j, c] + bias[c]``.

    x float32 [R, L, C], weight float32 [C, width], bias float32 [C], history float32
    [R, width - 1, C]: the rows before x; returns out [R, L, C] and the history behind x.
    """
    width, num_rows = weight.shape[1], x.shape[1]
    joined = torch.cat((history, x), 1)
    # Term by term in one order, so that a row's sum does not depend on the chunk it comes in.
    out = joined[:, :num_rows] * weight[:, 0]
    for j in range(1, width):
        out = out + joined[:, j : j + num_rows] * weight[:, j]
    return out if bias is None else out + bias, joined[:, num_rows:]


def pieces(start: int, num_rows: int) -> tuple[int, ...]:
    """Sizes of the pieces of ``num_rows`` rows from position ``start``.

    Borders are at multiples of ``PIECE``, so that who starts from a checkpoint at one of them
    computes the very pieces that were computed without it.
    """
    borders = range(start - start % PIECE + PIECE, start + num_rows, PIECE)
    ends = [*borders, start + num_rows]
    return tuple(end - first for first, end in zip([start, *borders], ends, strict=True))


def in_pieces(
    compute: Piece, inputs: Inputs, state: Tensor, sizes: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """One piece after the other; inputs [R, L, ...] with L the sum of ``sizes``."""
    outputs = []
    for parts in zip(*(x.split_with_sizes(list(sizes), 1) for x in inputs), strict=True):
        out, state = compute(parts, state)
        outputs.append(out)
    return torch.cat(outputs, 1), state


def decays(log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """What is left of a state, and of what row i added to it, when row t reads it.

    log_decay float32 [R, H, l], not above 0; returns from the state before the piece [R, H, l],
    and from row i [R, H, l (t), l (i)], which is 0 for i > t.
    """
    total = log_decay.cumsum(-1)
    between = total[..., :, None] - total[..., None, :]
    future = torch.ones(between.shape[-2:], dtype=torch.bool, device=between.device).triu(1)
    return total.exp(), between.masked_fill(future, float("-inf")).exp()


def gate_then_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``rms_norm(x * silu(gate))`` over the last axis.

    x and gate float32 [N, G, n], weight float32 [G, n]; returns float32 [N, G, n].
    """
    return rms_norm(x * F.silu(gate), weight, eps, torch.float32)


def norm_then_gate(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``rms_norm(x) * silu(gate)`` over the last axis.

    x and gate float32 [N, H, n], weight float32 [n]; returns float32 [N, H, n].
    """
    return rms_norm(x, weight, eps, torch.float32) * F.silu(gate)
