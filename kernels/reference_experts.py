"""Feed-forwards of which each row uses a few, in plain torch.

Letters in shapes: N rows, E experts, U used by each row, D hidden size, F size of an expert.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvtrio.kernels.reference import linear

Activate = Callable[[Tensor, Tensor], Tensor]
"""Of gate and up, as ``reference.gated``."""


@dataclass(frozen=True)
class Scores:
    """How the weights of experts follow from their logits."""

    is_sigmoid: bool
    """Else the softmax over all."""
    normalised: bool
    scale: float
    num_groups: int = 1
    num_groups_used: int = 1


@dataclass(frozen=True, eq=False)
class Matrices:
    """Of all experts, compute type: gate and up [E, F, D], down [E, D, F]; biases float32 [E, F],
    [E, F] and [E, D], or none."""

    gate: Tensor
    up: Tensor
    down: Tensor
    biases: tuple[Tensor, Tensor, Tensor] | None = None


def choose_experts(logits: Tensor, num_used: int) -> tuple[Tensor, Tensor]:
    """The experts with the largest logits, and the softmax over those as their weights.

    logits float32 [N, E]; returns int64 [N, U] and float32 [N, U].
    """
    best, experts = logits.topk(num_used, -1)
    return experts, torch.softmax(best, -1)


def choose_scored(
    logits: Tensor, bias: Tensor | None, num_used: int, scores: Scores
) -> tuple[Tensor, Tensor]:
    """The experts with the largest scores, of the best groups only, and their weights (DeepSeek 3,
    arXiv 2412.19437): ``bias`` counts for the choice alone.

    A group counts its two best. logits float32 [N, E], bias float32 [E]; returns int64 [N, U] and
    float32 [N, U].
    """
    own = logits.sigmoid() if scores.is_sigmoid else logits.softmax(-1)
    ranked = own if bias is None else own + bias
    if scores.num_groups > 1:
        grouped = ranked.view(len(ranked), scores.num_groups, -1)
        best = grouped.topk(2, -1).values.sum(-1).topk(scores.num_groups_used, -1).indices
        hidden = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, False)
        ranked = grouped.masked_fill(hidden[..., None], float("-inf")).flatten(-2)
    experts = ranked.topk(num_used, -1).indices
    weights = own.gather(-1, experts)
    if scores.normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return experts, weights * scores.scale


def apply_experts(
    x: Tensor, choice: tuple[Tensor, Tensor], matrices: Matrices, activate: Activate
) -> Tensor:
    """``sum over the row's experts of weight * down(act(gate x) * up x)``, with biases if any.

    x compute type [N, D], choice as ``choose_experts`` gives it; returns float32 [N, D]. A row's
    experts are added in the order of their numbers, whoever shares the step.
    """
    experts, weights = choice
    out = torch.zeros(x.shape[0], matrices.down.shape[1], device=x.device)
    for expert in sorted(set(experts.flatten().tolist())):
        rows, place = (experts == expert).nonzero(as_tuple=True)
        value = _expert(x[rows], matrices, expert, activate).float()
        out[rows] += value * weights[rows, place, None]
    return out


def _expert(x: Tensor, matrices: Matrices, expert: int, activate: Activate) -> Tensor:
    gate, up, down = (bias[expert] for bias in matrices.biases) if matrices.biases else (None,) * 3
    gated = linear(x, matrices.gate[expert], gate)
    hidden = activate(gated, linear(x, matrices.up[expert], up))
    return linear(hidden, matrices.down[expert], down)


def gate_row(x: Tensor, weight: Tensor) -> Tensor:
    """``sigmoid(x . weight)``: one number per row.

    x compute type [N, D], weight float32 [D]; returns float32 [N, 1].
    """
    return F.linear(x.float(), weight[None]).sigmoid()
