"""A model as data: what the decoder does in each layer, as flags. Most models are a table entry.

Shapes are torch's: a matrix is [out, in]. Field names follow the GGUF keys where they exist.
"""

from enum import Enum

from attrs import frozen

from kvtrio.core.types import StateClass


class RopeStyle(Enum):
    """Which values of a head are rotated together."""

    NONE = "none"
    NORM = "norm"
    """Adjacent pairs (2i, 2i + 1)."""
    NEOX = "neox"
    """Pairs (i, i + num_rotated / 2)."""


class Activation(Enum):
    """act(gate) * up."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


@frozen(kw_only=True)
class RopeSpec:
    """Rotary position embedding: angle of pair i at position p is
    p * scale * base^(-2i / num_rotated) / factors[i]."""

    style: RopeStyle
    num_rotated: int
    base: float
    scale: float = 1.0
    """1 / factor of linear scaling."""
    factors: str | None = None
    """Tensor with one divisor per pair (llama 3's ``rope_freqs.weight``)."""
    magnitude: float = 1.0
    """Multiplies cos and sin (yarn, longrope)."""


@frozen(kw_only=True)
class AttentionSpec:
    """Softmax attention over the KV cache."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    rope: RopeSpec
    scale: float
    """Multiplies q k^T."""
    window: int | None = None
    """Positions seen, the query's own included; None: all."""
    qk_norm: bool = False
    """RMSNorm per head on q and k before rope."""
    bias: bool = False
    """attn_q, attn_k and attn_v have a bias."""
    output_bias: bool = False
    softcap: float | None = None


@frozen(kw_only=True)
class FeedForwardSpec:
    """Gated feed-forward: down(act(gate x) * up x)."""

    size: int
    activation: Activation


@frozen(kw_only=True)
class LayerSpec:
    """One block: x += post(attention(norm x)); x += post(ffn(norm x))."""

    index: int
    state_class: StateClass
    attention: AttentionSpec
    feed_forward: FeedForwardSpec
    post_norms: bool = False
    """RMSNorm after attention and after the feed-forward, before the residual (gemma)."""


@frozen(kw_only=True)
class ModelSpec:
    """Everything the forward pass needs besides the weights."""

    architecture: str
    name: str
    vocab_size: int
    hidden_size: int
    context_length: int
    """What the model was trained for, in tokens."""
    norm_eps: float
    embedding_scale: float
    tied_output: bool
    final_softcap: float | None
    layers: tuple[LayerSpec, ...]
