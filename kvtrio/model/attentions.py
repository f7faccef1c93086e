"""Attention of a model from its metadata: heads, windows, scales; and the latent kind."""

import math

from kvtrio.model.errors import ModelFileError
from kvtrio.model.ropes import log_multiplier, read_rope, yarn_factor
from kvtrio.model.source import MAX_CONTEXT, MAX_HEAD_DIM, MAX_HEADS, MAX_SIZE, Source
from kvtrio.model.spec import (
    AttentionSpec,
    LatentAttentionSpec,
    RopeSpec,
    RopeStyle,
    Temperature,
)

SCALE = (1e-6, 1e3)
SOFTCAP = (0.0, 1e6)


def windows(source: Source) -> tuple[int | None, ...]:
    """Per layer, the number of positions seen; None: all."""
    fields, count = source.fields, source.num_layers
    window = fields.integer("attention.sliding_window", MAX_CONTEXT, default=0, least=0)
    period = source.family.sliding_period
    if not period or not window:
        return (None,) * count
    pattern = fields.pattern("attention.sliding_window_pattern", count, period)
    return tuple(window if is_sliding else None for is_sliding in pattern)


def attention(
    source: Source, index: int, heads: tuple[int, int], window: int | None
) -> AttentionSpec:
    num_heads, num_kv_heads = heads
    if not num_heads or not num_kv_heads or num_heads % num_kv_heads:
        raise ModelFileError(f"{num_heads} heads cannot share {num_kv_heads} key heads evenly")
    head_dim = _head_dim(source, "attention.key_length", num_heads)
    tensors = source.file.tensors
    value_dim = _head_dim(source, "attention.value_length", num_heads)
    if source.family.gated_attention and value_dim != head_dim:
        raise ModelFileError(f"gates of {head_dim} values do not fit heads of {value_dim}")
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        rope=_rope(source, head_dim, window),
        scale=_attention_scale(source, num_heads, head_dim),
        window=window,
        qk_norm=source.family.qk_norm
        or (source.family.may_norm_qk and f"blk.{index}.attn_q_norm.weight" in tensors),
        joint_norm=source.family.joint_norm,
        bias=source.family.needs_bias or f"blk.{index}.attn_q.bias" in tensors,
        output_bias=f"blk.{index}.attn_output.bias" in tensors,
        softcap=_softcap(source),
        sinks=source.family.sinks,
        temperature=_temperature(source),
        gated=source.family.gated_attention,
    )


def _head_dim(source: Source, key: str, num_heads: int) -> int:
    if source.fields.has(key):
        return source.fields.integer(key, MAX_HEAD_DIM)
    if source.hidden_size % num_heads:
        raise ModelFileError(f"{num_heads} heads do not divide {source.hidden_size} values")
    return source.hidden_size // num_heads


def _attention_scale(source: Source, num_heads: int, head_dim: int) -> float:
    if source.num_layers == source.family.layers_scaled_by_hidden:
        return float((source.hidden_size / num_heads) ** -0.5)
    return source.fields.number("attention.scale", SCALE, float(head_dim**-0.5))


def _rope(source: Source, head_dim: int, window: int | None) -> RopeSpec:
    rope = read_rope(source, head_dim, is_sliding=window is not None)
    if source.family.rope_in_windows_only and window is None:
        return RopeSpec(style=RopeStyle.NONE, num_rotated=rope.num_rotated, base=rope.base)
    return rope


def _temperature(source: Source) -> Temperature | None:
    fields = source.fields
    if not source.family.temperature:
        return None
    scale = fields.number("attention.temperature_scale", (0.0, 1e3), 0.0)
    if not scale:
        return None
    length = fields.integer("rope.scaling.original_context_length", MAX_CONTEXT)
    return Temperature(scale=scale, length=length)


def _softcap(source: Source) -> float | None:
    default = source.family.attention_softcap
    if not default:
        return None
    return source.fields.number("attn_logit_softcapping", SOFTCAP, default) or None


def latent_attention(source: Source) -> LatentAttentionSpec:
    """That of DeepSeek 2, the same in all layers. Raises ModelFileError."""
    fields = source.fields
    num_heads = fields.integer("attention.head_count", MAX_HEADS)
    query_dim = fields.integer("attention.key_length_mla", MAX_HEAD_DIM)
    rope = read_rope(source, query_dim - 1, is_sliding=False)
    rank = fields.integer("attention.q_lora_rank", MAX_SIZE, default=0, least=0)
    return LatentAttentionSpec(
        num_heads=num_heads,
        query_rank=rank or None,
        latent_dim=fields.integer("attention.kv_lora_rank", MAX_HEAD_DIM),
        plain_dim=query_dim - rope.num_rotated,
        value_dim=fields.integer("attention.value_length_mla", MAX_HEAD_DIM),
        rope=rope,
        scale=_growth(source) ** 2 * query_dim**-0.5,
    )


def _growth(source: Source) -> float:
    """Of the magnitude of q and k, in a context that yarn makes longer."""
    factor = yarn_factor(source)
    return 1.0 + log_multiplier(source) * math.log(factor) if factor else 1.0
