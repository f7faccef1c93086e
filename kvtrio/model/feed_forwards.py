"""Feed-forwards of a model from its metadata: dense ones, experts, or none."""

from kvtrio.model.errors import ModelFileError
from kvtrio.model.source import MAX_EXPERTS, MAX_SIZE, Source
from kvtrio.model.spec import ExpertsSpec, FeedForwardSpec, SharedExpertSpec

NUM_EXPERTS = "expert_count"
SIZE = "feed_forward_length"
SOFTMAX = 1
"""In expert_gating_func."""
SETTLED = {
    "expert_gating_func": SOFTMAX,
    "expert_group_count": 1,
    "leading_dense_block_count": 0,
}
"""Other kinds of experts, which nothing here computes: keys, and the value that means ours."""


def feed_forwards(source: Source) -> tuple[FeedForwardSpec | ExpertsSpec | None, ...]:
    """Per layer. Raises ModelFileError for what is missing, inconsistent or unsupported."""
    fields, count = source.fields, source.num_layers
    num_experts = fields.integer(NUM_EXPERTS, MAX_EXPERTS, default=0, least=0)
    if num_experts:
        return _experts(source, num_experts)
    # A block may end with a state-space layer; no other kind does.
    sizes = fields.per_layer(SIZE, count, MAX_SIZE, least=int(source.family.recurrent is None))
    activation = source.family.activation
    return tuple(FeedForwardSpec(size=n, activation=activation) if n else None for n in sizes)


def _experts(source: Source, num_experts: int) -> tuple[ExpertsSpec, ...]:
    fields, family = source.fields, source.family
    if not family.experts:
        raise ModelFileError(f"{fields.prefix[:-1]} with experts is not supported")
    for key, value in SETTLED.items():
        if fields.integer(key, MAX_SIZE, default=value, least=0) not in (0, value):
            raise ModelFileError(f"experts with another {key} than {value} are not supported")
    own = "expert_feed_forward_length"
    sizes = fields.per_layer(own if fields.has(own) else SIZE, source.num_layers, MAX_SIZE)
    num_used = fields.integer("expert_used_count", num_experts)
    shared = fields.integer("expert_shared_feed_forward_length", MAX_SIZE, default=0, least=0)
    return tuple(
        ExpertsSpec(
            num_experts=num_experts,
            num_used=num_used,
            size=size,
            activation=family.activation,
            shared=SharedExpertSpec(size=shared, gated=family.gated_shared_expert)
            if shared
            else None,
        )
        for size in sizes
    )
