"""Metadata and tensors of tiny hybrids and mixtures of experts, spelled out by hand.

Hidden size 8, heads 2/1 of 4 values, ffn 12, 5 tokens; of two layers the second has attention,
except with mamba2.
"""

from collections.abc import Sequence

import numpy as np
from model.gguf_builder import FFN, HIDDEN, VOCAB, Tensor, tensor, tiny_layer, tiny_metadata

Shapes = dict[str, tuple[int, ...]]
SSM: dict[str, object] = {"ssm.conv_kernel": 4, "ssm.inner_size": 8, "ssm.time_step_rank": 2}
DELTA = SSM | {"ssm.state_size": 4, "ssm.group_count": 1, "full_attention_interval": 2}
MAMBA = SSM | {"ssm.state_size": 3, "ssm.group_count": 1}
EXPERTS: dict[str, object] = {"expert_count": 4, "expert_used_count": 2}
SHARED: dict[str, object] = {"expert_shared_feed_forward_length": 10}
SECOND_ATTENDS = np.array([0, 1], np.int32)
KEYS: dict[str, dict[str, object]] = {
    "qwen3moe": EXPERTS | {"expert_feed_forward_length": 6},
    "qwen35": DELTA,
    "qwen3next": DELTA | EXPERTS | SHARED | {"expert_feed_forward_length": 6},
    "lfm2": {"shortconv.l_cache": 3, "attention.head_count_kv": SECOND_ATTENDS},
    "mamba2": MAMBA | {"attention.head_count": 0, "feed_forward_length": 0},
    "granitehybrid": MAMBA | EXPERTS | SHARED | {
        "attention.head_count_kv": SECOND_ATTENDS,
        "embedding_scale": 3.0,
        "residual_scale": 0.5,
        "logit_scale": 4.0,
        "attention.scale": 0.25,
        "rope.scaling.finetuned": False,
    },
}  # fmt: skip


def hybrid_metadata(architecture: str) -> dict[str, object]:
    own = {f"{architecture}.{key}": value for key, value in KEYS[architecture].items()}
    return tiny_metadata(architecture, 2) | own


def hybrid_tensors(architecture: str) -> list[Tensor]:
    """All ones: their values do not matter to who reads the spec."""
    norm = "token_embd_norm" if architecture == "lfm2" else "output_norm"
    shapes: Shapes = {"token_embd.weight": (VOCAB, HIDDEN), f"{norm}.weight": (HIDDEN,)}
    for i, layer in enumerate(LAYERS[architecture]):
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return [tensor(name, np.ones(shape)) for name, shape in shapes.items()]


def without(tensors: Sequence[Tensor], part: str) -> list[Tensor]:
    return [item for item in tensors if part not in item.name]


def norms(*names: str) -> Shapes:
    return {f"{name}.weight": (HIDDEN,) for name in names}


def delta(**gates: int) -> Shapes:
    return norms("attn_norm", "post_attention_norm") | {
        "attn_qkv.weight": (16, HIDDEN),
        "attn_gate.weight": (8, HIDDEN),
        "ssm_conv1d.weight": (16, 4),
        "ssm_a": (2,),
        "ssm_dt.bias": (2,),
        "ssm_norm.weight": (4,),
        "ssm_out.weight": (HIDDEN, 8),
    } | {f"{name}.weight": (size, HIDDEN) for name, size in gates.items()}  # fmt: skip


def attention(norm: str, query: int = 8, qk_norm: bool = True) -> Shapes:
    plain = tiny_layer("qwen3" if qk_norm else "llama")
    own = {name: shape for name, shape in plain.items() if name.startswith("attn")}
    return own | norms(norm) | {"attn_q.weight": (query, HIDDEN)}


def dense() -> Shapes:
    return {name: shape for name, shape in tiny_layer("llama").items() if "norm" not in name
            and name.startswith("ffn")}  # fmt: skip


def experts(size: int) -> Shapes:
    return {
        "ffn_gate_inp.weight": (4, HIDDEN),
        "ffn_gate_exps.weight": (4, size, HIDDEN),
        "ffn_up_exps.weight": (4, size, HIDDEN),
        "ffn_down_exps.weight": (4, HIDDEN, size),
    }


def shared() -> Shapes:
    return {
        "ffn_gate_shexp.weight": (10, HIDDEN),
        "ffn_up_shexp.weight": (10, HIDDEN),
        "ffn_down_shexp.weight": (HIDDEN, 10),
    }


def mamba() -> Shapes:
    return norms("attn_norm") | {
        "ssm_in.weight": (8 + 14 + 2, HIDDEN),
        "ssm_conv1d.weight": (14, 4),
        "ssm_conv1d.bias": (14,),
        "ssm_dt.bias": (2,),
        "ssm_a": (2, 1),
        "ssm_d": (2, 1),
        "ssm_norm.weight": (1, 8),
        "ssm_out.weight": (HIDDEN, 8),
    }


CONV: Shapes = norms("attn_norm", "ffn_norm") | {
    "shortconv.in_proj.weight": (24, HIDDEN),
    "shortconv.conv.weight": (HIDDEN, 3),
    "shortconv.out_proj.weight": (HIDDEN, HIDDEN),
}
NEXT = experts(6) | shared() | {"ffn_gate_inp_shexp.weight": (HIDDEN,)}
GRANITE = experts(FFN) | shared()
POST = "post_attention_norm"
LAYERS: dict[str, list[Shapes]] = {
    "qwen3moe": [attention("ffn_norm") | experts(6)] * 2,
    "qwen35": [delta(ssm_alpha=2, ssm_beta=2) | dense(), attention(POST, 16) | dense()],
    "qwen3next": [delta(ssm_ba=4) | NEXT, attention(POST, 16) | NEXT],
    "lfm2": [CONV | dense(), attention("ffn_norm") | dense()],
    "mamba2": [mamba(), mamba()],
    "granitehybrid": [
        mamba() | norms("ffn_norm") | GRANITE,
        attention("ffn_norm", qk_norm=False) | GRANITE,
    ],
}
