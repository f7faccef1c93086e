"""Feed-forwards of a model from its metadata: dense ones, experts, or none."""

from kvtrio.model.errors import ModelFileError
from kvtrio.model.source import MAX_EXPERTS, MAX_SIZE, Source
from kvtrio.model.spec import (
    Activation,
    ExpertsSpec,
    FeedForwardSpec,
    Gating,
    RoutingSpec,
    SharedExpertSpec,
)

NUM_EXPERTS = "expert_count"
SIZE = "feed_forward_length"
SHARED_SIZE = "expert_shared_feed_forward_length"
GATINGS = {1: Gating.SOFTMAX, 2: Gating.SIGMOID}
"""In expert_gating_func; 0 stands for nothing."""
OF_CHOSEN = 3
"""The same: the softmax over those chosen, which is ours of SOFTMAX with normalised weights."""
SETTLED = {"expert_gating_func": 1, "expert_group_count": 1, "leading_dense_block_count": 0}
"""Other kinds of experts, where nothing here computes them: keys, and the value that means ours."""
WEIGHT_SCALE = (1e-6, 1e6)


def feed_forwards(source: Source) -> tuple[FeedForwardSpec | ExpertsSpec | None, ...]:
    """Per layer. Raises ModelFileError for what is missing, inconsistent or unsupported."""
    fields, family, count = source.fields, source.family, source.num_layers
    num_experts = fields.integer(NUM_EXPERTS, MAX_EXPERTS, default=0, least=0)
    num_dense = _num_dense(source) if num_experts else count
    # A block may end with a state-space layer; no other kind does.
    is_needed = family.recurrent is None and num_dense > 0
    dense: list[FeedForwardSpec | ExpertsSpec | None] = []
    if num_dense:
        sizes = fields.per_layer(SIZE, count, MAX_SIZE, least=int(is_needed))[:num_dense]
        dense = [_dense(source, size) if size else None for size in sizes]
    return (*dense, *(_experts(source, num_experts)[num_dense:] if num_experts else ()))


def _num_dense(source: Source) -> int:
    """Of the first layers, those without experts."""
    key = "leading_dense_block_count"
    if not source.family.leading_dense:
        return 0
    return source.fields.integer(key, source.num_layers, default=0, least=0)


def _dense(source: Source, size: int) -> FeedForwardSpec:
    family = source.family
    return FeedForwardSpec(
        size=size, activation=family.activation, gated=family.gated, bias=family.ffn_bias
    )


def _experts(source: Source, num_experts: int) -> tuple[ExpertsSpec, ...]:
    fields, family = source.fields, source.family
    if not family.experts:
        raise ModelFileError(f"{fields.prefix[:-1]} with experts is not supported")
    own = "expert_feed_forward_length"
    sizes = fields.per_layer(own if fields.has(own) else SIZE, source.num_layers, MAX_SIZE)
    num_used = fields.integer("expert_used_count", num_experts)
    routing = _routing(source, num_experts, num_used)
    return tuple(
        ExpertsSpec(
            num_experts=num_experts,
            num_used=num_used,
            size=size,
            activation=family.activation,
            shared=_shared(source, size),
            routing=routing,
            biases=family.expert_biases,
        )
        for size in sizes
    )


def _shared(source: Source, size: int) -> SharedExpertSpec | None:
    """One expert of a size of its own, or as many as it says, side by side in one."""
    fields = source.fields
    shared = fields.integer(SHARED_SIZE, MAX_SIZE, default=0, least=0)
    if not shared and source.family.leading_dense:
        shared = size * fields.integer("expert_shared_count", MAX_EXPERTS, default=0, least=0)
    if not shared:
        return None
    return SharedExpertSpec(size=shared, gated=source.family.gated_shared_expert)


def _routing(source: Source, num_experts: int, num_used: int) -> RoutingSpec:
    if not source.family.leading_dense:
        _check_settled(source)
        return RoutingSpec()
    fields = source.fields
    num_groups = fields.integer("expert_group_count", num_experts, default=1, least=0) or 1
    used = fields.integer("expert_group_used_count", num_groups, default=num_groups, least=0)
    kind = fields.integer("expert_gating_func", 255, default=0, least=0)
    gating = GATINGS.get(kind) if kind else source.family.gating
    if gating is None:
        raise ModelFileError(f"experts with expert_gating_func {kind} are not supported")
    size = num_experts // num_groups
    if num_experts % num_groups or num_used > (used or num_groups) * size:
        raise ModelFileError(f"{num_experts} experts do not fit into {num_groups} groups")
    if num_groups > 1 and (gating is not Gating.SIGMOID or size < 2):
        raise ModelFileError("groups of experts of this kind are not supported")
    last = source.num_layers - 1
    return RoutingSpec(
        gating=gating,
        normalised=fields.flag("expert_weights_norm", default=False),
        scale=fields.number("expert_weights_scale", (0.0, WEIGHT_SCALE[1]), 0.0) or 1.0,
        selection_bias=f"blk.{last}.exp_probs_b.bias" in source.file.tensors,
        num_groups=num_groups,
        num_groups_used=used or num_groups,
    )


def _check_settled(source: Source) -> None:
    fields = source.fields
    # What those of gpt-oss do has a number of its own there.
    is_same = source.family.activation is Activation.CLAMPED
    for key, value in SETTLED.items():
        allowed = (0, value, OF_CHOSEN) if is_same and key == "expert_gating_func" else (0, value)
        if fields.integer(key, MAX_SIZE, default=value, least=0) not in allowed:
            raise ModelFileError(f"experts with another {key} than {value} are not supported")
    if fields.number("expert_weights_scale", (0.0, WEIGHT_SCALE[1]), 1.0) not in (0.0, 1.0):
        raise ModelFileError("experts with another expert_weights_scale than 1 are not supported")
