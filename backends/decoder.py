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
    LatentAttentionSpec,
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
        mixed = _scaled(ops, _mixer(spec, ops, step, layer, x), spec.residual_scale)
        if not layer.parallel:
            x = ops.add(x, mixed)
        if layer.feed_forward is not None:
            y = _feed_forward(spec, ops, step, layer, x)
            x = ops.add(x, _scaled(ops, y, spec.residual_scale))
        if layer.parallel:
            x = ops.add(x, mixed)
    x = _normed(spec, ops, ops.sampled_rows(step, x), spec.output_norm)
    head = "token_embd" if spec.tied_output else "output"
    return _scaled(ops, ops.logits(step, x, head, spec.final_softcap), spec.logit_scale)


def _scaled(ops: Ops[Step, Value, Choices], x: Value, factor: float) -> Value:
    return x if factor == 1.0 else ops.scaled(x, factor)


def _normed(spec: ModelSpec, ops: Ops[Step, Value, Choices], x: Value, weight: str) -> Value:
    if spec.layer_norm:
        return ops.layer_norm(x, weight, spec.norm_bias, spec.norm_eps)
    return ops.norm(x, weight, spec.norm_eps)


def _mixer(
    spec: ModelSpec, ops: Ops[Step, Value, Choices], step: Step, layer: LayerSpec, x: Value
) -> Value:
    prefix = f"blk.{layer.index}."
    x = _normed(spec, ops, x, prefix + "attn_norm") if layer.pre_norms else ops.narrowed(x)
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
        case LatentAttentionSpec():
            x = ops.latent_attention(step, x, layer, eps)
            return ops.linear(step, x, prefix + "attn_output", False)
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
    if layer.pre_norms:
        norm = "attn_norm" if layer.parallel else layer.ffn_norm
        x = _normed(spec, ops, x, prefix + norm)
    else:
        x = ops.narrowed(x)
    match layer.feed_forward:
        case FeedForwardSpec() as dense:
            x = (ops.gated_ffn if dense.gated else ops.plain_ffn)(step, x, prefix, dense)
        case ExpertsSpec() as experts:
            x = ops.experts(step, x, layer.index, experts)
    if layer.post_norms:
        x = ops.post_norm(x, prefix + "post_ffw_norm", spec.norm_eps)
    return x
