"""The flat program: what the decoder does, joined and narrowed, still computes the same."""

import zlib

import numpy as np
import pytest
from attrs import evolve

from harness.torch_models import (
    DELTA,
    DELTA_EXPERTS,
    LATENT,
    MAMBA,
    MAMBA_SCALED,
    MODELS,
    ODD,
    PARALLEL,
    PLAIN,
    SCORED,
    UNNORMED,
    WINDOWED,
)
from kvtrio.backends.cpu_program import Kind, Op, Program, fused, narrowed
from kvtrio.backends.cpu_recorder import program, recorded
from kvtrio.model.spec import ModelSpec

NUM_ROWS, SIZE = 5, 4
SAMPLED = [1, 4]


BENT = {
    Kind.GATED,
    Kind.PLAIN,
    Kind.LATENT,
    Kind.ATTENTION,
    Kind.EXPERTS,
    Kind.LOGITS,
    Kind.RECURRENT,
}


def number(name: str) -> float:
    """Stands for a tensor."""
    return 0.5 + zlib.crc32(name.encode()) / 2**32


def apply(op: Op, inputs: list[np.ndarray]) -> np.ndarray:
    """Something that depends on every field, and treats each row by itself."""
    if op.kind is Kind.EMBED:
        return np.arange(NUM_ROWS * SIZE, dtype=float).reshape(NUM_ROWS, SIZE) * op.scale
    x = inputs[0]
    if op.kind is Kind.SAMPLED:
        return x[SAMPLED]
    if op.is_centred:
        x = x - np.mean(x, -1, keepdims=True)
    if op.norm:
        x = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + op.eps) * number(op.norm)
    if op.norm_bias:
        x = x + number(op.norm_bias)
    for name in (*op.matrices, *op.head_norms):
        x = np.roll(x, 1, -1) * number(name)
    for name in op.biases:
        x = x + number(name)
    if op.kind in BENT:
        x = np.tanh(x + (op.layer or 0) + (op.softcap or 0))
    x = x * op.scale
    return x + inputs[1] if len(inputs) > 1 else x


def result(ops: Program) -> np.ndarray:
    values: list[np.ndarray] = []
    for op in ops:
        values.append(apply(op, [values[place] for place in op.inputs]))
    return values[-1]


@pytest.mark.parametrize("name", MODELS)
def test_joining_and_narrowing_change_no_result(name):
    """The three forms of each model's program compute the same numbers."""
    plain = recorded(MODELS[name])
    expected = result(plain)
    assert expected.shape == (len(SAMPLED), SIZE)
    np.testing.assert_array_equal(result(fused(plain)), expected)
    np.testing.assert_array_equal(result(narrowed(fused(plain))), expected)


def kinds(model: ModelSpec) -> str:
    return " ".join(op.kind.name for op in program(evolve(model, layers=model.layers[:2])))


def test_a_plain_layer_is_five_operations():
    """Norms go into products and additions into the product before; the last layer is narrowed."""
    assert kinds(PLAIN) == (
        "EMBED QKV ATTENTION LINEAR GATED LINEAR "
        "QKV SAMPLED SAMPLED ATTENTION LINEAR GATED LINEAR LOGITS SAMPLE"
    )
    ops = program(PLAIN)
    assert [op.norm for op in ops[1:6]] == ["blk.0.attn_norm.weight", "", "",
                                            "blk.0.ffn_norm.weight", ""]  # fmt: skip
    assert ops[3].inputs == (2, 0)
    assert ops[-2].norm == "output_norm.weight"


def test_post_norms_stay_additions():
    """A branch that is normed before it is added needs both done in one operation of its own."""
    assert kinds(WINDOWED).startswith("EMBED QKV ATTENTION LINEAR ADD GATED LINEAR ADD QKV SAMPLED")
    assert program(WINDOWED)[4].norm == "blk.0.post_attention_norm.weight"


def test_flags_of_the_model_are_written_down():
    """Biases, head norms, scales and caps are fields of the operations that use them."""
    odd = program(ODD)
    assert odd[0].scale == 2.0
    assert odd[1].biases == tuple(f"blk.0.attn_{part}.bias" for part in "qkv")
    assert odd[3].biases == ("blk.0.attn_output.bias",)
    assert odd[-2].softcap == 3.0
    assert odd[-2].matrices == ("token_embd.weight",)
    assert program(WINDOWED)[1].head_norms == (
        "blk.0.attn_q_norm.weight",
        "blk.0.attn_k_norm.weight",
    )


def test_recurrent_layers_and_experts_are_written_down():
    """Norms go into them, and the last that writes a state is where rows may be left out."""
    assert kinds(DELTA_EXPERTS).startswith(
        "EMBED RECURRENT LINEAR GATED LINEAR EXPERTS ADD QKV SAMPLED SAMPLED"
    )
    assert kinds(MAMBA) == "EMBED RECURRENT LINEAR RECURRENT SAMPLED SAMPLED LINEAR LOGITS SAMPLE"
    first = program(DELTA_EXPERTS)[1]
    assert (first.layer, first.norm) == (0, "blk.0.attn_norm.weight")
    experts = program(DELTA_EXPERTS)[5]
    assert (experts.inputs, experts.num_used) == ((2, 4), 2)
    assert (experts.norm, experts.shared_gate) == (
        "blk.0.post_attention_norm.weight",
        "blk.0.ffn_gate_inp_shexp.weight",
    )
    parts = ("attn_qkv", "attn_gate", "ssm_beta", "ssm_alpha")
    assert program(DELTA)[1].matrices == tuple(f"blk.0.{part}.weight" for part in parts)


def test_latent_attention_is_written_down():
    """q first, by one matrix or two; then the row, attention, and each head's way back."""
    assert kinds(LATENT).startswith(
        "EMBED RANK QUERIES LATENT ATTENTION HEADS LINEAR GATED LINEAR QUERIES LATENT SAMPLED"
    )
    ops = program(LATENT)
    assert (ops[1].norm, ops[2].norm) == ("blk.0.attn_norm.weight", "blk.0.attn_q_a_norm.weight")
    assert (ops[3].inputs, ops[3].norm) == ((0, 2), "blk.0.attn_norm.weight")
    assert ops[3].matrices == ("blk.0.attn_kv_a_mqa.weight", "blk.0.attn_k_b.weight")
    assert ops[3].head_norms == ("blk.0.attn_kv_a_norm.weight",)
    assert ops[9].norm == "blk.1.attn_norm.weight"
    experts = next(op for op in ops if op.kind is Kind.EXPERTS)
    assert (experts.routing, experts.selection_bias) == (SCORED, "blk.1.exp_probs_b.bias")


def test_parallel_branches_read_one_residual():
    """Attention's matrix comes last, so that the feed-forward still finds what both read."""
    assert kinds(PARALLEL).startswith("EMBED QKV ATTENTION PLAIN LINEAR LINEAR QKV SAMPLED")
    _, qkv, attention, plain, down, output = program(PARALLEL)[:6]
    assert (qkv.norm, qkv.norm_bias, qkv.is_centred) == (
        "blk.0.attn_norm.weight",
        "blk.0.attn_norm.bias",
        True,
    )
    assert (plain.norm, plain.inputs) == (qkv.norm, qkv.inputs) == ("blk.0.attn_norm.weight", (0,))
    assert (down.inputs, output.inputs) == ((3, 0), (2, 4))
    assert attention.inputs == (1,)


def test_what_has_no_norm_reads_the_residual():
    """And its head norms keep their own epsilon."""
    assert kinds(UNNORMED).startswith("EMBED QKV ATTENTION LINEAR ADD GATED LINEAR ADD QKV SAMPLED")
    qkv = program(UNNORMED)[1]
    assert (qkv.norm, qkv.inputs, qkv.eps) == ("", (0,), UNNORMED.norm_eps)


def test_factors_go_into_additions_and_logits():
    """A branch that is scaled is added by an operation of its own."""
    ops = program(MAMBA_SCALED)
    assert kinds(MAMBA_SCALED).startswith("EMBED RECURRENT LINEAR ADD GATED LINEAR ADD QKV")
    assert (ops[3].scale, ops[3].norm) == (0.7, "")
    assert (ops[-2].kind, ops[-2].scale) == (Kind.LOGITS, 0.5)


def test_a_product_that_others_read_is_not_joined():
    """Its value is needed as it is."""
    ops = (
        Op(kind=Kind.EMBED),
        Op(kind=Kind.LINEAR, inputs=(0,), matrices=("a",)),
        Op(kind=Kind.ADD, inputs=(1, 0)),
        Op(kind=Kind.ADD, inputs=(1, 2)),
    )
    assert fused(ops) == ops


def test_a_program_without_layers_is_left_alone():
    """There is no last layer to narrow."""
    ops = fused(recorded(evolve(PLAIN, layers=())))
    assert narrowed(ops) == ops
