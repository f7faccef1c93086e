"""Tensors of more kinds of Hugging Face folders: see ``folder_tensors``."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from kvtrio.model.folder_config import FolderModel
from kvtrio.model.folder_moves import AS_IS, Arrays, Move, Recipe, Rule, Shape, half

WITH_GUESSES = ("glm4_moe", "deepseek_v3")
"""Whose folders may have layers behind the last, which guess at several tokens and are not run."""
Rules = dict[str, list[Rule]]
_ENDS = ("weight", "bias")
BLOCKS, SCALES = "_blocks", "_scales"
"""Ends of the two tensors that hold an MXFP4 matrix."""
_GATED = ("gate", "up", "down")


def more_rules(model: FolderModel) -> Rules:
    """By the stored name behind ``layers.N.``; nothing for a kind that has the usual ones."""
    made = _KINDS.get(model.kind)
    return made(model) if made else {}


def _plain(names: Mapping[str, str]) -> Rules:
    return {theirs: [(ours, AS_IS)] for theirs, ours in names.items()}


def _halves() -> Rules:
    """gate_up_proj: gate and then up."""
    pair: list[Rule] = [
        ("ffn_gate.weight", Recipe((), half(0, 0))),
        ("ffn_up.weight", Recipe((), half(1, 0))),
    ]
    return {"mlp.gate_up_proj.weight": pair}


def _phi3(model: FolderModel) -> Rules:
    values = model.values
    heads, kv_heads, dim = (
        values[f"attention.{key}"] for key in ("head_count", "head_count_kv", "key_length")
    )
    assert isinstance(heads, int)
    assert isinstance(kv_heads, int)
    assert isinstance(dim, int)
    ends = [heads * dim, (heads + kv_heads) * dim, (heads + 2 * kv_heads) * dim]
    parts: list[Rule] = [
        (f"attn_{name}.weight", Recipe((), _rows(start, end, ends[-1])))
        for name, start, end in zip("qkv", [0, *ends], ends, strict=False)
    ]
    return _halves() | {"self_attn.qkv_proj.weight": parts}


def _rows(start: int, end: int, total: int) -> Move:
    def shape(shapes: Sequence[Shape]) -> Shape:
        if shapes[0][0] != total:
            raise ValueError("rows")
        return (end - start, *shapes[0][1:])

    return Move(lambda arrays: arrays[0][start:end], shape)


def _glm4(model: FolderModel) -> Rules:
    return _halves() | _plain(
        {
            "post_self_attn_layernorm.weight": "post_attention_norm.weight",
            "post_mlp_layernorm.weight": "post_ffw_norm.weight",
        }
    )


def _olmo2(model: FolderModel) -> Rules:
    return _plain(
        {
            "post_attention_layernorm.weight": "post_attention_norm.weight",
            "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
        }
    )


def _starcoder2(model: FolderModel) -> Rules:
    names = {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down", "input_layernorm": "attn_norm"}
    names["post_attention_layernorm"] = "ffn_norm"
    return _plain(
        {f"{theirs}.{end}": f"{ours}.{end}" for theirs, ours in names.items() for end in _ENDS}
    )


def _gpt_oss(model: FolderModel) -> Rules:
    """gate and up alternate, and the experts' matrices are stored as [in, out]."""
    rules = _plain(
        {
            "post_attention_layernorm.weight": "post_attention_norm.weight",
            "self_attn.sinks": "attn_sinks.weight",
            "mlp.router.weight": "ffn_gate_inp.weight",
            "mlp.router.bias": "ffn_gate_inp.bias",
            "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
        }
    )
    return rules | {
        "mlp.experts.gate_up_proj": [
            ("ffn_gate_exps.weight", Recipe((), _every_second(0, turned=True))),
            ("ffn_up_exps.weight", Recipe((), _every_second(1, turned=True))),
        ],
        "mlp.experts.gate_up_proj_bias": [
            ("ffn_gate_exps.bias", Recipe((), _every_second(0, turned=False))),
            ("ffn_up_exps.bias", Recipe((), _every_second(1, turned=False))),
        ],
        "mlp.experts.down_proj": [("ffn_down_exps.weight", Recipe((), _TURNED))],
        f"mlp.experts.gate_up_proj{BLOCKS}": [
            ("ffn_gate_exps.weight", Recipe((), _mxfp4(0, 2), is_mxfp4=True)),
            ("ffn_up_exps.weight", Recipe((), _mxfp4(1, 2), is_mxfp4=True)),
        ],
        f"mlp.experts.down_proj{BLOCKS}": [
            ("ffn_down_exps.weight", Recipe((), _mxfp4(0, 1), is_mxfp4=True))
        ],
        f"mlp.experts.gate_up_proj{SCALES}": [],
        f"mlp.experts.down_proj{SCALES}": [],
    }


def _mxfp4(first: int, step: int) -> Move:
    """Every ``step``-th row, from codes [experts, rows, blocks, 16] and scales [experts, rows,
    blocks]. A byte of codes has neighbours there; in a GGUF file it has values j and j + 16."""

    def shape(shapes: Sequence[Shape]) -> Shape:
        (experts, rows, blocks, size), scales = shapes
        if size != 16 or scales != (experts, rows, blocks) or rows % step:
            raise ValueError("shape")
        return experts, rows // step, 32 * blocks

    def run(arrays: Arrays) -> np.ndarray:
        codes, scales = (each[:, first::step] for each in arrays)
        made = np.empty((*scales.shape, 17), np.uint8)
        made[..., 0] = scales
        for expert, each in enumerate(codes):
            values = np.stack((each & 15, each >> 4), -1).reshape(*each.shape[:-1], 32)
            made[expert, ..., 1:] = values[..., :16] | values[..., 16:] << 4
        return made

    return Move(run, shape)


def _turned_shape(shapes: Sequence[Shape]) -> Shape:
    count, rows, cols = shapes[0]
    return count, cols, rows


_TURNED = Move(lambda arrays: arrays[0].swapaxes(1, 2), _turned_shape)


def _every_second(first: int, *, turned: bool) -> Move:
    """Of the last axis, which ``turned`` makes the middle one."""

    def shape(shapes: Sequence[Shape]) -> Shape:
        *rest, last = shapes[0]
        if last % 2 or len(rest) != (2 if turned else 1):
            raise ValueError("shape")
        return _turned_shape([(*rest, last // 2)]) if turned else (*rest, last // 2)

    def run(arrays: Arrays) -> np.ndarray:
        part = arrays[0][..., first::2]
        return part.swapaxes(1, 2) if turned else part

    return Move(run, shape)


def _scored(model: FolderModel) -> Rules:
    shared = {f"mlp.shared_experts.{n}_proj.weight": f"ffn_{n}_shexp.weight" for n in _GATED}
    return _plain(shared | {"mlp.gate.e_score_correction_bias": "exp_probs_b.bias"})


def _glm4_moe(model: FolderModel) -> Rules:
    norm = {"post_attention_layernorm.weight": "post_attention_norm.weight"}
    return _scored(model) | _plain(norm)


def _latent(model: FolderModel) -> Rules:
    names = {
        "q_a_proj": "attn_q_a",
        "q_a_layernorm": "attn_q_a_norm",
        "q_b_proj": "attn_q_b",
        "kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "kv_a_layernorm": "attn_kv_a_norm",
    }
    plain = {f"self_attn.{theirs}.weight": f"{ours}.weight" for theirs, ours in names.items()}
    heads, plain_dim = (
        model.config.whole(key) for key in ("num_attention_heads", "qk_nope_head_dim")
    )
    value_dim = model.config.whole("v_head_dim")
    both: list[Rule] = [
        ("attn_k_b.weight", Recipe((), _per_head(heads, (0, plain_dim), turned=True))),
        (
            "attn_v_b.weight",
            Recipe((), _per_head(heads, (plain_dim, plain_dim + value_dim))),
        ),
    ]
    return _scored(model) | _plain(plain) | {"self_attn.kv_b_proj.weight": both}


def _per_head(num_heads: int, rows: tuple[int, int], *, turned: bool = False) -> Move:
    """Some rows of each head, [heads, rows, latent]; ``turned``: [heads, latent, rows]."""

    def shape(shapes: Sequence[Shape]) -> Shape:
        total, latent = shapes[0]
        if num_heads < 1 or total % num_heads or rows[1] > total // num_heads:
            raise ValueError("rows")
        count = rows[1] - rows[0]
        return (num_heads, latent, count) if turned else (num_heads, count, latent)

    def run(arrays: Arrays) -> np.ndarray:
        heads = arrays[0].reshape(num_heads, -1, arrays[0].shape[1])[:, rows[0] : rows[1]]
        return heads.swapaxes(1, 2) if turned else heads

    return Move(run, shape)


_KINDS: Mapping[str, Callable[[FolderModel], Rules]] = {
    "phi3": _phi3,
    "glm4": _glm4,
    "olmo2": _olmo2,
    "starcoder2": _starcoder2,
    "gpt_oss": _gpt_oss,
    "glm4_moe": _glm4_moe,
    "deepseek_v2": _latent,
    "deepseek_v3": _latent,
}
