"""config.json of a Hugging Face folder as the metadata that a GGUF file of the same model has.

So one reader (``architectures``) makes the ``ModelSpec`` of either. Names and defaults are those of
``transformers``; those on the other side are llama.cpp's. What would change the result and is not
known here is refused by name.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np

from kvtrio.model.errors import ModelFileError, safe_name
from kvtrio.model.folder_config import (
    ATTENTION_LAYERS,
    FULL,
    SLIDING,
    Config,
    FolderModel,
    Values,
    query_scale,
    rope_of,
    sizes_of,
)
from kvtrio.model.folder_kinds_more import MORE_KINDS
from kvtrio.model.folder_ropes import common
from kvtrio.model.safetensors_file import parse_json

MAX_MULTIPLIER = 1e3
_OUTSIDE_TEXT = ("quantization_config", "tie_word_embeddings")
"""What may stand beside text_config, of a model that is more than text."""


def read_config(raw: bytes) -> FolderModel:
    """Raises ModelFileError."""
    try:
        data = parse_json(raw, infinite=True)
    except ValueError:
        data = None
    if not isinstance(data, dict):
        raise ModelFileError("config.json is damaged")
    config = Config(data)
    if isinstance(data.get("text_config"), dict):
        outer = {key: data[key] for key in _OUTSIDE_TEXT if key in data}
        config = Config({**outer, **data["text_config"]})
    kind = config.text("model_type", "")
    if config.has("quantization_config"):
        method = config.part("quantization_config").text("quant_method", "")
        if (kind, method) != ("gpt_oss", "mxfp4"):
            raise ModelFileError(
                "config.json: weights that are quantised already are not supported, but for "
                "gpt_oss in mxfp4"
            )
    if kind not in KINDS:
        raise ModelFileError(
            f"model_type {safe_name(kind)} is not supported; {len(KINDS)} are: "
            "the README lists them"
        )
    architecture, read = KINDS[kind]
    return FolderModel(architecture=architecture, kind=kind, config=config, values=read(config))


def _within_window(config: Config, values: Values) -> Values:
    """Where every layer has a window, a context no longer than that: then it limits nothing."""
    if config.has("sliding_window") and config.flag("use_sliding_window", True):
        context, window = values["context_length"], config.whole("sliding_window")
        assert isinstance(context, int)
        values["context_length"] = min(context, window)
    return values


# --- one by one ---


def _llama(config: Config) -> Values:
    return _within_window(config, common(config))


def _qwen(config: Config) -> Values:
    values = common(config)
    if config.flag("use_sliding_window", False):
        raise ModelFileError("config.json: use_sliding_window is not supported")
    return values


def _mixtral(config: Config) -> Values:
    return {
        **_llama(config),
        "expert_count": config.whole("num_local_experts"),
        "expert_used_count": config.whole("num_experts_per_tok"),
    }


def _experts(config: Config) -> Values:
    """Those of Qwen: their weights add up to one."""
    config.must_be("norm_topk_prob", True)
    config.must_be("decoder_sparse_step", 1)
    if config.data.get("mlp_only_layers"):
        raise ModelFileError("config.json: mlp_only_layers is not supported")
    key = "num_experts" if config.has("num_experts") else "num_local_experts"
    values: Values = {
        "expert_count": config.whole(key),
        "expert_used_count": config.whole("num_experts_per_tok"),
        "expert_feed_forward_length": config.whole("moe_intermediate_size"),
    }
    if config.has("shared_expert_intermediate_size"):
        shared = config.whole("shared_expert_intermediate_size")
        values["expert_shared_feed_forward_length"] = shared
    return values


def _qwen3_moe(config: Config) -> Values:
    return {**_qwen(config), **_experts(config)}


def _gemma3(config: Config) -> Values:
    config.must_be("hidden_activation", "gelu_pytorch_tanh")
    config.must_be("use_bidirectional_attention", False)
    rope = rope_of(config)
    full, local = rope.part(FULL) if rope.has(FULL) else rope, rope.part(SLIDING)
    plain = {key: value for key, value in config.data.items() if key != "hidden_act"}
    plain["rope_parameters"] = {"rope_theta": config.data.get("rope_theta", 1e6), **full.data}
    values = common(Config(plain))
    num_layers = config.whole("num_hidden_layers")
    period = config.whole("sliding_window_pattern", config.whole("_sliding_window_pattern", 6))
    if period < 1:
        raise ModelFileError("config.json: sliding_window_pattern is not above zero")
    types = [FULL if (i + 1) % period == 0 else SLIDING for i in range(num_layers)]
    if config.has("layer_types"):
        types = config.layer_types(num_layers)
    return {
        **values,
        "attention.sliding_window": config.whole("sliding_window"),
        "attention.sliding_window_pattern": np.array([kind == SLIDING for kind in types]),
        "rope.freq_base_swa": local.number(
            "rope_theta", config.number("rope_local_base_freq", 10000.0)
        ),
        "attention.scale": query_scale(config),
        "final_logit_softcapping": config.number("final_logit_softcapping", 0.0),
    }


def _delta_net(config: Config) -> Values:
    values = common(config)
    num_values, value_dim = (
        config.whole("linear_num_value_heads"),
        config.whole("linear_value_head_dim"),
    )
    types = config.layer_types(config.whole("num_hidden_layers"))
    return {
        **values,
        "ssm.state_size": config.whole("linear_key_head_dim"),
        "ssm.group_count": config.whole("linear_num_key_heads"),
        "ssm.time_step_rank": num_values,
        "ssm.inner_size": num_values * value_dim,
        "ssm.conv_kernel": config.whole("linear_conv_kernel_dim", 4),
        "attention.recurrent_layers": np.array([kind != FULL for kind in types]),
    }


def _qwen3_next(config: Config) -> Values:
    return {**_delta_net(config), **_experts(config)}


def _lfm2(config: Config) -> Values:
    plain = Config({**config.data, "rms_norm_eps": config.number("norm_eps", 1e-5)})
    values = common(plain)
    config.must_be("conv_bias", False)
    size = config.whole("intermediate_size")
    if config.flag("block_auto_adjust_ff_dim", True):
        factor = config.number("block_ffn_dim_multiplier", 1.0)
        if not 0.0 < factor <= MAX_MULTIPLIER:
            raise ModelFileError("config.json: block_ffn_dim_multiplier is out of range")
        size = int(factor * int(2 * size / 3))
        multiple = config.whole("block_multiple_of", 256)
        if multiple < 1:
            raise ModelFileError("config.json: block_multiple_of is not above zero")
        size = -(-size // multiple) * multiple
    return {
        **values,
        "feed_forward_length": size,
        "shortconv.l_cache": config.whole("conv_L_cache", 3),
        "attention.head_count_kv": _kv_heads(config),
    }


def _kv_heads(config: Config) -> np.ndarray:
    """Per layer; 0 where there is no attention."""
    types = config.layer_types(config.whole("num_hidden_layers"))
    heads = config.whole("num_key_value_heads", config.whole("num_attention_heads"))
    if not 0 <= heads < 1 << 31:
        raise ModelFileError("config.json: num_key_value_heads is out of range")
    return np.array([heads if kind in ATTENTION_LAYERS else 0 for kind in types], np.int32)


def _check_steps(config: Config) -> None:
    """Steps of state spaces are not held within limits here."""
    value = config.data.get("time_step_limit")
    endless = (math.inf, {"__float__": "Infinity"})
    if value is not None and not (
        isinstance(value, list) and len(value) == 2 and value[0] == 0 and value[1] in endless
    ):
        raise ModelFileError("config.json: a time_step_limit is not supported")


def _mamba2(config: Config) -> Values:
    _check_steps(config)
    config.must_be("use_bias", False)
    config.must_be("use_conv_bias", True)
    return {
        **sizes_of(config),
        "context_length": config.whole("max_position_embeddings", 1 << 20),
        "feed_forward_length": 0,
        "attention.layer_norm_rms_epsilon": config.number("layer_norm_epsilon", 1e-5),
        "ssm.conv_kernel": config.whole("conv_kernel", 4),
        "ssm.inner_size": config.whole("num_heads") * config.whole("head_dim"),
        "ssm.state_size": config.whole("state_size"),
        "ssm.time_step_rank": config.whole("num_heads"),
        "ssm.group_count": config.whole("n_groups", 1),
    }


def _granite_hybrid(config: Config) -> Values:
    _check_steps(config)
    config.must_be("mamba_proj_bias", False)
    config.must_be("mamba_conv_bias", True)
    values = common(config)
    num_heads, head_dim = config.whole("mamba_n_heads"), config.whole("mamba_d_head")
    has_rope = config.text("position_embedding_type", "nope") == "rope"
    if config.whole("num_local_experts", 0):
        values["expert_count"] = config.whole("num_local_experts")
        values["expert_used_count"] = config.whole("num_experts_per_tok")
        shared = config.whole("shared_intermediate_size")
        values["expert_shared_feed_forward_length"] = shared
    else:
        values["feed_forward_length"] = config.whole("shared_intermediate_size")
    return {
        **values,
        "attention.head_count_kv": _kv_heads(config),
        "rope.scaling.finetuned": has_rope,
        "ssm.conv_kernel": config.whole("mamba_d_conv", 4),
        "ssm.inner_size": num_heads * head_dim,
        "ssm.state_size": config.whole("mamba_d_state"),
        "ssm.time_step_rank": num_heads,
        "ssm.group_count": config.whole("mamba_n_groups", 1),
        "embedding_scale": config.number("embedding_multiplier", 1.0),
        "residual_scale": config.number("residual_multiplier", 1.0),
        "logit_scale": config.number("logits_scaling", 1.0),
        "attention.scale": config.number("attention_multiplier", 1.0),
    }


KINDS: Mapping[str, tuple[str, Callable[[Config], Values]]] = {
    "llama": ("llama", _llama),
    "mistral": ("llama", _llama),
    "mixtral": ("llama", _mixtral),
    "qwen2": ("qwen2", _qwen),
    "qwen3": ("qwen3", _qwen),
    "qwen3_moe": ("qwen3moe", _qwen3_moe),
    "gemma3_text": ("gemma3", _gemma3),
    "lfm2": ("lfm2", _lfm2),
    "mamba2": ("mamba2", _mamba2),
    "granitemoehybrid": ("granitehybrid", _granite_hybrid),
    "qwen3_next": ("qwen3next", _qwen3_next),
    "qwen3_5_text": ("qwen35", _delta_net),
    **MORE_KINDS,
}
"""model_type: our architecture, and how its numbers are read."""
