"""The forward pass, once for every backend and every model.

It branches on the model's flags alone, never on a batch, so the sequence of operations is fixed
per model.
"""

from typing import TypeVar, assert_never

from kvtrio.backends.ops import Ops
from kvtrio.model.spec import (
    AttentionSpec,
    DeltaNetSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LayerSpec,
    Mamba2Spec,
    ModelSpec,
    ShortConvSpec,
)

Step = TypeVar("Step")
Value = TypeVar("Value")
Choices = TypeVar("Choices")


def forward(spec: ModelSpec, ops: Ops[Step, Value, Choices], step: Step) -> Choices:
    """Compute one step and choose its tokens."""
    return ops.sample(step, logits(spec, ops, step))


def logits(spec: ModelSpec, ops: Ops[Step, Value, Choices], step: Step) -> Value:
    """Logits of the sampled rows; the state of every row is written on the way."""
    x = ops.embed(step, "token_embd", spec.embedding_scale)
    for layer in spec.layers:
        x = ops.add(x, _scaled(ops, _mixer(spec, ops, step, layer, x), spec.residual_scale))
        if layer.feed_forward is not None:
            y = _feed_forward(spec, ops, step, layer, x)
            x = ops.add(x, _scaled(ops, y, spec.residual_scale))
    x = ops.norm(ops.sampled_rows(step, x), spec.output_norm, spec.norm_eps)
    head = "token_embd" if spec.tied_output else "output"
    return _scaled(ops, ops.logits(step, x, head, spec.final_softcap), spec.logit_scale)


def _scaled(ops: Ops[Step, Value, Choices], x: Value, factor: float) -> Value:
    return x if factor == 1.0 else ops.scaled(x, factor)


def _mixer(
    spec: ModelSpec, ops: Ops[Step, Value, Choices], step: Step, layer: LayerSpec, x: Value
) -> Value:
    prefix = f"blk.{layer.index}."
    x = ops.norm(x, prefix + "attn_norm", spec.norm_eps)
    x = _mixed(spec, ops, step, layer, x)
    if layer.post_norms:
        x = ops.post_norm(x, prefix + "post_attention_norm", spec.norm_eps)
    return x


def _mixed(
    spec: ModelSpec, ops: Ops[Step, Value, Choices], step: Step, layer: LayerSpec, x: Value
) -> Value:
    prefix, mixer, eps = f"blk.{layer.index}.", layer.mixer, spec.norm_eps
    match mixer:
        case AttentionSpec():
            q = ops.qkv(step, x, layer, eps)
            x = ops.attention(step, q, layer.index, mixer)
            return ops.linear(step, x, prefix + "attn_output", mixer.output_bias)
        case ShortConvSpec():
            x = ops.short_conv(step, x, layer)
            return ops.linear(step, x, prefix + "shortconv.out_proj", False)
        case DeltaNetSpec():
            return ops.linear(step, ops.delta_net(step, x, layer, eps), prefix + "ssm_out", False)
        case Mamba2Spec():
            return ops.linear(step, ops.mamba2(step, x, layer, eps), prefix + "ssm_out", False)
        case _:
            assert_never(mixer)


def _feed_forward(
    spec: ModelSpec, ops: Ops[Step, Value, Choices], step: Step, layer: LayerSpec, x: Value
) -> Value:
    prefix = f"blk.{layer.index}."
    x = ops.norm(x, prefix + layer.ffn_norm, spec.norm_eps)
    match layer.feed_forward:
        case FeedForwardSpec() as dense:
            x = ops.gated_ffn(step, x, prefix, dense)
        case ExpertsSpec() as experts:
            x = ops.experts(step, x, layer.index, experts)
    if layer.post_norms:
        x = ops.post_norm(x, prefix + "post_ffw_norm", spec.norm_eps)
    return x
