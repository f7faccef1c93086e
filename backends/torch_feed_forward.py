"""The feed-forwards of ``Ops`` over the reference kernels."""

from torch import Tensor

from kvtrio.backends.torch_products import TorchProducts
from kvtrio.backends.torch_step import TorchStep
from kvtrio.kernels import reference as kernels
from kvtrio.kernels import reference_experts
from kvtrio.model.spec import Activation, ExpertsSpec, FeedForwardSpec


class TorchFeedForward(TorchProducts):
    """Dense ones and experts; experts of their own have no adapters."""

    def gated_ffn(self, step: TorchStep, x: Tensor, prefix: str, spec: FeedForwardSpec) -> Tensor:
        return self._gated(step, x, (prefix, ""), spec.activation)

    def experts(self, step: TorchStep, x: Tensor, index: int, spec: ExpertsSpec) -> Tensor:
        prefix = f"blk.{index}."
        logits = self.linear(step, x.float(), prefix + "ffn_gate_inp", False)
        gate, up, down = (
            self._weights[f"{prefix}ffn_{part}_exps.weight"] for part in ("gate", "up", "down")
        )
        out = reference_experts.apply_experts(
            x,
            reference_experts.choose_experts(logits, spec.num_used),
            (gate, up, down),
            spec.activation is Activation.GELU_TANH,
        )
        if spec.shared is not None:
            shared = self._gated(step, x, (prefix, "_shexp"), spec.activation).float()
            if spec.shared.gated:
                weight = self._weights[prefix + "ffn_gate_inp_shexp.weight"]
                shared = shared * reference_experts.gate_row(x, weight)
            out = out + shared
        return out

    def _gated(
        self, step: TorchStep, x: Tensor, names: tuple[str, str], activation: Activation
    ) -> Tensor:
        """``names``: what stands before and behind "ffn_gate" and so on."""
        prefix, suffix = names
        gate, up = self.linear(step, x, f"{prefix}ffn_gate_up{suffix}", False).chunk(2, -1)
        hidden = kernels.gated(gate, up, activation is Activation.GELU_TANH)
        return self.linear(step, hidden, f"{prefix}ffn_down{suffix}", False)
