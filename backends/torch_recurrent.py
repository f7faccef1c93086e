"""The recurrent layers of ``Ops`` over the reference kernels."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from kvtrio.backends.torch_products import TorchProducts
from kvtrio.backends.torch_states import LayerStates
from kvtrio.backends.torch_step import TorchStep
from kvtrio.kernels import reference_recurrent as recurrent
from kvtrio.kernels.reference_delta_net import delta_rule, spread_heads, unit_length
from kvtrio.kernels.reference_mamba2 import state_space
from kvtrio.model.spec import DeltaNetSpec, LayerSpec, Mamba2Spec


class TorchRecurrent(TorchProducts):
    """Between the matrix before and the matrix after a layer all is float32."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        states: Mapping[int, LayerStates],
        dtype: torch.dtype,
    ) -> None:
        super().__init__(weights, dtype)
        self._states = states

    def short_conv(self, step: TorchStep, x: Tensor, layer: LayerSpec) -> Tensor:
        prefix = f"blk.{layer.index}.shortconv."
        b, c, x = self.linear(step, x, prefix + "in_proj", False).float().chunk(3, -1)
        out, product = torch.empty_like(c), b * x
        states = self._states[layer.index]
        for run in step.states[states.group]:
            history, matrices = states.read(run)
            weight = self._weights[prefix + "conv.weight"]
            out[run.rows], history = recurrent.causal_conv(product[run.rows], weight, None, history)
            states.write(run, history, matrices)
        return (c * out).to(self._dtype)

    def delta_net(self, step: TorchStep, x: Tensor, layer: LayerSpec, eps: float) -> Tensor:
        spec, prefix = layer.mixer_of(DeltaNetSpec), f"blk.{layer.index}."
        heads, inner = spec.num_value_heads, spec.num_value_heads * spec.value_dim
        fused = self.linear(step, x, prefix + "delta_in", False).float()
        mixed, z, gates = fused.split_with_sizes((spec.conv.channels, inner, 2 * heads), -1)
        beta, alpha = _gates(spec, gates)
        dt = F.softplus(alpha + self._weights[prefix + "ssm_dt.bias"])
        log_decay = dt * self._weights[prefix + "ssm_a"]
        out = self._delta_rows(step, layer, (mixed, log_decay, beta), eps)
        weight = self._weights[prefix + "ssm_norm.weight"]
        normed = recurrent.norm_then_gate(out, _heads(z, heads), weight, eps)
        return normed.flatten(1).to(self._dtype)

    def _delta_rows(
        self, step: TorchStep, layer: LayerSpec, rows: tuple[Tensor, Tensor, Tensor], eps: float
    ) -> Tensor:
        """Convolution and delta rule: rows [N, channels], [N, heads] and [N, heads] to
        [N, heads, value_dim]."""
        mixed, log_decay, beta = rows
        spec, prefix = layer.mixer_of(DeltaNetSpec), f"blk.{layer.index}."
        out = mixed.new_empty(mixed.shape[0], spec.num_value_heads, spec.value_dim)
        states = self._states[layer.index]
        for run in step.states[states.group]:
            history, matrices = states.read(run)
            own, history = self._convolved(prefix, mixed[run.rows], history)
            inputs = (*delta_heads(spec, own, eps), log_decay[run.rows], beta[run.rows])
            out[run.rows], matrices = recurrent.in_pieces(delta_rule, inputs, matrices, run.pieces)
            states.write(run, history, matrices)
        return out

    def mamba2(self, step: TorchStep, x: Tensor, layer: LayerSpec, eps: float) -> Tensor:
        spec, prefix = layer.mixer_of(Mamba2Spec), f"blk.{layer.index}."
        fused = self.linear(step, x, prefix + "ssm_in", False).float()
        sizes = (spec.inner_size, spec.conv.channels, spec.num_heads)
        z, mixed, dt = fused.split_with_sizes(sizes, -1)
        dt = F.softplus(dt + self._weights[prefix + "ssm_dt.bias"])
        log_decay = dt * self._weights[prefix + "ssm_a"].flatten()
        out = self._mamba2_rows(step, layer, (mixed, dt, log_decay))
        weight = self._weights[prefix + "ssm_norm.weight"]
        grouped, gates = (_heads(part, spec.num_groups) for part in (out.flatten(1), z))
        normed = recurrent.gate_then_norm(grouped, gates, weight, eps)
        return normed.flatten(1).to(self._dtype)

    def _mamba2_rows(
        self, step: TorchStep, layer: LayerSpec, rows: tuple[Tensor, Tensor, Tensor]
    ) -> Tensor:
        """Convolution and state space: rows [N, channels], [N, heads] and [N, heads] to
        [N, heads, head_dim]."""
        mixed, dt, log_decay = rows
        spec, prefix = layer.mixer_of(Mamba2Spec), f"blk.{layer.index}."
        out = mixed.new_empty(mixed.shape[0], spec.num_heads, spec.head_dim)
        states = self._states[layer.index]
        for run in step.states[states.group]:
            history, matrices = states.read(run)
            own, history = self._convolved(prefix, mixed[run.rows], history)
            values, b, c = _mamba2_heads(spec, own)
            inputs = (values * dt[run.rows][..., None], b, c, log_decay[run.rows])
            result, matrices = recurrent.in_pieces(state_space, inputs, matrices, run.pieces)
            out[run.rows] = result + values * self._weights[prefix + "ssm_d"]
            states.write(run, history, matrices)
        return out

    def _convolved(self, prefix: str, rows: Tensor, history: Tensor) -> tuple[Tensor, Tensor]:
        bias = self._weights.get(prefix + "ssm_conv1d.bias")
        weight = self._weights[prefix + "ssm_conv1d.weight"]
        out, history = recurrent.causal_conv(rows, weight, bias, history)
        return F.silu(out), history


def _gates(spec: DeltaNetSpec, gates: Tensor) -> tuple[Tensor, Tensor]:
    """sigmoid(beta) and alpha, [N, heads] each, from both [N, 2 heads]."""
    num_groups = spec.num_key_heads if spec.fused_gates else 1
    beta, alpha = _heads(gates, num_groups).chunk(2, -1)
    return beta.flatten(1).sigmoid(), alpha.flatten(1)


def delta_heads(spec: DeltaNetSpec, rows: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v [R, L, value heads, dim] from [R, L, channels]; q is scaled."""
    keys, num_heads = spec.num_key_heads * spec.key_dim, spec.num_value_heads
    q, k, v = rows.split_with_sizes((keys, keys, num_heads * spec.value_dim), -1)
    q, k = (unit_length(_heads(part, spec.num_key_heads), eps) for part in (q, k))
    q, k = (spread_heads(part, num_heads, spec.tiled_heads) for part in (q, k))
    return q * spec.key_dim**-0.5, k, _heads(v, num_heads)


def _mamba2_heads(spec: Mamba2Spec, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x [R, L, heads, dim], B and C [R, L, groups, state] from [R, L, channels]."""
    size = spec.num_groups * spec.state_size
    x, b, c = rows.split_with_sizes((spec.inner_size, size, size), -1)
    return _heads(x, spec.num_heads), _heads(b, spec.num_groups), _heads(c, spec.num_groups)


def _heads(x: Tensor, num_heads: int) -> Tensor:
    """[..., values] as [..., heads, values of each]."""
    return x.reshape(*x.shape[:-1], num_heads, -1)
