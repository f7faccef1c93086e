"""The forward pass, once for every backend and every model.

It branches on the model's flags alone, never on a batch, so the sequence of operations is fixed
per model.
"""

from typing import TypeVar

from kvtrio.backends.ops import Ops
from kvtrio.model.spec import LayerSpec, ModelSpec

Step = TypeVar("Step")
Value = TypeVar("Value")
Choices = TypeVar("Choices")


def forward(spec: ModelSpec, ops: Ops[Step, Value, Choices], step: Step) -> Choices:
    """Compute one step and choose its tokens."""
    return ops.sample(step, logits(spec, ops, step))


def logits(spec: ModelSpec, ops: Ops[Step, Value, Choices], step: Step) -> Value:
    """Logits of the sampled rows; K and V of every row are written on the way."""
    x = ops.embed(step, "token_embd", spec.embedding_scale)
    for layer in spec.layers:
        x = ops.add(x, _attention(spec, ops, step, layer, x))
        x = ops.add(x, _feed_forward(spec, ops, step, layer, x))
    x = ops.norm(ops.sampled_rows(step, x), "output_norm", spec.norm_eps)
    head = "token_embd" if spec.tied_output else "output"
    return ops.logits(step, x, head, spec.final_softcap)


def _attention(
    spec: ModelSpec, ops: Ops[Step, Value, Choices], step: Step, layer: LayerSpec, x: Value
) -> Value:
    prefix = f"blk.{layer.index}."
    x = ops.norm(x, prefix + "attn_norm", spec.norm_eps)
    q = ops.qkv(step, x, layer, spec.norm_eps)
    x = ops.attention(step, q, layer.index, layer.attention)
    x = ops.linear(step, x, prefix + "attn_output", layer.attention.output_bias)
    if layer.post_norms:
        x = ops.post_norm(x, prefix + "post_attention_norm", spec.norm_eps)
    return x


def _feed_forward(
    spec: ModelSpec, ops: Ops[Step, Value, Choices], step: Step, layer: LayerSpec, x: Value
) -> Value:
    prefix = f"blk.{layer.index}."
    x = ops.norm(x, prefix + "ffn_norm", spec.norm_eps)
    x = ops.gated_ffn(step, x, prefix, layer.feed_forward)
    if layer.post_norms:
        x = ops.post_norm(x, prefix + "post_ffw_norm", spec.norm_eps)
    return x
