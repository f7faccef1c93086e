"""Layers without attention, from metadata: which they are, and their sizes."""

from collections.abc import Callable, Mapping

from kvtrio.model.errors import ModelFileError
from kvtrio.model.families import Placement, Recurrent
from kvtrio.model.source import MAX_CONV_WIDTH, MAX_HEAD_DIM, MAX_HEADS, MAX_SIZE, Source
from kvtrio.model.spec import ConvSpec, DeltaNetSpec, Mamba2Spec, RecurrentSpec, ShortConvSpec

FULL_INTERVAL = 4
"""Three delta nets, then full attention."""


def recurrent_mixers(source: Source) -> tuple[RecurrentSpec | None, ...]:
    """Per layer what stands in for attention; None where the layer has attention.

    Raises ModelFileError for missing or inconsistent sizes.
    """
    kind = source.family.recurrent
    if kind is None:
        return (None,) * source.num_layers
    places = _PLACES[source.family.placement](source)
    # Not read where nobody would use it: a hybrid may be cut to attention alone.
    mixer = _READERS[kind](source) if any(places) else None
    return tuple(mixer if is_recurrent else None for is_recurrent in places)


def _all(source: Source) -> tuple[bool, ...]:
    return (True,) * source.num_layers


def _without_kv_heads(source: Source) -> tuple[bool, ...]:
    return tuple(not heads for heads in source.kv_heads())


def _interval(source: Source) -> tuple[bool, ...]:
    fields, key = source.fields, "attention.recurrent_layers"
    if not fields.has(key):
        key = "full_attention_interval"
    return fields.pattern(key, source.num_layers, FULL_INTERVAL)


def _delta_net(source: Source) -> DeltaNetSpec:
    fields = source.fields
    key_dim = fields.integer("ssm.state_size", MAX_HEAD_DIM)
    num_key_heads = fields.integer("ssm.group_count", MAX_HEADS)
    num_value_heads = fields.integer("ssm.time_step_rank", MAX_HEADS)
    inner = fields.integer("ssm.inner_size", MAX_SIZE)
    return DeltaNetSpec(
        conv=_conv(source, 2 * num_key_heads * key_dim + inner),
        num_key_heads=num_key_heads,
        num_value_heads=_shared(num_value_heads, num_key_heads),
        key_dim=key_dim,
        value_dim=_divided(inner, num_value_heads),
        tiled_heads=source.family.tiled_heads,
        fused_gates=source.family.fused_gates,
    )


def _mamba2(source: Source) -> Mamba2Spec:
    fields = source.fields
    inner = fields.integer("ssm.inner_size", MAX_SIZE)
    num_heads = fields.integer("ssm.time_step_rank", MAX_HEADS)
    num_groups = fields.integer("ssm.group_count", MAX_HEADS, default=1)
    state_size = fields.integer("ssm.state_size", MAX_HEAD_DIM)
    return Mamba2Spec(
        conv=_conv(source, inner + 2 * num_groups * state_size),
        num_heads=_shared(num_heads, num_groups),
        head_dim=_divided(inner, num_heads),
        num_groups=num_groups,
        state_size=state_size,
    )


def _conv(source: Source, channels: int) -> ConvSpec:
    width = source.fields.integer("ssm.conv_kernel", MAX_CONV_WIDTH, least=2)
    return ConvSpec(width=width, channels=channels)


def _short_conv(source: Source) -> ShortConvSpec:
    width = source.fields.integer("shortconv.l_cache", MAX_CONV_WIDTH, least=2)
    return ShortConvSpec(conv=ConvSpec(width=width, channels=source.hidden_size))


def _divided(inner: int, num_heads: int) -> int:
    if inner % num_heads:
        raise ModelFileError(f"{num_heads} heads do not divide {inner} values")
    return inner // num_heads


def _shared(num_heads: int, num_groups: int) -> int:
    if num_heads % num_groups:
        raise ModelFileError(f"{num_heads} heads cannot share {num_groups} groups evenly")
    return num_heads


_PLACES: Mapping[Placement, Callable[[Source], tuple[bool, ...]]] = {
    Placement.ALL: _all,
    Placement.NO_KV_HEADS: _without_kv_heads,
    Placement.INTERVAL: _interval,
}
_READERS: Mapping[Recurrent, Callable[[Source], RecurrentSpec]] = {
    Recurrent.DELTA_NET: _delta_net,
    Recurrent.SHORT_CONV: _short_conv,
    Recurrent.MAMBA2: _mamba2,
}
