"""More kinds of model from config.json: see ``folder_kinds``.

Dense models with norms, scales or shapes of their own; experts as in gpt-oss and DeepSeek.
"""

from collections.abc import Callable, Mapping

import numpy as np

from kvtrio.model.errors import ModelFileError
from kvtrio.model.folder_config import (
    SLIDING,
    Config,
    Values,
    attending,
    query_scale,
    rope_of,
    sizes_of,
)
from kvtrio.model.folder_ropes import common, rope_values

SOFTMAX, SIGMOID = 1, 2
"""As in expert_gating_func."""


def _changed(config: Config, **values: object) -> Config:
    return Config({**config.data, **values})


def _windows(config: Config, num_layers: int) -> Values:
    """Every second layer, beginning with the first, unless ``layer_types`` says otherwise."""
    is_sliding = [i % 2 == 0 for i in range(num_layers)]
    if config.has("layer_types"):
        is_sliding = [kind == SLIDING for kind in config.layer_types(num_layers)]
    return {
        "attention.sliding_window": config.whole("sliding_window"),
        "attention.sliding_window_pattern": np.array(is_sliding),
    }


def _gemma2(config: Config) -> Values:
    config.must_be("hidden_activation", "gelu_pytorch_tanh")
    config.must_be("use_bidirectional_attention", False)
    return {
        **common(_changed(config, hidden_act="silu")),
        **_windows(config, config.whole("num_hidden_layers")),
        "attention.scale": query_scale(config),
        "attn_logit_softcapping": config.number("attn_logit_softcapping", 0.0),
        "final_logit_softcapping": config.number("final_logit_softcapping", 0.0),
    }


def _phi3(config: Config) -> Values:
    values = common(config)
    window, context = config.data.get("sliding_window"), values["context_length"]
    if window is not None:
        # Within its window a layer with one is a layer without.
        assert isinstance(context, int)
        values["context_length"] = min(context, config.whole("sliding_window"))
    return values


def _granite(config: Config) -> Values:
    config.must_be("mlp_bias", False)
    values: Values = {
        **common(config),
        "embedding_scale": config.number("embedding_multiplier", 1.0),
        "residual_scale": config.number("residual_multiplier", 1.0),
        "logit_scale": config.number("logits_scaling", 1.0),
        "attention.scale": config.number("attention_multiplier", 1.0),
    }
    if config.has("num_local_experts"):
        values["expert_count"] = config.whole("num_local_experts")
        values["expert_used_count"] = config.whole("num_experts_per_tok")
    return values


def _glm4(config: Config) -> Values:
    values = attending(config)
    return values | rope_values(config, _head_dim(values), share=0.5)


def _head_dim(values: Values) -> int:
    head_dim = values["attention.key_length"]
    assert isinstance(head_dim, int)
    return head_dim


def _starcoder2(config: Config) -> Values:
    config.must_be("use_bias", True)
    if config.has("sliding_window"):
        context = config.whole("max_position_embeddings")
        size = min(context, config.whole("sliding_window"))
        config = _changed(config, max_position_embeddings=size)
    if config.text("hidden_act", "") != "gelu_pytorch_tanh":
        raise ModelFileError("config.json: hidden_act is not gelu_pytorch_tanh, and unsupported")
    values = common(_changed(config, hidden_act="silu"))
    return {**values, "attention.layer_norm_epsilon": config.number("norm_epsilon", 1e-5)}


def _cohere(config: Config) -> Values:
    config.must_be("use_qk_norm", False)
    return {
        **common(config),
        "attention.layer_norm_epsilon": config.number("layer_norm_eps", 1e-5),
        "logit_scale": config.number("logit_scale", 0.0625),
    }


def _gpt_oss(config: Config) -> Values:
    config.must_be("attention_bias", True)
    config.must_be("swiglu_alpha", 1.702)
    config.must_be("swiglu_limit", 7.0)
    return {
        **common(config),
        **_windows(config, config.whole("num_hidden_layers")),
        "expert_count": config.whole("num_local_experts"),
        "expert_used_count": config.whole("num_experts_per_tok"),
    }


def _scored_experts(config: Config, gating: int) -> Values:
    """As DeepSeek 3 has them."""
    return {
        "expert_count": config.whole("n_routed_experts"),
        "expert_used_count": config.whole("num_experts_per_tok"),
        "expert_shared_count": config.whole("n_shared_experts", 0),
        "expert_feed_forward_length": config.whole("moe_intermediate_size"),
        "leading_dense_block_count": config.whole("first_k_dense_replace", 0),
        "expert_gating_func": gating,
        "expert_weights_scale": config.number("routed_scaling_factor", 1.0),
        "expert_group_count": config.whole("n_group", 1),
        "expert_group_used_count": config.whole("topk_group", 1),
    }


def _glm4_moe(config: Config) -> Values:
    values = attending(config)
    return {
        **values,
        **rope_values(config, _head_dim(values), share=0.5),
        **_scored_experts(config, SIGMOID),
        "expert_weights_norm": config.flag("norm_topk_prob", True),
    }


def _latent(config: Config) -> Values:
    config.must_be("hidden_act", "silu")
    config.must_be("attention_bias", False)
    config.must_be("rope_interleave", True)
    rope_dim, latent = config.whole("qk_rope_head_dim"), config.whole("kv_lora_rank")
    values: Values = {
        **sizes_of(config),
        **rope_values(config, rope_dim, grows=False),
        "attention.layer_norm_rms_epsilon": config.number("rms_norm_eps", 1e-6),
        "attention.head_count": config.whole("num_attention_heads"),
        "attention.head_count_kv": 1,
        "attention.key_length": latent + rope_dim,
        "attention.value_length": latent,
        "attention.key_length_mla": config.whole("qk_nope_head_dim") + rope_dim,
        "attention.value_length_mla": config.whole("v_head_dim"),
        "attention.kv_lora_rank": latent,
        "rope.scaling.yarn_log_multiplier": 0.1 * rope_of(config).number("mscale_all_dim", 0.0),
    }
    if config.has("q_lora_rank"):
        values["attention.q_lora_rank"] = config.whole("q_lora_rank")
    return values


def _deepseek_v2(config: Config) -> Values:
    config.must_be("topk_method", "greedy")
    config.must_be("norm_topk_prob", False)
    plain = _changed(config, n_group=1, topk_group=1)
    return {**_latent(config), **_scored_experts(plain, SOFTMAX), "expert_weights_norm": False}


def _deepseek_v3(config: Config) -> Values:
    normalised = config.flag("norm_topk_prob", True)
    return {
        **_latent(config),
        **_scored_experts(config, SIGMOID),
        "expert_weights_norm": normalised,
    }


def _cohere2(config: Config) -> Values:
    num_layers = config.whole("num_hidden_layers")
    is_sliding = [kind == SLIDING for kind in config.layer_types(num_layers)]
    return {
        **_cohere(config),
        "attention.sliding_window": config.whole("sliding_window"),
        "attention.sliding_window_pattern": np.array(is_sliding),
    }


def _ministral3(config: Config) -> Values:
    config.must_be("sliding_window", None)
    beta = rope_of(config).number("llama_4_scaling_beta", 0.0)
    return {**common(config), "attention.temperature_scale": beta}


MORE_KINDS: Mapping[str, tuple[str, Callable[[Config], Values]]] = {
    "gemma2": ("gemma2", _gemma2),
    "phi3": ("phi3", _phi3),
    "olmo2": ("olmo2", common),
    "granite": ("granite", _granite),
    "granitemoe": ("granitemoe", _granite),
    "glm4": ("glm4", _glm4),
    "starcoder2": ("starcoder2", _starcoder2),
    "cohere": ("command-r", _cohere),
    "cohere2": ("cohere2", _cohere2),
    "ministral3": ("mistral3", _ministral3),
    "gpt_oss": ("gpt-oss", _gpt_oss),
    "glm4_moe": ("glm4moe", _glm4_moe),
    "deepseek_v2": ("deepseek2", _deepseek_v2),
    "deepseek_v3": ("deepseek2", _deepseek_v3),
}
