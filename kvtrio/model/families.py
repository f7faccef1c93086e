"""The architectures that are supported: what their metadata leaves unsaid, one entry each."""

from collections.abc import Mapping
from enum import Enum, auto

from attrs import frozen

from kvtrio.model.spec import Activation, RopeStyle


class Recurrent(Enum):
    """What layers without attention are."""

    DELTA_NET = auto()
    SHORT_CONV = auto()
    MAMBA2 = auto()


class Placement(Enum):
    """Which layers have no attention."""

    ALL = auto()
    NO_KV_HEADS = auto()
    """Those for which attention.head_count_kv is 0."""
    INTERVAL = auto()
    """All but every n-th, or as attention.recurrent_layers says."""


@frozen(kw_only=True)
class Family:
    """What the metadata of an architecture leaves unsaid."""

    rope: RopeStyle
    activation: Activation = Activation.SILU
    qk_norm: bool = False
    needs_bias: bool = False
    """On q, k and v; where False, a file may still bring them."""
    paired_rows: bool = False
    """Files hold the rows of q and k in adjacent pairs, training libraries in halves of a head
    (convert_hf_to_gguf.py permutes them), so adapters from there are permuted too."""
    post_norms: bool = False
    scaled_embedding: bool = False
    """Embeddings are multiplied by sqrt(hidden size)."""
    sliding: bool = False
    """Layers may have a window."""
    recurrent: Recurrent | None = None
    placement: Placement = Placement.ALL
    """Where the recurrent layers are."""
    gated_attention: bool = False
    tiled_heads: bool = False
    """See ``DeltaNetSpec``."""
    fused_gates: bool = False
    """See ``DeltaNetSpec``."""
    experts: bool = False
    """A file may have experts."""
    gated_shared_expert: bool = False
    granite_scales: bool = False
    """The file may scale embedding, branches and logits, and switch rope off."""
    ffn_norm: str = "ffn_norm"
    """Tensor that norms the feed-forward's input."""
    output_norm: str = "output_norm"
    """Tensor that norms the head's input."""


FAMILIES: Mapping[str, Family] = {
    "llama": Family(rope=RopeStyle.NORM, paired_rows=True, experts=True),
    "qwen2": Family(rope=RopeStyle.NEOX, needs_bias=True),
    "qwen3": Family(rope=RopeStyle.NEOX, qk_norm=True),
    "qwen3moe": Family(rope=RopeStyle.NEOX, qk_norm=True, experts=True),
    "gemma3": Family(
        rope=RopeStyle.NEOX,
        activation=Activation.GELU_TANH,
        qk_norm=True,
        post_norms=True,
        scaled_embedding=True,
        sliding=True,
    ),
    # For text, the axes of its rope agree, which makes it the usual one.
    "qwen35": Family(
        rope=RopeStyle.NEOX,
        qk_norm=True,
        recurrent=Recurrent.DELTA_NET,
        placement=Placement.INTERVAL,
        gated_attention=True,
        tiled_heads=True,
        ffn_norm="post_attention_norm",
    ),
    "qwen3next": Family(
        rope=RopeStyle.NEOX,
        qk_norm=True,
        recurrent=Recurrent.DELTA_NET,
        placement=Placement.INTERVAL,
        gated_attention=True,
        fused_gates=True,
        experts=True,
        gated_shared_expert=True,
        ffn_norm="post_attention_norm",
    ),
    "lfm2": Family(
        rope=RopeStyle.NEOX,
        qk_norm=True,
        recurrent=Recurrent.SHORT_CONV,
        placement=Placement.NO_KV_HEADS,
        output_norm="token_embd_norm",
    ),
    "mamba2": Family(rope=RopeStyle.NONE, recurrent=Recurrent.MAMBA2),
    "granitehybrid": Family(
        rope=RopeStyle.NORM,
        paired_rows=True,
        recurrent=Recurrent.MAMBA2,
        placement=Placement.NO_KV_HEADS,
        experts=True,
        granite_scales=True,
    ),
}
