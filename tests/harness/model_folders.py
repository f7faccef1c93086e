"""Small random models in Hugging Face folders, made by the library that defines the format."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

VOCAB = 96
BASE: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ATTENTION: Mapping[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
QWEN_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
DELTA_NET = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
SCORED_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
LATENT = {
    **SCORED_EXPERTS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SHORT = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 8.0, 16.0],
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 2048,
}
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("Llama", {**ATTENTION, "rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {**ATTENTION, "sliding_window": None, "tie_word_embeddings": True}),
    "mixtral": ("Mixtral", {**ATTENTION, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2", {**ATTENTION}),
    "qwen3": ("Qwen3", {**ATTENTION, "head_dim": 32}),
    "qwen3_moe": (
        "Qwen3Moe",
        {**ATTENTION, **QWEN_EXPERTS, "head_dim": 32, "moe_intermediate_size": 48},
    ),
    "gemma3_text": (
        "Gemma3Text",
        {
            **ATTENTION,
            "head_dim": 32,
            "sliding_window": 64,
            "query_pre_attn_scalar": 32,
            "num_hidden_layers": 8,
        },
    ),
    "lfm2": (
        "Lfm2",
        {**ATTENTION, "layer_types": ["conv", "conv", "full_attention", "conv"], "conv_L_cache": 3},
    ),
    "mamba2": (
        "Mamba2",
        {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 32},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            **ATTENTION,
            "layer_types": ["mamba", "attention", "mamba", "mamba"],
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.0,
            "position_embedding_type": "nope",
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        {
            **ATTENTION,
            **DELTA_NET,
            **QWEN_EXPERTS,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
        },
    ),
    "qwen3_5_text": ("Qwen3_5Text", {**ATTENTION, **DELTA_NET}),
    "phi3": (
        "Phi3",
        {
            **ATTENTION,
            "rope_parameters": SHORT | {"original_max_position_embeddings": 64},
            "original_max_position_embeddings": 64,
        },
    ),
    "phi3-short": (
        "Phi3",
        {
            **ATTENTION,
            "rope_parameters": SHORT,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 2048,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            **ATTENTION,
            "head_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 4,
            "sliding_window": 32,
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {**ATTENTION, **SCORED_EXPERTS, "head_dim": 16, "attention_bias": True},
    ),
    "glm4_moe-norms": ("Glm4Moe", {**ATTENTION, **SCORED_EXPERTS, "use_qk_norm": True}),
    "deepseek_v2": (
        "DeepseekV2",
        {
            **LATENT,
            "q_lora_rank": None,
            "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {**LATENT, "q_lora_rank": 48, "n_group": 4, "topk_group": 2, "rope_parameters": YARN},
    ),
    "gemma2": (
        "Gemma2",
        {**ATTENTION, "head_dim": 32, "sliding_window": 64, "query_pre_attn_scalar": 24},
    ),
    "olmo2": ("Olmo2", {**ATTENTION}),
    "granite": (
        "Granite",
        {
            **ATTENTION,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.0,
        },
    ),
    "granitemoe": (
        "GraniteMoe",
        {**ATTENTION, "num_local_experts": 8, "attention_multiplier": 0.2},
    ),
    "glm4": ("Glm4", {**ATTENTION, "head_dim": 16}),
    "starcoder2": ("Starcoder2", {**ATTENTION}),
    "cohere": ("Cohere", {**ATTENTION, "logit_scale": 0.25}),
    "cohere2": ("Cohere2", {**ATTENTION, "logit_scale": 0.25, "sliding_window": 64}),
    "ministral3": (
        "Ministral3",
        {
            **ATTENTION,
            "head_dim": 16,
            "rope_parameters": {
                **YARN,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
                "rope_theta": 10000.0,
            },
        },
    ),
}
"""model_type, and what is special about it, to the name before ``Config``, and its sizes."""


def make_folder(folder: Path, kind: str, **saving: Any) -> Any:
    """Write a model with a tokenizer; returns it, in float32. ``saving``: for save_pretrained."""
    transformers = library()
    name, sizes = MODELS[kind]
    config = getattr(transformers, f"{name}Config")(**{**BASE, **sizes})
    torch.manual_seed(sum(map(ord, kind)))
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for own, value in model.named_parameters():
            _fill(own, value)
    model.save_pretrained(folder, **saving)
    write_tokenizer(folder)
    return model


def _fill(name: str, value: torch.Tensor) -> None:
    """Values that keep activations near one and attention far from uniform."""
    if "A_log" in name:
        value.uniform_(0.0, 1.5)
    elif value.dim() > 1:
        value.normal_(0.0, 0.15)
    elif "norm" in name:
        value.add_(0.2 * torch.randn_like(value))
    else:
        value.normal_(0.0, 0.4)


@cache
def library() -> Any:
    """``transformers``, quiet."""
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return transformers


def write_tokenizer(folder: Path) -> None:
    """Byte-level, of the first ``VOCAB`` tokens that a few words give, with a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = [chr(code) for code in range(43, 43 + 80)]
    vocab = {text: number for number, text in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    merges = [("t", "h"), ("th", "e"), ("a", "n")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(each, special=True) for each in ("<pad>", "<s>", "</s>")])
    made.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "{{ 1 }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
