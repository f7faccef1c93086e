"""Names turned into native indices, and weights on their way into memory."""

import gguf
import numpy as np
import pytest
from attrs import evolve

from harness.torch_models import (
    BARE_EXPERTS,
    BIASED,
    DELTA,
    DELTA_EXPERTS,
    LATENT,
    ODD,
    PLAIN,
    WINDOWED,
)
from kvtrio.backends.cpu_model import attention, lowered, rope
from kvtrio.backends.cpu_native import aligned, num_cores
from kvtrio.backends.cpu_program import Kind
from kvtrio.backends.cpu_recorder import program
from kvtrio.backends.cpu_recurrent import Names, recurrent
from kvtrio.backends.cpu_weights import is_finite
from kvtrio.kernels import cpu_abi as abi
from kvtrio.model.spec import RopeSpec, RopeStyle

Type = gguf.GGMLQuantizationType


def test_a_plain_program_runs_on_fixed_buffers():
    """Products add to the residual, q and attention have places of their own."""
    names = Names()
    ops = lowered(program(PLAIN), names)
    kinds = [abi.OpKind(op.kind).name for op in ops]
    assert kinds[:6] == ["EMBED", "QKV", "ATTENTION", "LINEAR", "GATED", "LINEAR"]
    assert kinds[-7:] == ["SAMPLED", "ATTENTION", "LINEAR", "GATED", "LINEAR", "LOGITS", "SAMPLE"]
    places = [(abi.Buffer(op.input).name, abi.Buffer(op.output).name) for op in ops[1:6]]
    assert places == [
        ("RESIDUAL", "QUERY"),
        ("QUERY", "ATTENDED"),
        ("ATTENDED", "RESIDUAL"),
        ("RESIDUAL", "HIDDEN"),
        ("HIDDEN", "RESIDUAL"),
    ]
    assert len(names.matrices) == 2 + 3 * 7
    own = [names.matrices[f"blk.0.attn_{part}.weight"] for part in "qkv"]
    assert list(ops[1].matrices) == [*own, abi.NONE]
    assert ops[1].norm == names.vectors["blk.0.attn_norm.weight"]
    assert list(ops[1].biases) == [abi.NONE] * 4


def test_branches_with_a_post_norm_wait_in_their_own_buffer():
    """The addition names the norm; a tied head is the embedding's matrix."""
    names = Names()
    ops = lowered(program(WINDOWED), names)
    assert (ops[3].output, ops[4].kind) == (abi.Buffer.BRANCH, abi.OpKind.ADD)
    assert ops[4].norm == names.vectors["blk.0.post_attention_norm.weight"]
    assert ops[-2].matrices[0] == ops[0].matrices[0]
    assert ops[4 + 1].activation == abi.Activation.GELU_TANH


def test_layers_of_two_kinds_have_tables_of_their_own():
    """A recurrent layer's value lies where attention's would; each kind counts its own layers."""
    names = Names()
    ops = lowered(program(DELTA), names)
    assert (ops[1].kind, ops[1].output) == (abi.OpKind.RECURRENT, abi.Buffer.ATTENDED)
    assert list(ops[1].matrices) == [names.matrices[f"blk.0.{part}.weight"] for part in (
        "attn_qkv", "attn_gate", "ssm_beta", "ssm_alpha"
    )]  # fmt: skip
    assert (names.attentions, names.recurrents) == ({1: 0}, {0: 0, 2: 1})
    assert [op.recurrent for op in ops if op.kind == abi.OpKind.RECURRENT] == [0, 1]
    assert {op.attention for op in ops if op.kind != abi.OpKind.RECURRENT} == {0, abi.NONE}
    assert attention(DELTA.layers[1], 0, names).is_gated
    layer = recurrent(DELTA.layers[2], 1, names)
    assert (layer.kind, layer.state, layer.is_tiled) == (abi.Mixing.DELTA_NET, 1, 1)
    assert layer.conv == names.vectors["blk.2.ssm_conv1d.weight"]
    assert (layer.conv_bias, layer.skip) == (abi.NONE, abi.NONE)


def test_experts_add_to_what_a_shared_one_left():
    """The shared one's value waits in the place of the sum; without it, nothing is read there."""
    names = Names()
    ops = lowered(program(DELTA_EXPERTS), names)
    shared, experts = ops[4:6]
    assert (shared.kind, shared.output) == (abi.OpKind.LINEAR, abi.Buffer.BRANCH)
    assert (experts.kind, experts.output) == (abi.OpKind.EXPERTS, abi.Buffer.BRANCH)
    stacks = (f"blk.0.ffn_{part}_exps.weight" for part in ("gate", "up", "down"))
    named = ["blk.0.ffn_gate_inp.weight", *stacks]
    assert list(experts.matrices) == [names.matrices[name] for name in named]
    assert (experts.num_used, experts.is_shared) == (2, 1)
    assert experts.shared_gate == names.vectors["blk.0.ffn_gate_inp_shexp.weight"]
    (first, *_) = (op for op in lowered(program(BARE_EXPERTS), Names()) if op.num_used)
    assert (first.is_shared, first.shared_gate) == (0, abi.NONE)


def test_latent_queries_wait_where_attention_puts_its_value():
    """Before it does; a latent layer has an attention's table, and its own kind of cache."""
    names = Names()
    ops = lowered(program(LATENT), names)
    kinds = [abi.OpKind(op.kind).name for op in ops[1:7]]
    assert kinds == ["LINEAR", "LINEAR", "LATENT", "ATTENTION", "HEADS", "LINEAR"]
    places = [(abi.Buffer(op.input).name, abi.Buffer(op.output).name) for op in ops[1:7]]
    assert places == [
        ("RESIDUAL", "HIDDEN"),
        ("HIDDEN", "ATTENDED"),
        ("RESIDUAL", "QUERY"),
        ("QUERY", "ATTENDED"),
        ("ATTENDED", "HIDDEN"),
        ("HIDDEN", "RESIDUAL"),
    ]
    assert names.attentions == {0: 0, 1: 1}
    layer = attention(LATENT.layers[0], 0, names)
    assert (layer.num_heads, layer.sinks, layer.window) == (4, abi.NONE, 0)


def test_routing_and_biases_of_experts_are_passed_on():
    """Their vectors by index; what is usual is the softmax over those chosen."""
    names = Names()
    scored = next(op for op in lowered(program(LATENT), names) if op.num_used)
    assert scored.routing.scoring == abi.Scoring.SIGMOID
    assert (scored.routing.num_groups, scored.routing.num_groups_used) == (3, 2)
    assert scored.routing.bias == names.vectors["blk.1.exp_probs_b.bias"]
    biased = next(op for op in lowered(program(BIASED), names) if op.num_used)
    assert biased.routing.scoring == abi.Scoring.CHOSEN
    assert biased.activation == abi.Activation.CLAMPED
    parts = ("gate_inp", "gate_exps", "up_exps", "down_exps")
    assert list(biased.biases) == [names.vectors[f"blk.0.ffn_{part}.bias"] for part in parts]
    assert attention(BIASED.layers[0], 0, names).sinks == names.vectors["blk.0.attn_sinks.weight"]


def test_biases_and_caps_are_passed_on():
    """Where the model has them."""
    names = Names()
    ops = lowered(program(ODD), names)
    assert ops[1].biases[2] == names.vectors["blk.0.attn_v.bias"]
    assert ops[3].biases[0] == names.vectors["blk.0.attn_output.bias"]
    assert ops[-2].softcap == 3.0
    assert attention(ODD.layers[1], 1, names).softcap == 5.0
    assert attention(ODD.layers[1], 1, names).window == 9


def test_a_value_that_is_gone_is_not_read():
    """A program that needs two residuals at once does not fit and is refused."""
    ops = list(program(PLAIN))
    (place,) = [i for i, op in enumerate(ops[:6]) if op.kind is Kind.GATED]
    ops[place] = evolve(ops[place], inputs=(0,))
    with pytest.raises(ValueError, match=f"operation {place} reads a value that is gone"):
        lowered(tuple(ops), Names())


def test_equal_ropes_are_one():
    """Layers share their angles; a layer without rope names none."""
    names = Names()
    plain = RopeSpec(style=RopeStyle.NEOX, num_rotated=8, base=1e4)
    scaled = evolve(plain, scale=0.5, factors="rope_freqs.weight")
    assert [names.rope(each) for each in (plain, scaled, plain)] == [0, 1, 0]
    assert names.rope(evolve(plain, style=RopeStyle.NONE)) == abi.NONE
    assert rope(scaled, names).factors == names.vectors["rope_freqs.weight"]
    assert rope(plain, names).factors == abi.NONE


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0",
                                  "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS",
                                  "MXFP4"])  # fmt: skip
def test_a_weight_that_is_no_number_is_found_in_every_type(kind):
    """Exactly where the values that the bytes stand for are not all finite, whatever the bytes."""
    rng = np.random.default_rng(3)
    stored = Type[kind]
    _, num_bytes = gguf.GGML_QUANT_SIZES[stored]
    answers = set()
    for _ in range(400):
        block = rng.integers(0, 256, (1, num_bytes), np.uint8)
        with np.errstate(all="ignore"):
            values = gguf.quants.dequantize(block, stored)
        expected = bool(np.isfinite(values).all())
        answers.add(expected)
        if kind != "MXFP4":
            assert is_finite(block.ravel(), stored) == expected
        else:  # a block without its largest values may pass with an exponent that is refused
            assert expected or not is_finite(block.ravel(), stored)
    assert answers == {True, False} or kind == "F32"


def test_the_machine_has_cores():
    """At least one, and sizes are rounded up to whole cache lines."""
    assert num_cores() >= 1
    assert [aligned(size) for size in (0, 1, 64, 65)] == [0, 64, 64, 128]
