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
}
"""model_type to the name before ``Config``, and its sizes."""


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
