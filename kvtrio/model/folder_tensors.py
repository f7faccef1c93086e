"""Tensors of a Hugging Face folder under the names and in the arrangement of a GGUF file.

1. A recipe says which stored tensors make one of ours. What only moves values keeps their type;
   what changes them, and what is no matrix, becomes float32, as in converted files.
2. Each stored tensor has a rule or is refused by name: one that nobody reads would mean that the
   model computes something else than we would.

The rules are facts from llama.cpp's convert_hf_to_gguf.py and transformers' modelling files.
"""

import re
from collections.abc import Mapping

from attrs import evolve

from kvtrio.model.errors import ModelFileError, safe_name
from kvtrio.model.families import FAMILIES
from kvtrio.model.folder_config import FolderModel
from kvtrio.model.folder_delta_net import delta_net_rules
from kvtrio.model.folder_more import BLOCKS, SCALES, WITH_GUESSES, more_rules
from kvtrio.model.folder_moves import (
    AS_IS,
    CONV,
    ONE_MORE,
    STACKED,
    Recipe,
    Rule,
    Shape,
    decay,
    half,
    paired,
    plus_one,
    shaped,
)

MAX_EXPERTS = 4096
_LAYER = re.compile(r"layers\.(0|[1-9][0-9]{0,3})\.(.+)")
_EXPERT = re.compile(r"(.*experts\.)(0|[1-9][0-9]{0,3})(\..+)")
_PREFIXES = (
    "model.language_model.",
    "language_model.model.",
    "language_model.",
    "model.",
    "backbone.",
)


_GATED = ("gate", "up", "down")
_BLOCK: Mapping[str, str] = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    **{
        f"self_attn.{theirs}_proj.{end}": f"attn_{ours}.{end}"
        for theirs, ours in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "output"))
        for end in ("weight", "bias")
    },
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    **{f"mlp.{each}_proj.weight": f"ffn_{each}.weight" for each in _GATED},
}
_EXPERTS: Mapping[str, str] = {
    "mlp.gate.weight": "ffn_gate_inp.weight",
    **{f"mlp.experts.*.{n}_proj.weight": f"ffn_{n}_exps.weight" for n in ("gate", "up", "down")},
    **{
        f"mlp.shared_expert.{n}_proj.weight": f"ffn_{n}_shexp.weight"
        for n in ("gate", "up", "down")
    },
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    "block_sparse_moe.gate.weight": "ffn_gate_inp.weight",
    "block_sparse_moe.experts.*.w1.weight": "ffn_gate_exps.weight",
    "block_sparse_moe.experts.*.w2.weight": "ffn_down_exps.weight",
    "block_sparse_moe.experts.*.w3.weight": "ffn_up_exps.weight",
}
_LFM2: Mapping[str, str] = {
    "operator_norm.weight": "attn_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "self_attn.out_proj.weight": "attn_output.weight",
    "self_attn.q_layernorm.weight": "attn_q_norm.weight",
    "self_attn.k_layernorm.weight": "attn_k_norm.weight",
    "feed_forward.w1.weight": "ffn_gate.weight",
    "feed_forward.w2.weight": "ffn_down.weight",
    "feed_forward.w3.weight": "ffn_up.weight",
    "conv.in_proj.weight": "shortconv.in_proj.weight",
    "conv.out_proj.weight": "shortconv.out_proj.weight",
}
_OUTSIDE: Mapping[str, str] = {
    "embed_tokens.weight": "token_embd.weight",
    "embeddings.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "norm_f.weight": "output_norm.weight",
    "norm.bias": "output_norm.bias",
    "embedding_norm.weight": "token_embd_norm.weight",
    "lm_head.weight": "output.weight",
}


def _plain(names: Mapping[str, str]) -> dict[str, list[Rule]]:
    return {theirs: [(ours, AS_IS)] for theirs, ours in names.items()}


def recipes(model: FolderModel, stored: Mapping[str, tuple[int, ...]]) -> dict[str, Recipe]:
    """Our tensors by name, from the names and shapes of the stored ones.

    Raises ModelFileError for a tensor without a rule, and for gaps in a row of experts.
    """
    rules, found = _rules(model), dict[str, Recipe]()
    experts: dict[str, dict[int, str]] = {}
    is_tied = model.config.flag("tie_word_embeddings", _ties_by_default(model.kind))
    end = model.config.whole("num_hidden_layers")
    for name in stored:
        path = next((name[len(p) :] for p in _PREFIXES if name.startswith(p)), name)
        if path.startswith(("vision_tower.", "multi_modal_projector.", "visual.", "mtp.")):
            continue  # images, and guesses at several tokens: nothing of the text model
        if path.endswith("rotary_emb.inv_freq"):
            continue  # follows from config.json; old folders have it all the same
        layer = _LAYER.fullmatch(path)
        if layer is not None and int(layer[1]) >= end and model.kind in WITH_GUESSES:
            continue
        if layer is None:
            if path not in _OUTSIDE:
                raise _unknown(name)
            if path != "lm_head.weight" or not is_tied:
                found[_OUTSIDE[path]] = _outside(model, path, name)
            continue
        prefix, rest = f"blk.{layer[1]}.", layer[2]
        if expert := _EXPERT.fullmatch(rest):
            row = experts.setdefault(f"{prefix}{expert[1]}*{expert[3]}", {})
            row[int(expert[2])] = name
            rest = f"{expert[1]}*{expert[3]}"
        if rest not in rules:
            raise _unknown(name)
        for ours, recipe in rules[rest]:
            found[prefix + ours] = evolve(recipe, sources=_sources(recipe, name, stored))
    for path, row in experts.items():
        _stack(found, rules, path, row)
    if not is_tied and "output.weight" not in found:
        raise ModelFileError("tensor lm_head.weight is missing")
    return found


def _sources(recipe: Recipe, name: str, stored: Mapping[str, Shape]) -> tuple[str, ...]:
    """The tensor that a rule is for, and what goes with it."""
    if not recipe.is_mxfp4:
        return (name,)
    scales = name.removesuffix(BLOCKS) + SCALES
    if scales not in stored:
        raise ModelFileError(f"tensor {safe_name(scales)} is missing")
    return name, scales


def _ties_by_default(kind: str) -> bool:
    return kind in ("gemma2", "gemma3_text", "lfm2", "starcoder2", "cohere", "cohere2")


def _outside(model: FolderModel, path: str, name: str) -> Recipe:
    is_norm = path == "norm.weight"
    return Recipe((name,), None, plus_one if is_norm and model.kind in _ZERO_CENTRED else None)


def _stack(
    found: dict[str, Recipe], rules: Mapping[str, list[Rule]], path: str, row: dict[int, str]
) -> None:
    _, number, rest = path.split(".", 2)
    if sorted(row) != list(range(len(row))):
        raise ModelFileError(f"experts of layer {number} are missing")
    sources = tuple(row[i] for i in range(len(row)))
    for ours, _ in rules[rest]:
        found[f"blk.{number}.{ours}"] = Recipe(sources, STACKED)


def _unknown(name: str) -> ModelFileError:
    return ModelFileError(f"tensor {safe_name(name)} is not known for this kind of model")


# --- kinds that differ ---

_ZERO_CENTRED = ("gemma2", "gemma3_text", "qwen3_next", "qwen3_5_text")
"""Whose norms multiply by one more than what is stored."""


def _rules(model: FolderModel) -> dict[str, list[Rule]]:
    rules = _plain({**_BLOCK, **_EXPERTS})
    if FAMILIES[model.architecture].paired_rows:
        for side in ("q", "k"):
            num = _num_heads(model, side)
            for end in ("weight", "bias"):
                rule = (f"attn_{side}.{end}", Recipe((), paired(num)))
                rules[f"self_attn.{side}_proj.{end}"] = [rule]
    match model.kind:
        case "lfm2":
            rules |= _plain(_LFM2)
            rules["conv.conv.weight"] = [("shortconv.conv.weight", Recipe((), CONV))]
        case "mamba2":
            rules = _mamba2(model, "mixer.") | {"norm.weight": [("attn_norm.weight", AS_IS)]}
        case "granitemoehybrid":
            rules |= _mamba2(model, "mamba.") | _granite(model)
        case "qwen3_next" | "qwen3_5_text":
            rules |= delta_net_rules(model)
        case "gemma2" | "gemma3_text":
            rules |= _gemma3()
        case "granitemoe":
            rules |= _granite(model)
        case _:
            rules |= more_rules(model)
    if model.kind in _ZERO_CENTRED:
        _centre(rules)
    return rules


def _num_heads(model: FolderModel, side: str) -> int:
    heads = model.config.whole("num_attention_heads")
    return heads if side == "q" else model.config.whole("num_key_value_heads", heads)


def _centre(rules: dict[str, list[Rule]]) -> None:
    for theirs, ((ours, _), *rest) in list(rules.items()):
        if ours.endswith("norm.weight") and not ours.startswith("ssm_"):
            rules[theirs] = [(ours, ONE_MORE), *rest]


def _gemma3() -> dict[str, list[Rule]]:
    return _plain(
        {
            "post_attention_layernorm.weight": "post_attention_norm.weight",
            "pre_feedforward_layernorm.weight": "ffn_norm.weight",
            "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
        }
    )


def _mamba2(model: FolderModel, prefix: str) -> dict[str, list[Rule]]:
    heads, groups = model.values["ssm.time_step_rank"], model.values["ssm.group_count"]
    assert isinstance(heads, int)
    assert isinstance(groups, int)
    return {
        f"{prefix}in_proj.weight": [("ssm_in.weight", AS_IS)],
        f"{prefix}out_proj.weight": [("ssm_out.weight", AS_IS)],
        f"{prefix}conv1d.weight": [("ssm_conv1d.weight", Recipe((), CONV))],
        f"{prefix}conv1d.bias": [("ssm_conv1d.bias", AS_IS)],
        f"{prefix}dt_bias": [("ssm_dt.bias", AS_IS)],
        f"{prefix}A_log": [("ssm_a", Recipe((), shaped(heads, 1), decay))],
        f"{prefix}D": [("ssm_d", Recipe((), shaped(heads, 1)))],
        f"{prefix}norm.weight": [("ssm_norm.weight", Recipe((), shaped(groups, -1)))],
    }


def _granite(model: FolderModel) -> dict[str, list[Rule]]:
    ends = "_shexp" if model.values.get("expert_count") else ""
    return {
        "block_sparse_moe.router.layer.weight": [("ffn_gate_inp.weight", AS_IS)],
        "block_sparse_moe.input_linear.weight": [
            ("ffn_gate_exps.weight", Recipe((), half(0, 1))),
            ("ffn_up_exps.weight", Recipe((), half(1, 1))),
        ],
        "block_sparse_moe.output_linear.weight": [("ffn_down_exps.weight", AS_IS)],
        "shared_mlp.input_linear.weight": [
            (f"ffn_gate{ends}.weight", Recipe((), half(0, 0))),
            (f"ffn_up{ends}.weight", Recipe((), half(1, 0))),
        ],
        "shared_mlp.output_linear.weight": [(f"ffn_down{ends}.weight", AS_IS)],
    }
