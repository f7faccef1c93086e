"""A model as data: what the decoder does in each layer, as flags. Most models are a table entry.

Shapes are torch's: a matrix is [out, in]. Field names follow the GGUF keys where they exist.
"""

from typing import TypeVar

from attrs import evolve, frozen

from kvtrio.core.types import StateClass
from kvtrio.model.spec_feed_forward import (
    Activation,
    ExpertsSpec,
    FeedForwardSpec,
    Gating,
    RoutingSpec,
    SharedExpertSpec,
)
from kvtrio.model.spec_rope import LongFactors, RopeSpec, RopeStyle

__all__ = [
    "Activation",
    "AttentionSpec",
    "ConvSpec",
    "DeltaNetSpec",
    "ExpertsSpec",
    "FeedForwardSpec",
    "Gating",
    "LatentAttentionSpec",
    "LayerSpec",
    "LongFactors",
    "Mamba2Spec",
    "Mixer",
    "ModelSpec",
    "RecurrentSpec",
    "RopeSpec",
    "RopeStyle",
    "RoutingSpec",
    "SharedExpertSpec",
    "ShortConvSpec",
    "Temperature",
]


@frozen(kw_only=True)
class Temperature:
    """Queries at position p are multiplied by 1 + scale * ln(1 + floor(p / length)) (Mistral 3)."""

    scale: float
    length: int


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
    """RMSNorm on q and k before rope: per head,"""
    joint_norm: bool = False
    """or of all heads together (OLMo 2)."""
    bias: bool = False
    """attn_q, attn_k and attn_v have a bias."""
    output_bias: bool = False
    softcap: float | None = None
    sinks: bool = False
    """Each head has one more score, which takes weight and has no value (gpt-oss)."""
    temperature: Temperature | None = None
    gated: bool = False
    """The output is multiplied by sigmoid(gate); attn_q yields q and gate, head by head."""


@frozen(kw_only=True)
class LatentAttentionSpec:
    """Attention in which all heads read one row per token (DeepSeek 2).

    The row holds ``latent_dim`` normed values and then ``rope.num_rotated`` rotated ones. It is the
    key, and its first ``latent_dim`` values are the value; each head has a matrix that takes its
    query there, and one that takes what it gets from there.
    """

    num_heads: int
    query_rank: int | None
    """Queries are made by two matrices, with a norm between them; None: by one."""
    latent_dim: int
    plain_dim: int
    """Values of a query that are not rotated."""
    value_dim: int
    """Of what a head gives."""
    rope: RopeSpec
    scale: float

    @property
    def query_dim(self) -> int:
        """Of one head, as projected."""
        return self.plain_dim + self.rope.num_rotated

    @property
    def key_dim(self) -> int:
        """Of a token's row."""
        return self.latent_dim + self.rope.num_rotated


@frozen(kw_only=True)
class ConvSpec:
    """Causal convolution along positions, each channel by itself."""

    width: int
    """Positions that one output sees, its own included; the state keeps all but that one."""
    channels: int


@frozen(kw_only=True)
class DeltaNetSpec:
    """Gated delta rule (Qwen3-Next, Qwen3.5): a matrix per value head, S [key_dim, value_dim].

    Before: a convolution and SiLU over q, k and v together; q and k divided by their lengths.
    After: RMSNorm per head, times SiLU(attn_gate x).
    """

    conv: ConvSpec
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    tiled_heads: bool
    """Value head h reads key head h mod num_key_heads; else h // (value heads / key heads)."""
    fused_gates: bool
    """ssm_ba holds, per key head, its betas and then its alphas; else ssm_beta and ssm_alpha."""


@frozen(kw_only=True)
class ShortConvSpec:
    """c * conv(b * x), where b, c and x are the thirds of in_proj (LFM2)."""

    conv: ConvSpec


@frozen(kw_only=True)
class Mamba2Spec:
    """Selective state space (Mamba 2): a matrix per head, S [head_dim, state_size].

    Before: a convolution and SiLU over x, B and C together. After: times SiLU(z), RMSNorm per
    group of heads.
    """

    conv: ConvSpec
    num_heads: int
    head_dim: int
    num_groups: int
    """Heads in a group share B and C."""
    state_size: int

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim


RecurrentSpec = DeltaNetSpec | ShortConvSpec | Mamba2Spec
Mixer = AttentionSpec | LatentAttentionSpec | RecurrentSpec
"""How a layer looks at other positions than its own."""
M = TypeVar("M", AttentionSpec, LatentAttentionSpec, DeltaNetSpec, ShortConvSpec, Mamba2Spec)


@frozen(kw_only=True)
class LayerSpec:
    """One block: x += post(mixer(norm x)); x += post(ffn(norm x)).

    In a ``parallel`` one (Command R) both read the same normed x.
    """

    index: int
    state_class: StateClass
    mixer: Mixer
    feed_forward: FeedForwardSpec | ExpertsSpec | None
    """None: the block ends with the mixer."""
    post_norms: bool = False
    """RMSNorm after attention and after the feed-forward, before the residual (gemma)."""
    pre_norms: bool = True
    """The norms before them; OLMo 2 has none."""
    parallel: bool = False
    ffn_norm: str = "ffn_norm"
    """Tensor that norms the feed-forward's input."""

    @property
    def norms(self) -> tuple[str, ...]:
        """Tensors that norm what goes into the two parts."""
        if not self.pre_norms:
            return ()
        is_single = self.parallel or self.feed_forward is None
        return ("attn_norm",) if is_single else ("attn_norm", self.ffn_norm)

    @property
    def attention(self) -> AttentionSpec:
        return self.mixer_of(AttentionSpec)

    def mixer_of(self, kind: type[M]) -> M:
        """The mixer, which the caller knows to be of that kind."""
        assert isinstance(self.mixer, kind)
        return self.mixer


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
    residual_scale: float = 1.0
    """Multiplies every branch before it is added."""
    logit_scale: float = 1.0
    """Multiplies the logits."""
    output_norm: str = "output_norm"
    """Tensor that norms the head's input."""
    layer_norm: bool = False
    """Norms on the way into a matrix subtract the mean, too."""
    norm_bias: bool = False
    """and add a bias."""

    def for_context(self, context: int) -> "ModelSpec":
        """As a server for requests of at most so many tokens computes it."""
        return evolve(self, layers=tuple(_for_context(each, context) for each in self.layers))

    @property
    def has_states(self) -> bool:
        """Whether some layers keep a state that goes on, not keys and values of each token."""
        return any(layer.state_class is StateClass.POINT for layer in self.layers)

    @property
    def resumes_anywhere(self) -> bool:
        """Whether all layers keep the keys and values of all tokens."""
        return all(layer.state_class is StateClass.TOKEN for layer in self.layers)


def _for_context(layer: LayerSpec, context: int) -> LayerSpec:
    mixer = layer.mixer
    if not isinstance(mixer, AttentionSpec | LatentAttentionSpec):
        return layer
    return evolve(layer, mixer=evolve(mixer, rope=mixer.rope.for_context(context)))
