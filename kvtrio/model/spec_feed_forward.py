"""What a layer does with each position by itself, as data: see ``spec``."""

from enum import Enum

from attrs import frozen


class Activation(Enum):
    """act(gate) * up; or act(up) alone, where there is no gate."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    CLAMPED = "clamped"
    """gate sigmoid(1.702 gate) (up + 1), with gate at most 7 and up within 7 of 0 (gpt-oss)."""


@frozen(kw_only=True)
class FeedForwardSpec:
    """Feed-forward: down(act(gate x) * up x)."""

    size: int
    activation: Activation
    gated: bool = True
    """Without: down(act(up x))."""
    bias: bool = False
    """Of up and down."""


@frozen(kw_only=True)
class SharedExpertSpec:
    """An expert that every token uses besides its own."""

    size: int
    gated: bool
    """Its output is multiplied by sigmoid(ffn_gate_inp_shexp x)."""


class Gating(Enum):
    """What makes an expert's score of its logit."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@frozen(kw_only=True)
class RoutingSpec:
    """How experts are chosen, the largest scores first, and what their outputs are multiplied by.

    By default that is the softmax over the logits of those chosen.
    """

    gating: Gating = Gating.SOFTMAX
    normalised: bool = True
    """A token's weights are its scores divided by their sum."""
    scale: float = 1.0
    """Multiplies the weights."""
    selection_bias: bool = False
    """exp_probs_b is added to the scores for choosing, and not for the weights."""
    num_groups: int = 1
    num_groups_used: int = 1
    """Only experts of the best groups are chosen from; a group counts its two best."""


@frozen(kw_only=True)
class ExpertsSpec:
    """Gated feed-forwards, of which each token uses a few."""

    num_experts: int
    num_used: int
    size: int
    activation: Activation
    shared: SharedExpertSpec | None = None
    routing: RoutingSpec = RoutingSpec()
    biases: bool = False
    """Of the router, and of each expert's matrices."""
