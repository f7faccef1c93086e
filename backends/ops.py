"""The operations that the decoder is written in, over values it cannot look into.

A weight is a name: the tensor's name in the model file without its last part, so
"blk.0.attn_output" stands for "blk.0.attn_output.weight" (and ".bias"). An adapter's delta belongs
to the same name, and the implementation adds it inside the operation that reads the weight; which
rows carry which adapter, like all that differs between rows, is known to the step alone. No
operation returns anything the decoder could branch on, so one run of the decoder can also record
a program.

Grain: what one fused kernel does. Implementations say more about types; shapes below use N rows of
a step, D hidden size, M sampled rows, V vocabulary.
"""

from typing import Protocol, TypeVar

from kvtrio.model.spec import AttentionSpec, ExpertsSpec, FeedForwardSpec, LayerSpec

Step = TypeVar("Step", contravariant=True)
"""What one batch looks like to the implementation: positions, slots, block tables, sampled rows."""
Value = TypeVar("Value")
"""Activations."""
Choices = TypeVar("Choices", covariant=True)
"""Chosen tokens."""


class Ops(Protocol[Step, Value, Choices]):
    """One implementation per backend."""

    def embed(self, step: Step, weight: str, scale: float) -> Value:
        """Rows of the table for the step's tokens, times ``scale``: [N, D]."""
        ...

    def norm(self, x: Value, weight: str, eps: float) -> Value:
        """RMSNorm over the last axis, of the residual on its way into a matrix."""
        ...

    def layer_norm(self, x: Value, weight: str, bias: bool, eps: float) -> Value:
        """The same with the mean taken off first, and a bias added last if it has one."""
        ...

    def narrowed(self, x: Value) -> Value:
        """The residual on its way into a matrix without a norm."""
        ...

    def post_norm(self, x: Value, weight: str, eps: float) -> Value:
        """RMSNorm over the last axis, of a branch on its way into the residual."""
        ...

    def linear(self, step: Step, x: Value, weight: str, bias: bool) -> Value:
        """x W^T (+ bias): [N, I] -> [N, O]."""
        ...

    def qkv(self, step: Step, x: Value, layer: LayerSpec, eps: float) -> Value:
        """Project to q, k, v; norm q and k per head if the layer says so; rotate q and k; write k
        and v into the cache at the step's slots. Returns q: [N, heads, head_dim], of gated
        attention with the gate behind it: [N, heads, 2 head_dim]."""
        ...

    def attention(self, step: Step, q: Value, index: int, spec: AttentionSpec) -> Value:
        """Attention of each row over its request's blocks in layer ``index``, rows of this step
        included, times the sigmoid of its gate if it has one: what ``qkv`` returned ->
        [N, heads * value_dim]."""
        ...

    def latent_attention(self, step: Step, x: Value, layer: LayerSpec, eps: float) -> Value:
        """A ``LatentAttentionSpec`` layer up to the matrix after it, its rows written into the
        cache: [N, D] -> [N, heads * value_dim]."""
        ...

    def short_conv(self, step: Step, x: Value, layer: LayerSpec) -> Value:
        """A ``ShortConvSpec`` layer up to the matrix after it: [N, D] -> [N, D]. Like the two
        below, it reads the state in the slot of each row's request and leaves a new one there."""
        ...

    def delta_net(self, step: Step, x: Value, layer: LayerSpec, eps: float) -> Value:
        """A ``DeltaNetSpec`` layer up to the matrix after it: [N, D] -> [N, heads * value_dim]."""
        ...

    def mamba2(self, step: Step, x: Value, layer: LayerSpec, eps: float) -> Value:
        """A ``Mamba2Spec`` layer up to the matrix after it: [N, D] -> [N, heads * head_dim]."""
        ...

    def gated_ffn(self, step: Step, x: Value, prefix: str, spec: FeedForwardSpec) -> Value:
        """down(act(gate x) * up x) with the weights under ``prefix``: [N, D] -> [N, D]."""
        ...

    def plain_ffn(self, step: Step, x: Value, prefix: str, spec: FeedForwardSpec) -> Value:
        """down(act(up x)) with the weights under ``prefix``: [N, D] -> [N, D]."""
        ...

    def experts(self, step: Step, x: Value, index: int, spec: ExpertsSpec) -> Value:
        """Router, the experts of each row, and the shared one if there is one, of layer
        ``index``: [N, D] -> [N, D]."""
        ...

    def scaled(self, x: Value, factor: float) -> Value:
        """x * factor, of a branch or of logits, at the width of the residual."""
        ...

    def add(self, x: Value, y: Value) -> Value:
        """The residual: x + y, kept at the width of x."""
        ...

    def sampled_rows(self, step: Step, x: Value) -> Value:
        """Only the rows after which a token is sampled: [N, D] -> [M, D]."""
        ...

    def logits(self, step: Step, x: Value, weight: str, softcap: float | None) -> Value:
        """x W^T, soft-capped if asked: [M, D] -> [M, V]."""
        ...

    def sample(self, step: Step, logits: Value) -> Choices:
        """One token per sampled row, as its request's parameters say."""
        ...
