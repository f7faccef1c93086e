"""The feed-forwards of ``Ops`` over the reference kernels."""

from functools import partial

from torch import Tensor

from kvtrio.backends.torch_products import TorchProducts
from kvtrio.backends.torch_step import TorchStep
from kvtrio.kernels import reference as kernels
from kvtrio.kernels import reference_experts
from kvtrio.model.spec import (
    Activation,
    ExpertsSpec,
    FeedForwardSpec,
    Gating,
    RoutingSpec,
)


class TorchFeedForward(TorchProducts):
    """Dense ones and experts; experts of their own have no adapters."""

    def plain_ffn(self, step: TorchStep, x: Tensor, prefix: str, spec: FeedForwardSpec) -> Tensor:
        up = self.linear(step, x, f"{prefix}ffn_up", spec.bias)
        hidden = kernels.activated(up, spec.activation is Activation.GELU_TANH)
        return self.linear(step, hidden, f"{prefix}ffn_down", spec.bias)

    def gated_ffn(self, step: TorchStep, x: Tensor, prefix: str, spec: FeedForwardSpec) -> Tensor:
        return self._gated(step, x, (prefix, ""), spec.activation)

    def experts(self, step: TorchStep, x: Tensor, index: int, spec: ExpertsSpec) -> Tensor:
        prefix = f"blk.{index}."
        logits = self.linear(step, x.float(), prefix + "ffn_gate_inp", spec.biases)
        out = self._chosen(x, self._choice(logits, prefix, spec), prefix, spec)
        if spec.shared is not None:
            shared = self._gated(step, x, (prefix, "_shexp"), spec.activation).float()
            if spec.shared.gated:
                weight = self._weights[prefix + "ffn_gate_inp_shexp.weight"]
                shared = shared * reference_experts.gate_row(x, weight)
            out = out + shared
        return out

    def _chosen(
        self, x: Tensor, choice: tuple[Tensor, Tensor], prefix: str, spec: ExpertsSpec
    ) -> Tensor:
        """What the rows' own experts give: float32 [N, D]."""
        matrices, activate = self._matrices(prefix, spec), _activate(spec.activation)
        return reference_experts.apply_experts(x, choice, matrices, activate)

    def _choice(self, logits: Tensor, prefix: str, spec: ExpertsSpec) -> tuple[Tensor, Tensor]:
        routing = spec.routing
        if routing == RoutingSpec():
            return reference_experts.choose_experts(logits, spec.num_used)
        bias = self._weights[prefix + "exp_probs_b.bias"] if routing.selection_bias else None
        scores = reference_experts.Scores(
            is_sigmoid=routing.gating is Gating.SIGMOID,
            normalised=routing.normalised,
            scale=routing.scale,
            num_groups=routing.num_groups,
            num_groups_used=routing.num_groups_used,
        )
        return reference_experts.choose_scored(logits, bias, spec.num_used, scores)

    def _matrices(self, prefix: str, spec: ExpertsSpec) -> reference_experts.Matrices:
        names = [f"{prefix}ffn_{part}_exps" for part in ("gate", "up", "down")]
        gate, up, down = (self._weights[f"{name}.weight"] for name in names)
        if not spec.biases:
            return reference_experts.Matrices(gate, up, down)
        first, second, third = (self._weights[f"{name}.bias"] for name in names)
        return reference_experts.Matrices(gate, up, down, (first, second, third))

    def _gated(
        self, step: TorchStep, x: Tensor, names: tuple[str, str], activation: Activation
    ) -> Tensor:
        """``names``: what stands before and behind "ffn_gate" and so on."""
        prefix, suffix = names
        gate, up = self.linear(step, x, f"{prefix}ffn_gate_up{suffix}", False).chunk(2, -1)
        hidden = _activate(activation)(gate, up)
        return self.linear(step, hidden, f"{prefix}ffn_down{suffix}", False)


def _activate(activation: Activation) -> reference_experts.Activate:
    if activation is Activation.CLAMPED:
        return kernels.gated_clamped
    return partial(kernels.gated, gelu_tanh=activation is Activation.GELU_TANH)
