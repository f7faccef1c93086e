"""Hybrids and mixtures of experts, from metadata and tensor index to a ModelSpec."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from model.gguf_builder import Tensor, gguf_bytes, scalar, tensor
from model.hybrid_builder import LAYERS, dense, hybrid_metadata, hybrid_tensors, without

from kvtrio.core.types import StateClass
from kvtrio.model.adapter_pairs import adaptable
from kvtrio.model.architectures import read_spec
from kvtrio.model.errors import ModelFileError
from kvtrio.model.gguf_file import open_gguf
from kvtrio.model.spec import (
    Activation,
    ConvSpec,
    DeltaNetSpec,
    ExpertsSpec,
    FeedForwardSpec,
    Mamba2Spec,
    ModelSpec,
    RopeStyle,
    SharedExpertSpec,
    ShortConvSpec,
)
from kvtrio.model.tensors import needed_tensors

POINT, TOKEN = StateClass.POINT, StateClass.TOKEN


def spec_of(
    folder: Path, architecture: str, tensors: Sequence[Tensor] | None = None, **keys: object
) -> ModelSpec:
    """``keys`` change the metadata, "__" for "." and None to drop."""
    named = {f"{architecture}.{key.replace('__', '.')}": value for key, value in keys.items()}
    metadata = hybrid_metadata(architecture) | named
    path = folder / "model.gguf"
    path.write_bytes(
        gguf_bytes(
            {key: value for key, value in metadata.items() if value is not None},
            hybrid_tensors(architecture) if tensors is None else tensors,
        )
    )
    with open_gguf(path) as file:
        return read_spec(file)


def classes(spec: ModelSpec) -> list[StateClass]:
    return [layer.state_class for layer in spec.layers]


def test_qwen35(tmp_path):
    """A delta net with heads in turns, then gated attention; the usual rope for text."""
    spec = spec_of(tmp_path, "qwen35")
    delta, full = spec.layers
    assert classes(spec) == [POINT, TOKEN]
    assert delta.mixer == DeltaNetSpec(
        conv=ConvSpec(width=4, channels=16),
        num_key_heads=1,
        num_value_heads=2,
        key_dim=4,
        value_dim=4,
        tiled_heads=True,
        fused_gates=False,
    )
    assert full.attention.gated
    assert full.attention.qk_norm
    assert full.attention.rope.style is RopeStyle.NEOX
    assert delta.ffn_norm == full.ffn_norm == "post_attention_norm"
    assert not delta.post_norms
    assert delta.feed_forward == FeedForwardSpec(size=12, activation=Activation.SILU)


def test_qwen3next(tmp_path):
    """Key heads are repeated one by one, the gates are one matrix, the shared expert has one."""
    spec = spec_of(tmp_path, "qwen3next")
    delta = spec.layers[0].mixer_of(DeltaNetSpec)
    assert (delta.tiled_heads, delta.fused_gates) == (False, True)
    for layer in spec.layers:
        assert layer.feed_forward == ExpertsSpec(
            num_experts=4,
            num_used=2,
            size=6,
            activation=Activation.SILU,
            shared=SharedExpertSpec(size=10, gated=True),
        )


def test_lfm2(tmp_path):
    """Convolutions where a layer has no key heads; the last norm has a name of its own."""
    spec = spec_of(tmp_path, "lfm2")
    assert classes(spec) == [POINT, TOKEN]
    assert spec.layers[0].mixer == ShortConvSpec(conv=ConvSpec(width=3, channels=8))
    assert not spec.layers[1].attention.gated
    assert spec.output_norm == "token_embd_norm"


def test_mamba2(tmp_path):
    """Nothing but state spaces: no attention and no feed-forward."""
    spec = spec_of(tmp_path, "mamba2")
    assert classes(spec) == [POINT, POINT]
    assert spec.layers[1].feed_forward is None
    assert spec.layers[1].mixer == Mamba2Spec(
        conv=ConvSpec(width=4, channels=14), num_heads=2, head_dim=4, num_groups=1, state_size=3
    )


def test_granitehybrid(tmp_path):
    """Four scales, no rope, experts with a shared one that has no gate."""
    spec = spec_of(tmp_path, "granitehybrid")
    assert classes(spec) == [POINT, TOKEN]
    assert (spec.embedding_scale, spec.residual_scale, spec.logit_scale) == (3, 0.5, 0.25)
    attention = spec.layers[1].attention
    assert (attention.scale, attention.rope.style) == (0.25, RopeStyle.NONE)
    experts = spec.layers[0].feed_forward
    assert isinstance(experts, ExpertsSpec)
    assert (experts.size, experts.shared) == (12, SharedExpertSpec(size=10, gated=False))


def test_granite_without_experts_and_scales(tmp_path):
    """Small sizes have a dense feed-forward; 0 or nothing means no scale; rope is the default."""
    dense_layers = [
        {name: shape for name, shape in layer.items() if "exp" not in name and "inp" not in name}
        | dense()
        for layer in LAYERS["granitehybrid"]
    ]
    tensors = [item for item in hybrid_tensors("granitehybrid") if "blk." not in item.name]
    tensors += [
        tensor(f"blk.{i}.{name}", np.ones(shape))
        for i, layer in enumerate(dense_layers)
        for name, shape in layer.items()
    ]
    keys = dict.fromkeys(("expert_count", "embedding_scale", "rope__scaling__finetuned"))
    zeros = {"residual_scale": 0.0, "logit_scale": 0.0}
    spec = spec_of(tmp_path, "granitehybrid", tensors, **keys, **zeros)
    assert isinstance(spec.layers[0].feed_forward, FeedForwardSpec)
    assert spec.embedding_scale == spec.residual_scale == spec.logit_scale == 1
    assert spec.layers[1].attention.rope.style is RopeStyle.NORM


def test_qwen3moe(tmp_path):
    """Experts in place of the feed-forward, and otherwise Qwen 3."""
    spec = spec_of(tmp_path, "qwen3moe")
    assert classes(spec) == [TOKEN, TOKEN]
    assert spec.layers[0].attention.qk_norm
    experts = spec.layers[0].feed_forward
    assert isinstance(experts, ExpertsSpec)
    assert (experts.num_experts, experts.num_used, experts.shared) == (4, 2, None)


@pytest.mark.parametrize(
    "keys",
    [
        {"attention__recurrent_layers": np.array([True, False])},
        {"attention__recurrent_layers": np.array([True, False]), "full_attention_interval": 9},
    ],
)
def test_a_file_may_list_its_recurrent_layers(tmp_path, keys):
    """The list wins over the interval."""
    assert classes(spec_of(tmp_path, "qwen35", **keys)) == [POINT, TOKEN]


def test_the_interval_has_a_default(tmp_path):
    """Every fourth layer is full: of two, none is."""
    with pytest.raises(ModelFileError, match=r"blk\.1\.attn_qkv\.weight is missing"):
        spec_of(tmp_path, "qwen35", full_attention_interval=None)


def test_a_hybrid_cut_to_attention_needs_no_recurrent_sizes(tmp_path):
    """What nobody would use is not asked for."""
    tensors = [item for item in hybrid_tensors("lfm2") if "blk.0" not in item.name]
    moved = [Tensor(item.name.replace("blk.1", "blk.0"), item.dims, item.kind, item.data)
             for item in tensors]  # fmt: skip
    keys = {"block_count": 1, "attention__head_count_kv": 1, "shortconv__l_cache": None}
    assert classes(spec_of(tmp_path, "lfm2", moved, **keys)) == [TOKEN]


@pytest.mark.parametrize("architecture", LAYERS)
def test_every_tensor_is_needed(tmp_path, architecture):
    """Without any one of its tensors a model is refused, and that tensor is named."""
    tensors = hybrid_tensors(architecture)
    for left_out in tensors:
        rest = [item for item in tensors if item is not left_out]
        with pytest.raises(ModelFileError) as caught:
            spec_of(tmp_path, architecture, rest)
        text = "layer 1" if left_out.name == "blk.1.attn_norm.weight" else left_out.name
        assert text in str(caught.value)
        assert "missing" in str(caught.value)


@pytest.mark.parametrize("architecture", LAYERS)
def test_every_shape_is_checked(tmp_path, architecture):
    """A tensor that is one row or value longer is refused."""
    tensors = hybrid_tensors(architecture)
    for i, item in enumerate(tensors):
        shape = (item.dims[-1] + 1, *reversed(item.dims[:-1]))
        changed = [*tensors[:i], tensor(item.name, np.zeros(shape)), *tensors[i + 1 :]]
        with pytest.raises(ModelFileError, match=r"has shape|has 5 tokens but 6 embeddings"):
            spec_of(tmp_path, architecture, changed)


def test_a_gate_of_the_shared_expert_must_be_there(tmp_path):
    """Without it the model would be another."""
    tensors = without(hybrid_tensors("qwen3next"), "inp_shexp")
    with pytest.raises(ModelFileError, match=r"ffn_gate_inp_shexp\.weight is missing"):
        spec_of(tmp_path, "qwen3next", tensors)


NONE = np.array([0, 0], np.int32)


@pytest.mark.parametrize(
    ("architecture", "keys", "problem"),
    [
        ("qwen35", {"ssm__state_size": None}, "ssm.state_size is missing"),
        ("qwen35", {"ssm__state_size": 0}, "ssm.state_size is outside"),
        ("qwen35", {"ssm__state_size": 1 << 30}, "ssm.state_size is outside"),
        ("qwen35", {"ssm__group_count": scalar("i", -1)}, "ssm.group_count is outside"),
        ("qwen35", {"ssm__group_count": 3}, "2 heads cannot share 3 groups"),
        ("qwen35", {"ssm__time_step_rank": 3}, "3 heads do not divide 8"),
        ("qwen35", {"ssm__inner_size": 1.5}, "ssm.inner_size is not a whole number"),
        ("qwen35", {"ssm__conv_kernel": 1}, "ssm.conv_kernel is outside 2 to 64"),
        ("qwen35", {"ssm__conv_kernel": 65}, "ssm.conv_kernel is outside 2 to 64"),
        ("qwen35", {"full_attention_interval": "x"}, "full_attention_interval is not a whole"),
        ("qwen35", {"attention__recurrent_layers": np.array([True])}, "each of 2 layers"),
        ("qwen35", {"attention__value_length": 2}, "gates of 4 values do not fit heads of 2"),
        ("qwen35", {"expert_count": 4}, "qwen35 with experts is not supported"),
        ("qwen35", {"attention__head_count": 0}, "0 heads cannot share 1"),
        ("qwen35", {"attention__head_count_kv": 0}, "2 heads cannot share 0"),
        ("lfm2", {"shortconv__l_cache": 0}, "shortconv.l_cache is outside"),
        ("lfm2", {"shortconv__l_cache": None}, "shortconv.l_cache is missing"),
        ("lfm2", {"attention__head_count_kv": NONE}, r"blk\.1\.shortconv"),
        ("lfm2", {"attention__head_count_kv": np.array([0])}, "each of 2 layers"),
        ("mamba2", {"ssm__time_step_rank": 1 << 20}, "ssm.time_step_rank is outside"),
        ("mamba2", {"ssm__group_count": 2}, "has shape"),
        ("mamba2", {"feed_forward_length": 12}, r"blk\.0\.ffn_norm\.weight is missing"),
        ("granitehybrid", {"rope__scaling__finetuned": 1}, "neither true nor false"),
        ("granitehybrid", {"residual_scale": -1.0}, "residual_scale is outside"),
        ("granitehybrid", {"logit_scale": scalar("d", 1e-300)}, "logit_scale is outside"),
        ("granitehybrid", {"embedding_scale": float("nan")}, "embedding_scale is outside"),
        ("granitehybrid", {"expert_used_count": 5}, "expert_used_count is outside 1 to 4"),
        ("granitehybrid", {"expert_used_count": None}, "expert_used_count is missing"),
        ("qwen3moe", {"expert_count": 1 << 20}, "expert_count is outside"),
        ("qwen3moe", {"expert_feed_forward_length": 0}, "expert_feed_forward_length is outside"),
        ("qwen3moe", {"expert_gating_func": 2}, "another expert_gating_func than 1"),
        ("qwen3moe", {"expert_group_count": 4}, "another expert_group_count than 1"),
        ("qwen3moe", {"leading_dense_block_count": 1}, "another leading_dense_block_count than 0"),
    ],
)
def test_numbers_that_make_no_model(tmp_path, architecture, keys, problem):
    """Each bad value gives one line that names what is wrong."""
    with pytest.raises(ModelFileError, match=problem):
        spec_of(tmp_path, architecture, **keys)


@pytest.mark.parametrize(
    "name", ["qwen35", "qwen3next", "lfm2", "mamba2", "granitehybrid", "qwen3moe", "llama-moe"]
)
def test_tiny_models(shared, name):
    """The shared tiny models are read, and hold exactly the tensors that their spec needs."""
    with open_gguf(shared / "tiny" / "models" / f"{name}.gguf") as file:
        assert set(needed_tensors(read_spec(file))) == set(file.tensors)


@pytest.mark.parametrize("architecture", LAYERS)
def test_adapters_change_matrices_only(tmp_path, architecture):
    """Not convolutions, decays or norms, though some have two axes, and no single experts."""
    shapes = adaptable(spec_of(tmp_path, architecture))
    kinds = {name.split(".", 2)[-1].removesuffix(".weight") for name in shapes}
    assert not kinds & {"ssm_conv1d", "ssm_a", "ssm_d", "ssm_norm", "shortconv.conv"}
    assert not any("exps" in kind for kind in kinds)
    mixers = {
        "qwen35": {"attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta", "ssm_out", "attn_q"},
        "qwen3next": {"attn_qkv", "attn_gate", "ssm_ba", "ssm_out", "ffn_gate_inp"},
        "lfm2": {"shortconv.in_proj", "shortconv.out_proj", "attn_output"},
        "mamba2": {"ssm_in", "ssm_out"},
        "granitehybrid": {"ssm_in", "ssm_out", "attn_q", "ffn_up_shexp"},
        "qwen3moe": {"attn_q", "ffn_gate_inp"},
    }
    assert mixers[architecture] <= kinds
