"""Which tensors a layer holds: names without ``blk.N.``, and torch shapes."""

from collections.abc import Iterator
from typing import assert_never

from kvtrio.model.spec import (
    AttentionSpec,
    DeltaNetSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LatentAttentionSpec,
    LayerSpec,
    Mamba2Spec,
    Mixer,
    ShortConvSpec,
)

Shape = tuple[int, ...]
Tensors = Iterator[tuple[str, Shape]]
_ROWS_OF_NUMBERS = frozenset({"ssm_conv1d", "ssm_a", "ssm_d", "ssm_norm", "shortconv.conv"})
"""With two axes, but never multiplied with a row of activations."""


def is_matrix(name: str, shape: Shape) -> bool:
    """Whether activations are multiplied with it: not so with norms, biases and convolutions."""
    kind = name.split(".", 2)[-1].removesuffix(".weight")
    return len(shape) > 1 and kind not in _ROWS_OF_NUMBERS and not kind.endswith(".bias")


def layer_tensors(layer: LayerSpec, hidden: int) -> Tensors:
    """All tensors of one layer of a model with ``hidden`` values per row."""
    for name in layer.norms:
        yield f"{name}.weight", (hidden,)
    yield from _mixer_tensors(layer.mixer, hidden)
    if layer.feed_forward is not None:
        yield from _feed_forward_tensors(layer.feed_forward, hidden)
    if layer.post_norms:
        for name in ("post_attention_norm", "post_ffw_norm"):
            yield f"{name}.weight", (hidden,)


def _mixer_tensors(spec: Mixer, hidden: int) -> Tensors:
    match spec:
        case AttentionSpec():
            yield from _attention_tensors(spec, hidden)
        case LatentAttentionSpec():
            yield from _latent_tensors(spec, hidden)
        case DeltaNetSpec():
            yield from _delta_net_tensors(spec, hidden)
        case ShortConvSpec():
            yield "shortconv.in_proj.weight", (3 * hidden, hidden)
            yield "shortconv.conv.weight", (spec.conv.channels, spec.conv.width)
            yield "shortconv.out_proj.weight", (hidden, hidden)
        case Mamba2Spec():
            yield from _mamba2_tensors(spec, hidden)
        case _:
            assert_never(spec)


def _attention_tensors(spec: AttentionSpec, hidden: int) -> Tensors:
    rows = {
        "attn_q": spec.num_heads * spec.head_dim * (2 if spec.gated else 1),
        "attn_k": spec.num_kv_heads * spec.head_dim,
        "attn_v": spec.num_kv_heads * spec.value_dim,
    }
    for name, size in rows.items():
        yield f"{name}.weight", (size, hidden)
        if spec.bias:
            yield f"{name}.bias", (size,)
    yield "attn_output.weight", (hidden, spec.num_heads * spec.value_dim)
    if spec.output_bias:
        yield "attn_output.bias", (hidden,)
    if spec.qk_norm:
        joint = spec.joint_norm
        yield "attn_q_norm.weight", (spec.head_dim * (spec.num_heads if joint else 1),)
        yield "attn_k_norm.weight", (spec.head_dim * (spec.num_kv_heads if joint else 1),)
    if spec.sinks:
        yield "attn_sinks.weight", (spec.num_heads,)


def _latent_tensors(spec: LatentAttentionSpec, hidden: int) -> Tensors:
    heads, latent, rows = spec.num_heads, spec.latent_dim, spec.num_heads * spec.query_dim
    if spec.query_rank is None:
        yield "attn_q.weight", (rows, hidden)
    else:
        yield "attn_q_a.weight", (spec.query_rank, hidden)
        yield "attn_q_a_norm.weight", (spec.query_rank,)
        yield "attn_q_b.weight", (rows, spec.query_rank)
    yield "attn_kv_a_mqa.weight", (spec.key_dim, hidden)
    yield "attn_kv_a_norm.weight", (latent,)
    yield "attn_k_b.weight", (heads, latent, spec.plain_dim)
    yield "attn_v_b.weight", (heads, spec.value_dim, latent)
    yield "attn_output.weight", (hidden, heads * spec.value_dim)


def _delta_net_tensors(spec: DeltaNetSpec, hidden: int) -> Tensors:
    heads, inner = spec.num_value_heads, spec.num_value_heads * spec.value_dim
    yield "attn_qkv.weight", (spec.conv.channels, hidden)
    yield "attn_gate.weight", (inner, hidden)
    yield "ssm_conv1d.weight", (spec.conv.channels, spec.conv.width)
    gates = {"ssm_ba": 2 * heads} if spec.fused_gates else {"ssm_beta": heads, "ssm_alpha": heads}
    for name, size in gates.items():
        yield f"{name}.weight", (size, hidden)
    yield "ssm_a", (heads,)
    yield "ssm_dt.bias", (heads,)
    yield "ssm_norm.weight", (spec.value_dim,)
    yield "ssm_out.weight", (hidden, inner)


def _mamba2_tensors(spec: Mamba2Spec, hidden: int) -> Tensors:
    yield "ssm_in.weight", (spec.inner_size + spec.conv.channels + spec.num_heads, hidden)
    yield "ssm_conv1d.weight", (spec.conv.channels, spec.conv.width)
    yield "ssm_conv1d.bias", (spec.conv.channels,)
    yield "ssm_dt.bias", (spec.num_heads,)
    yield "ssm_a", (spec.num_heads, 1)
    yield "ssm_d", (spec.num_heads, 1)
    yield "ssm_norm.weight", (spec.num_groups, spec.inner_size // spec.num_groups)
    yield "ssm_out.weight", (hidden, spec.inner_size)


def _feed_forward_tensors(spec: FeedForwardSpec | ExpertsSpec, hidden: int) -> Tensors:
    if isinstance(spec, FeedForwardSpec):
        yield from _dense_tensors(spec, hidden)
        return
    count = spec.num_experts
    yield "ffn_gate_inp.weight", (count, hidden)
    yield from _gated_tensors("_exps", (count,), spec.size, hidden)
    if spec.biases:
        yield "ffn_gate_inp.bias", (count,)
        yield "ffn_gate_exps.bias", (count, spec.size)
        yield "ffn_up_exps.bias", (count, spec.size)
        yield "ffn_down_exps.bias", (count, hidden)
    if spec.routing.selection_bias:
        yield "exp_probs_b.bias", (count,)
    if spec.shared is not None:
        yield from _gated_tensors("_shexp", (), spec.shared.size, hidden)
        if spec.shared.gated:
            yield "ffn_gate_inp_shexp.weight", (hidden,)


def _dense_tensors(spec: FeedForwardSpec, hidden: int) -> Tensors:
    if spec.gated:
        yield from _gated_tensors("", (), spec.size, hidden)
    else:
        yield "ffn_up.weight", (spec.size, hidden)
        yield "ffn_down.weight", (hidden, spec.size)
    if spec.bias:
        yield "ffn_up.bias", (spec.size,)
        yield "ffn_down.bias", (hidden,)


def _gated_tensors(suffix: str, stack: Shape, size: int, hidden: int) -> Tensors:
    yield f"ffn_gate{suffix}.weight", (*stack, size, hidden)
    yield f"ffn_up{suffix}.weight", (*stack, size, hidden)
    yield f"ffn_down{suffix}.weight", (*stack, hidden, size)
