"""The architectures that are supported: what their metadata leaves unsaid, one entry each."""

from collections.abc import Mapping
from enum import Enum, auto

from attrs import frozen

from kvtrio.model.spec import Activation, Gating, RopeStyle


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
    may_norm_qk: bool = False
    """Where a file brings the norms."""
    needs_bias: bool = False
    """On q, k and v; where False, a file may still bring them."""
    paired_rows: bool = False
    """Files hold the rows of q and k in adjacent pairs, training libraries in halves of a head
    (convert_hf_to_gguf.py permutes them), so adapters from there are permuted too."""
    joint_norm: bool = False
    """See ``AttentionSpec``, as for ``sinks``."""
    sinks: bool = False
    latent: bool = False
    """Attention is ``LatentAttentionSpec``."""
    fused: bool = False
    """Files may hold q, k and v, and gate and up, as one matrix each."""
    post_norms: bool = False
    pre_norms: bool = True
    parallel: bool = False
    """See ``LayerSpec``."""
    layer_norm: bool = False
    norm_bias: bool = False
    """See ``ModelSpec``."""
    gated: bool = True
    """See ``FeedForwardSpec``, as for ``ffn_bias``."""
    ffn_bias: bool = False
    scaled_embedding: bool = False
    """Embeddings are multiplied by sqrt(hidden size)."""
    sliding_period: int = 0
    """Layers may have a window: all but every n-th, where the file does not say which."""
    local_rope: bool = False
    """Layers with a window have a rope of their own."""
    layers_scaled_by_hidden: int = 0
    """Of the one size that scales queries by (hidden size / heads)^-0.5, where no key says so."""
    attention_softcap: float = 0.0
    final_softcap: float = 0.0
    """Where the file does not say; attention_softcap 0: there is none."""
    rope_in_windows_only: bool = False
    """Layers without a window have none (Command R 7B)."""
    temperature: bool = False
    """Queries may grow with their position, see ``Temperature``."""
    longrope: bool = False
    """The file may hold rope factors for short and for long contexts."""
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
    expert_biases: bool = False
    leading_dense: bool = False
    """The first few layers may have no experts, and the router the settings of DeepSeek 3."""
    gating: Gating = Gating.SOFTMAX
    """Where the file does not say."""
    multiplied_logits: bool = False
    """The file's logit_scale multiplies logits; Granite's divides them."""
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
        sliding_period=6,
        local_rope=True,
        layers_scaled_by_hidden=62,
    ),
    "gemma2": Family(
        rope=RopeStyle.NEOX,
        activation=Activation.GELU_TANH,
        post_norms=True,
        scaled_embedding=True,
        sliding_period=2,
        layers_scaled_by_hidden=46,
        attention_softcap=50.0,
        final_softcap=30.0,
    ),
    "phi3": Family(rope=RopeStyle.NEOX, fused=True, longrope=True),
    "gpt-oss": Family(
        rope=RopeStyle.NEOX,
        activation=Activation.CLAMPED,
        needs_bias=True,
        sinks=True,
        sliding_period=2,
        experts=True,
        expert_biases=True,
        ffn_norm="post_attention_norm",
    ),
    "glm4": Family(rope=RopeStyle.NORM, fused=True, post_norms=True),
    "glm4moe": Family(
        rope=RopeStyle.NEOX,
        may_norm_qk=True,
        experts=True,
        leading_dense=True,
        gating=Gating.SIGMOID,
        ffn_norm="post_attention_norm",
    ),
    "deepseek2": Family(rope=RopeStyle.NORM, latent=True, experts=True, leading_dense=True),
    "olmo2": Family(
        rope=RopeStyle.NEOX, qk_norm=True, joint_norm=True, post_norms=True, pre_norms=False
    ),
    "granite": Family(rope=RopeStyle.NORM, paired_rows=True, granite_scales=True),
    "granitemoe": Family(rope=RopeStyle.NORM, paired_rows=True, experts=True, granite_scales=True),
    "starcoder2": Family(
        rope=RopeStyle.NEOX,
        activation=Activation.GELU_TANH,
        needs_bias=True,
        layer_norm=True,
        norm_bias=True,
        gated=False,
        ffn_bias=True,
    ),
    "command-r": Family(
        rope=RopeStyle.NORM, layer_norm=True, parallel=True, multiplied_logits=True
    ),
    "cohere2": Family(
        rope=RopeStyle.NORM,
        rope_in_windows_only=True,
        sliding_period=4,
        layer_norm=True,
        parallel=True,
        multiplied_logits=True,
    ),
    "mistral3": Family(rope=RopeStyle.NORM, paired_rows=True, temperature=True),
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
