"""Tensors of gated delta nets (Qwen3-Next, Qwen3.5) as a GGUF file arranges them.

Facts from llama.cpp's convert_hf_to_gguf.py.
"""

from collections.abc import Callable, Sequence

import numpy as np
from attrs import frozen

from kvtrio.model.errors import ModelFileError
from kvtrio.model.folder_config import FolderModel
from kvtrio.model.folder_moves import (
    AS_IS,
    CONV,
    Arrays,
    Move,
    Recipe,
    Rule,
    Shape,
    conv_rows,
    conv_shape,
    decay,
    rows_in,
    shaped,
)
from kvtrio.model.spec import DeltaNetSpec


@frozen
class Heads:
    """Of a delta net."""

    num_keys: int
    num_values: int
    key_dim: int
    value_dim: int

    @classmethod
    def of(cls, spec: DeltaNetSpec) -> "Heads":
        return cls(spec.num_key_heads, spec.num_value_heads, spec.key_dim, spec.value_dim)

    @property
    def per_key(self) -> int:
        return self.num_values // self.num_keys

    @property
    def num_mixed(self) -> int:
        """Rows of q, k and v together."""
        return 2 * self.num_keys * self.key_dim + self.num_values * self.value_dim

    def tiled(self, rows: np.ndarray) -> np.ndarray:
        """Value heads from key head by key head to one of each key head in turn."""
        shape = (self.num_keys, self.per_key, -1, *rows.shape[1:])
        return rows.reshape(shape).swapaxes(0, 1).reshape(rows.shape)

    def tiled_tail(self, rows: np.ndarray) -> np.ndarray:
        """The same of q, k and v together: only v has value heads."""
        start = 2 * self.num_keys * self.key_dim
        return np.concatenate([rows[:start], self.tiled(rows[start:])])

    def part(self, rows: np.ndarray, *, is_gate: bool) -> np.ndarray:
        """Of rows with q, k, v and z of one key head after the other: q, k and v, or z."""
        key, values = self.key_dim, self.per_key * self.value_dim
        heads = rows.reshape(self.num_keys, 2 * key + 2 * values, *rows.shape[1:])
        q, k, v, z = np.split(heads, [key, 2 * key, 2 * key + values], 1)
        parts = [z] if is_gate else [q, k, v]
        return np.concatenate([part.reshape(-1, *rows.shape[1:]) for part in parts])

    def part_shape(self, num_rows: int) -> Callable[[Sequence[Shape]], Shape]:
        def result(shapes: Sequence[Shape]) -> Shape:
            if shapes[0][0] != self.num_mixed + self.num_values * self.value_dim:
                raise ValueError("rows")
            return (num_rows, *shapes[0][1:])

        return result


def delta_net_rules(model: FolderModel) -> dict[str, list[Rule]]:
    config = model.config
    heads = Heads(
        num_keys=config.whole("linear_num_key_heads"),
        num_values=config.whole("linear_num_value_heads"),
        key_dim=config.whole("linear_key_head_dim"),
        value_dim=config.whole("linear_value_head_dim"),
    )
    if heads.num_keys < 1 or heads.num_values % heads.num_keys:
        raise ModelFileError("config.json: value heads cannot share key heads evenly")
    rules: dict[str, list[Rule]] = {
        "post_attention_layernorm.weight": [("post_attention_norm.weight", AS_IS)],
        "mlp.shared_expert_gate.weight": [("ffn_gate_inp_shexp.weight", Recipe((), shaped(-1)))],
        "linear_attn.norm.weight": [("ssm_norm.weight", AS_IS)],
    }
    own = _grouped(heads) if model.kind == "qwen3_next" else _tiled(heads)
    return rules | {f"linear_attn.{theirs}": rule for theirs, rule in own.items()}


def _grouped(heads: Heads) -> dict[str, list[Rule]]:
    gates = heads.num_values * heads.value_dim
    mixed = Move(lambda a: heads.part(a[0], is_gate=False), heads.part_shape(heads.num_mixed))
    gate = Move(lambda a: heads.part(a[0], is_gate=True), heads.part_shape(gates))
    return {
        "in_proj_qkvz.weight": [
            ("attn_qkv.weight", Recipe((), mixed)),
            ("attn_gate.weight", Recipe((), gate)),
        ],
        "in_proj_ba.weight": [("ssm_ba.weight", AS_IS)],
        "conv1d.weight": [("ssm_conv1d.weight", Recipe((), CONV))],
        "A_log": [("ssm_a", Recipe((), None, decay))],
        "dt_bias": [("ssm_dt.bias", AS_IS)],
        "out_proj.weight": [("ssm_out.weight", AS_IS)],
    }


def _tiled(heads: Heads) -> dict[str, list[Rule]]:
    def columns(arrays: Arrays) -> np.ndarray:
        return heads.tiled(arrays[0].T).T

    def columns_shape(shapes: Sequence[Shape]) -> Shape:
        rows_in(heads.num_values)([shapes[0][::-1]])
        return shapes[0]

    def tiled_conv(arrays: Arrays) -> np.ndarray:
        return heads.tiled_tail(conv_rows(arrays))

    def tiled_conv_shape(shapes: Sequence[Shape]) -> Shape:
        return rows_in(1, heads.num_mixed)([conv_shape(shapes)])

    rows = Move(lambda a: heads.tiled(a[0]), rows_in(heads.num_values))
    tail = Move(lambda a: heads.tiled_tail(a[0]), rows_in(1, heads.num_mixed))
    return {
        "in_proj_qkv.weight": [("attn_qkv.weight", Recipe((), tail))],
        "in_proj_z.weight": [("attn_gate.weight", Recipe((), rows))],
        "in_proj_a.weight": [("ssm_alpha.weight", Recipe((), rows))],
        "in_proj_b.weight": [("ssm_beta.weight", Recipe((), rows))],
        "conv1d.weight": [("ssm_conv1d.weight", Recipe((), Move(tiled_conv, tiled_conv_shape)))],
        "A_log": [("ssm_a", Recipe((), rows, decay))],
        "dt_bias": [("ssm_dt.bias", Recipe((), rows))],
        "out_proj.weight": [("ssm_out.weight", Recipe((), Move(columns, columns_shape)))],
    }
