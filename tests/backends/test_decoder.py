"""The forward pass as a sequence of operations on values that are only written down."""

import subprocess
import sys

from attrs import evolve

from harness.torch_models import (
    CONV,
    DELTA,
    DELTA_EXPERTS,
    MAMBA,
    MAMBA_EXPERTS,
    ODD,
    PLAIN,
    WINDOWED,
)
from kvtrio.backends import decoder
from kvtrio.model.spec import AttentionSpec, ExpertsSpec, FeedForwardSpec, LayerSpec, ModelSpec


class Trace:
    """Ops whose values are formulas; each residual gets a name of its own."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def _named(self, formula: str) -> str:
        self.lines.append(formula)
        return f"x{len(self.lines) - 1}"

    def embed(self, step: str, weight: str, scale: float) -> str:
        return self._named(f"{weight} * {scale:g}")

    def norm(self, x: str, weight: str, eps: float) -> str:
        return f"{weight}({x})"

    def post_norm(self, x: str, weight: str, eps: float) -> str:
        return f"{weight}({x})"

    def linear(self, step: str, x: str, weight: str, bias: bool) -> str:
        return f"{weight}{'+bias' if bias else ''}({x})"

    def qkv(self, step: str, x: str, layer: LayerSpec, eps: float) -> str:
        return f"qkv.{layer.index}({x})"

    def attention(self, step: str, q: str, index: int, spec: AttentionSpec) -> str:
        return f"attention.{index}({q})"

    def gated_ffn(self, step: str, x: str, prefix: str, spec: FeedForwardSpec) -> str:
        return f"{prefix}ffn({x})"

    def short_conv(self, step: str, x: str, layer: LayerSpec) -> str:
        return f"short_conv.{layer.index}({x})"

    def delta_net(self, step: str, x: str, layer: LayerSpec, eps: float) -> str:
        return f"delta_net.{layer.index}({x})"

    def mamba2(self, step: str, x: str, layer: LayerSpec, eps: float) -> str:
        return f"mamba2.{layer.index}({x})"

    def experts(self, step: str, x: str, index: int, spec: ExpertsSpec) -> str:
        return f"experts.{index}({x})"

    def scaled(self, x: str, factor: float) -> str:
        return f"{factor:g} * {x}"

    def add(self, x: str, y: str) -> str:
        return self._named(f"{x} + {y}")

    def sampled_rows(self, step: str, x: str) -> str:
        return f"sampled({x})"

    def logits(self, step: str, x: str, weight: str, softcap: float | None) -> str:
        return f"{weight}({x}) capped by {softcap}"

    def sample(self, step: str, logits: str) -> list[str]:
        return [*self.lines, logits]


def traced(model: ModelSpec, layers: slice) -> list[str]:
    return decoder.forward(evolve(model, layers=model.layers[layers]), Trace(), "step")


def test_a_plain_layer_adds_attention_and_feed_forward():
    """Each branch is normed before and added to the residual; a head of its own comes last."""
    assert traced(PLAIN, slice(0, 2)) == [
        "token_embd * 2",
        "x0 + blk.0.attn_output(attention.0(qkv.0(blk.0.attn_norm(x0))))",
        "x1 + blk.0.ffn(blk.0.ffn_norm(x1))",
        "x2 + blk.1.attn_output(attention.1(qkv.1(blk.1.attn_norm(x2))))",
        "x3 + blk.1.ffn(blk.1.ffn_norm(x3))",
        "output(output_norm(sampled(x4))) capped by None",
    ]


def test_post_norms_lie_before_the_residual():
    """Gemma's layers norm each branch again before it is added; a tied head is the embedding."""
    assert traced(WINDOWED, slice(3, 4)) == [
        "token_embd * 2",
        "x0 + blk.3.post_attention_norm("
        "blk.3.attn_output(attention.3(qkv.3(blk.3.attn_norm(x0)))))",
        "x1 + blk.3.post_ffw_norm(blk.3.ffn(blk.3.ffn_norm(x1)))",
        "token_embd(output_norm(sampled(x2))) capped by None",
    ]


def test_bias_and_softcap_follow_the_flags():
    """The output matrix gets its bias and the logits their cap where the spec says so."""
    lines = traced(ODD, slice(0, 1))
    assert lines[1].startswith("x0 + blk.0.attn_output+bias(")
    assert lines[-1].endswith("capped by 3.0")


def test_recurrent_layers_stand_in_for_attention():
    """Each kind has one operation of its own, and the matrix after it that its files name."""
    assert traced(DELTA, slice(0, 1))[1] == "x0 + blk.0.ssm_out(delta_net.0(blk.0.attn_norm(x0)))"
    expected = "x0 + blk.0.shortconv.out_proj(short_conv.0(blk.0.attn_norm(x0)))"
    assert traced(CONV, slice(0, 1))[1] == expected
    assert traced(CONV, slice(0, 0))[-1].startswith("token_embd(token_embd_norm(")


def test_a_block_may_end_without_a_feed_forward():
    """Mamba's layers are nothing but their state space."""
    assert traced(MAMBA, slice(0, 2))[1:-1] == [
        "x0 + blk.0.ssm_out(mamba2.0(blk.0.attn_norm(x0)))",
        "x1 + blk.1.ssm_out(mamba2.1(blk.1.attn_norm(x1)))",
    ]


def test_experts_are_one_operation():
    """Under whatever name the file keeps the norm before them."""
    lines = traced(DELTA_EXPERTS, slice(0, 1))
    assert lines[2] == "x1 + experts.0(blk.0.post_attention_norm(x1))"


def test_scales_multiply_branches_and_logits():
    """Each branch before it is added, and the logits last."""
    lines = traced(MAMBA_EXPERTS, slice(0, 1))
    assert lines[1].startswith("x0 + 0.7 * blk.0.ssm_out(")
    assert lines[2].startswith("x1 + 0.7 * experts.0(")
    assert lines[-1].startswith("0.5 * token_embd(")


def test_the_decoder_knows_no_torch():
    """Other backends use the decoder without torch being there."""
    code = "import sys, kvtrio.backends.decoder; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
