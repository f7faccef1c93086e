"""The architectures that are supported: what their metadata leaves unsaid, one entry each."""

from collections.abc import Mapping

from attrs import frozen

from kvtrio.model.spec import Activation, RopeStyle


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


FAMILIES: Mapping[str, Family] = {
    "llama": Family(rope=RopeStyle.NORM, paired_rows=True),
    "qwen2": Family(rope=RopeStyle.NEOX, needs_bias=True),
    "qwen3": Family(rope=RopeStyle.NEOX, qk_norm=True),
    "gemma3": Family(
        rope=RopeStyle.NEOX,
        activation=Activation.GELU_TANH,
        qk_norm=True,
        post_norms=True,
        scaled_embedding=True,
        sliding=True,
    ),
}
