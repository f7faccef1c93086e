"""Matrices that some files hold as one, where others hold several.

q, k and v (attn_qkv), and gate and up (ffn_up, with twice the rows): rows lie one after the other,
so each is a part of the bytes, whatever its type, and all that is behind this module sees one
arrangement. Adapters of such models change the fused matrix; their B is cut in the same way.
"""

import re
from collections.abc import Iterator, Mapping

from attrs import evolve

from kvtrio.model.errors import ModelFileError
from kvtrio.model.families import FAMILIES
from kvtrio.model.fields import Fields
from kvtrio.model.gguf_index import TensorInfo
from kvtrio.model.gguf_reader import MetaValue
from kvtrio.model.layer_tensors import Shape
from kvtrio.model.spec import ModelSpec

MOST = 1 << 24
QKV, UP = "attn_qkv", "ffn_up"
_FUSED = re.compile(r"(blk\.(\d{1,4})\.)(attn_qkv|ffn_up)\.(weight|bias)")
Rows = dict[str, int]
"""Names of the parts in order, behind ``blk.N.``, with the number of rows of each."""


def unfused(
    metadata: Mapping[str, MetaValue], tensors: Mapping[str, TensorInfo]
) -> Mapping[str, TensorInfo]:
    """The index with parts in place of fused matrices.

    What does not fit is left as it is, and whoever needs the parts says that they are missing.
    """
    architecture = metadata.get("general.architecture")
    family = FAMILIES.get(architecture) if isinstance(architecture, str) else None
    if family is None or not family.fused:
        return tensors
    fields = Fields(metadata, f"{architecture}.")
    return {
        part.name: part
        for name, info in tensors.items()
        for part in _parts(info, _rows_of(fields, tensors, name))
    }


def _rows_of(fields: Fields, tensors: Mapping[str, TensorInfo], name: str) -> Rows:
    """Rows of the parts of a tensor; none where it is whole."""
    match, (num_rows, *_) = _FUSED.fullmatch(name), tensors[name].shape
    if match is None:
        return {}
    prefix, layer, kind, _ = match.groups()
    if kind == UP:
        is_fused = f"{prefix}ffn_gate.weight" not in tensors and num_rows % 2 == 0
        return (
            dict.fromkeys((f"{prefix}ffn_gate", f"{prefix}{UP}"), num_rows // 2) if is_fused else {}
        )
    try:
        q, k, v = _attention_rows(fields, int(layer))
    except ModelFileError:
        return {}
    rows = {f"{prefix}attn_q": q, f"{prefix}attn_k": k, f"{prefix}attn_v": v}
    return rows if q + k + v == num_rows else {}


def _attention_rows(fields: Fields, layer: int) -> tuple[int, int, int]:
    num_layers = fields.integer("block_count", MOST)
    keys = ("attention.head_count", "attention.head_count_kv")
    heads, kv_heads = (
        fields.per_layer(key if fields.has(key) else keys[0], num_layers, MOST) for key in keys
    )
    if layer >= num_layers:
        raise ModelFileError("no such layer")
    default = fields.integer("embedding_length", MOST) // heads[layer]
    key_dim = fields.integer("attention.key_length", MOST, default=default)
    value_dim = fields.integer("attention.value_length", MOST, default=default)
    return heads[layer] * key_dim, kv_heads[layer] * key_dim, kv_heads[layer] * value_dim


def _parts(info: TensorInfo, rows: Rows) -> Iterator[TensorInfo]:
    if not rows or info.num_bytes % info.shape[0]:
        yield info
        return
    end, row_bytes, offset = (
        info.name.rpartition(".")[2],
        info.num_bytes // info.shape[0],
        info.offset,
    )
    for name, count in rows.items():
        yield evolve(
            info,
            name=f"{name}.{end}",
            shape=(count, *info.shape[1:]),
            num_bytes=count * row_bytes,
            offset=offset,
        )
        offset += count * row_bytes


# --- adapters ---


def fused_shapes(spec: ModelSpec, shapes: dict[str, Shape]) -> dict[str, Shape]:
    """Shapes of what an adapter may change, [out, in] by name, with those of fused matrices."""
    family = FAMILIES.get(spec.architecture)
    if family is None or not family.fused:
        return shapes
    fused = dict(shapes)
    for layer in spec.layers:
        for name, parts in _fused_parts(layer.index).items():
            own = [shapes[part] for part in parts]
            fused[name] = (sum(shape[0] for shape in own), own[0][1])
        del fused[f"blk.{layer.index}.ffn_gate.weight"]
    return fused


def cut_rows(spec: ModelSpec, shapes: Mapping[str, Shape], name: str) -> dict[str, slice]:
    """For a fused matrix, its parts with the rows of each; for any other, itself."""
    family = FAMILIES.get(spec.architecture)
    match = _FUSED.fullmatch(name)
    if family is None or not family.fused or match is None:
        return {name: slice(None)}
    found, start = {}, 0
    for part in _fused_parts(int(match[2]))[name]:
        found[part] = slice(start, start + shapes[part][0])
        start += shapes[part][0]
    return found


def _fused_parts(layer: int) -> dict[str, tuple[str, ...]]:
    prefix = f"blk.{layer}."
    return {
        f"{prefix}{QKV}.weight": tuple(f"{prefix}attn_{part}.weight" for part in "qkv"),
        f"{prefix}{UP}.weight": tuple(f"{prefix}ffn_{part}.weight" for part in ("gate", "up")),
    }
