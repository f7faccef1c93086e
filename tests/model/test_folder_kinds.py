"""config.json of more kinds of model: what becomes of its numbers, and what is refused."""

import json
import math
from collections.abc import Mapping
from typing import Any

import pytest

from harness.model_folders import ATTENTION, BASE, LATENT, SCORED_EXPERTS, SHORT, YARN
from kvtrio.model.errors import ModelFileError
from kvtrio.model.folder_config import FolderModel
from kvtrio.model.folder_kinds import read_config
from kvtrio.model.folder_ropes import made_factors

KINDS: Mapping[str, Mapping[str, Any]] = {
    "llama": ATTENTION,
    "gemma2": ATTENTION | {"sliding_window": 64},
    "phi3": ATTENTION | {"rope_parameters": SHORT},
    "gpt_oss": ATTENTION | {"num_local_experts": 8, "num_experts_per_tok": 4, "sliding_window": 32},
    "glm4_moe": ATTENTION | SCORED_EXPERTS,
    "deepseek_v2": LATENT | {"rope_parameters": YARN},
    "deepseek_v3": LATENT | {"q_lora_rank": 48},
    "starcoder2": ATTENTION | {"hidden_act": "gelu_pytorch_tanh"},
    "cohere": ATTENTION,
    "ministral3": ATTENTION | {"rope_parameters": YARN},
    "lfm2": ATTENTION | {"layer_types": ["conv"] * 4},
}


def read(kind: str, **changes: Any) -> FolderModel:
    data = {**BASE, **KINDS[kind], "model_type": kind, **changes}
    return read_config(json.dumps(data).encode())


@pytest.mark.parametrize("kind", KINDS)
def test_plain_configs_are_read(kind):
    """So that what the next test refuses is refused for its one change."""
    assert read(kind).values["block_count"] == 4


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        ("gemma2", {"hidden_activation": "relu"}, "another hidden_activation"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is not above zero"),
        ("gemma2", {"sliding_window": None}, "sliding_window is not a whole number"),
        ("phi3", {"rope_parameters": SHORT | {"rope_type": "yarnish"}}, "yarnish is not supported"),
        ("phi3", {"rope_parameters": SHORT | {"partial_rotary_factor": 1e308}}, "outside 0 to 1"),
        ("gpt_oss", {"attention_bias": False}, "another attention_bias than True"),
        ("gpt_oss", {"swiglu_limit": 6.0}, "another swiglu_limit than 7.0"),
        ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, "quantised already"),
        ("glm4_moe", {"n_routed_experts": "8"}, "n_routed_experts is not a whole number"),
        ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "another topk_method"),
        ("deepseek_v2", {"norm_topk_prob": True}, "another norm_topk_prob than False"),
        ("deepseek_v3", {"rope_interleave": False}, "another rope_interleave than True"),
        ("deepseek_v3", {"attention_bias": True}, "another attention_bias than False"),
        ("starcoder2", {"use_bias": False}, "another use_bias than True"),
        ("starcoder2", {"hidden_act": "relu"}, "hidden_act is not gelu_pytorch_tanh"),
        ("cohere", {"use_qk_norm": True}, "another use_qk_norm than False"),
        ("ministral3", {"sliding_window": 64}, "another sliding_window than None"),
        ("ministral3", {"rope_parameters": YARN | {"factor": 0.5}}, "impossible rope parameters"),
        ("llama", {"rope_parameters": SHORT}, "rope scaling longrope is not supported"),
        ("lfm2", {"block_ffn_dim_multiplier": 1e308}, "block_ffn_dim_multiplier is out of range"),
    ],
)
def test_what_nobody_computes_is_refused(kind, changes, says):
    """By its own name, in one line."""
    with pytest.raises(ModelFileError, match=says) as caught:
        read(kind, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("factors", [None, [1.0] * 5, ["x"] * 6, 3, [True] * 6])
def test_factors_are_one_number_for_each_pair(factors):
    """Twelve values are rotated here."""
    with pytest.raises(ModelFileError, match="short_factor is not one number for each rotated"):
        made_factors(read("phi3", rope_parameters=SHORT | {"short_factor": factors}))


def test_magnitudes_of_longrope_and_yarn():
    """Theirs, over what a GGUF reader multiplies by in any case."""
    key, growth = "rope.scaling.attn_factor", 0.1 * math.log(4) + 1
    phi3 = read("phi3", max_position_embeddings=8192)
    assert phi3.values[key] == pytest.approx(math.sqrt(1 + math.log(4) / math.log(2048)))
    assert read("ministral3").values[key] == pytest.approx(1.0)
    both = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}
    assert read("ministral3", rope_parameters=both).values[key] == pytest.approx(1 / growth)
    assert read("deepseek_v2").values[key] == pytest.approx(growth)
    assert read("deepseek_v2", rope_parameters=both).values[key] == pytest.approx(1.0)
