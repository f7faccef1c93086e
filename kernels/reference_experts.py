"""Feed-forwards of which each row uses a few, in plain torch.

Letters in shapes: N rows, E experts, U used by each row, D hidden size, F size of an expert.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kvtrio.kernels.reference import gated, linear


def choose_experts(logits: Tensor, num_used: int) -> tuple[Tensor, Tensor]:
    """The experts with the largest logits, and the softmax over those as their weights.

    logits float32 [N, E]; returns int64 [N, U] and float32 [N, U].
    """
    best, experts = logits.topk(num_used, -1)
    return experts, torch.softmax(best, -1)


def apply_experts(
    x: Tensor,
    choice: tuple[Tensor, Tensor],
    matrices: tuple[Tensor, Tensor, Tensor],
    gelu_tanh: bool,
) -> Tensor:
    """``sum over the row's experts of weight * down(act(gate x) * up x)``.

    x compute type [N, D], choice as ``choose_experts`` gives it, matrices compute type: gate and up
    [E, F, D], down [E, D, F]; returns float32 [N, D]. A row's experts are added in the order of
    their numbers, whoever shares the step.
    """
    (experts, weights), (gate, up, down) = choice, matrices
    out = torch.zeros(x.shape[0], down.shape[1], device=x.device)
    for expert in sorted(set(experts.flatten().tolist())):
        rows, place = (experts == expert).nonzero(as_tuple=True)
        own = x[rows]
        hidden = gated(linear(own, gate[expert]), linear(own, up[expert]), gelu_tanh)
        value = linear(hidden, down[expert]).float()
        out[rows] += value * weights[rows, place, None]
    return out


def gate_row(x: Tensor, weight: Tensor) -> Tensor:
    """``sigmoid(x . weight)``: one number per row.

    x compute type [N, D], weight float32 [D]; returns float32 [N, 1].
    """
    return F.linear(x.float(), weight[None]).sigmoid()
