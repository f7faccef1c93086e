"""Model file to ModelSpec: one reader for all architectures, driven by the table of families.

Keys and defaults are llama.cpp's (src/llama-model.cpp, build b11434), which wrote the rules for
GGUF files by example.
"""

import numpy as np
from attrs import frozen

from kvtrio.core.types import StateClass
from kvtrio.model.errors import ModelFileError, safe_name
from kvtrio.model.families import FAMILIES, Family
from kvtrio.model.fields import Fields
from kvtrio.model.gguf_file import GGUFFile
from kvtrio.model.spec import AttentionSpec, FeedForwardSpec, LayerSpec, ModelSpec, RopeSpec
from kvtrio.model.tensors import check_tensors, needed_tensors

MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_HEAD_DIM = 8192
MAX_SIZE = 1 << 22
"""Hidden and feed-forward size."""
MAX_VOCAB = 1 << 24
MAX_CONTEXT = 1 << 31
MAX_SHOWN_NAME = 200
EPSILON = (1e-12, 1e-1)
ROPE_BASE = (1.0, 1e12)
ROPE_FACTOR = (1e-3, 1e6)
ATTENTION_SCALE = (1e-6, 1e3)
SOFTCAP = (0.0, 1e6)


GEMMA3_PERIOD = 6
"""Five sliding layers, then a full one."""
GEMMA3_27B_LAYERS = 62
"""Only the 27B scales queries by (hidden size / heads)^-0.5, and no key says so."""
ROPE_FACTORS = "rope_freqs.weight"


@frozen(kw_only=True)
class _Source:
    """What the layers are read from."""

    file: GGUFFile
    family: Family
    fields: Fields
    num_layers: int
    hidden_size: int


def read_spec(file: GGUFFile) -> ModelSpec:
    """The model as data; every tensor it needs is in the file with the right shape.

    Raises ModelFileError with one line that names the file and what is missing, inconsistent
    or unsupported.
    """
    try:
        return _read_spec(file)
    except ModelFileError as error:
        raise ModelFileError(f"{safe_name(file.path.name)}: {error}") from None


def _read_spec(file: GGUFFile) -> ModelSpec:
    architecture = _architecture(file)
    fields = Fields(file.metadata, architecture + ".")
    source = _Source(
        file=file,
        family=FAMILIES[architecture],
        fields=fields,
        num_layers=fields.integer("block_count", MAX_LAYERS),
        hidden_size=fields.integer("embedding_length", MAX_SIZE),
    )
    scaled = source.family.scaled_embedding
    spec = ModelSpec(
        architecture=architecture,
        name=_shown_name(file),
        vocab_size=_vocab_size(file),
        hidden_size=source.hidden_size,
        context_length=fields.integer("context_length", MAX_CONTEXT),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon", EPSILON),
        embedding_scale=source.hidden_size**0.5 if scaled else 1.0,
        tied_output="output.weight" not in file.tensors,
        final_softcap=_softcap(fields),
        layers=_layers(source),
    )
    check_tensors(file.tensors, needed_tensors(spec))
    _check_factors(file)
    return spec


def _architecture(file: GGUFFile) -> str:
    general = Fields(file.metadata, "general.")
    kind = general.text("type", "model")
    if kind != "model":
        raise ModelFileError(f"it holds no model but something of type {safe_name(kind)}")
    architecture = general.text("architecture")
    if architecture not in FAMILIES:
        supported = ", ".join(FAMILIES)
        raise ModelFileError(
            f"architecture {safe_name(architecture)} is not supported; supported are {supported}"
        )
    fields = Fields(file.metadata, architecture + ".")
    if fields.integer("expert_count", MAX_SIZE, default=0, least=0):
        raise ModelFileError(f"{architecture} with experts is not supported")
    return architecture


def _shown_name(file: GGUFFile) -> str:
    """The model's own name, cut, without what no terminal or JSON reader should see."""
    name = Fields(file.metadata, "general.").text("name", "")
    return "".join(c if c.isprintable() else "?" for c in name[:MAX_SHOWN_NAME])


def _vocab_size(file: GGUFFile) -> int:
    """Rows of the embedding, which must be as many as the tokenizer has tokens."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelFileError("tensor token_embd.weight is missing")
    num_rows = embedding.shape[0]
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) != num_rows:
        raise ModelFileError(f"it has {len(tokens)} tokens but {num_rows} embeddings")
    if num_rows > MAX_VOCAB:
        raise ModelFileError(f"more than {MAX_VOCAB} tokens are not supported")
    return num_rows


def _softcap(fields: Fields) -> float | None:
    return fields.number("final_logit_softcapping", SOFTCAP, 0.0) or None


def _layers(source: _Source) -> tuple[LayerSpec, ...]:
    fields, count = source.fields, source.num_layers
    # Looked up first, so that a wild number of layers costs no memory.
    if f"blk.{count - 1}.attn_norm.weight" not in source.file.tensors:
        raise ModelFileError(f"tensors of layer {count - 1} are missing")
    heads = fields.per_layer("attention.head_count", count, MAX_HEADS)
    kv_key = "attention.head_count_kv"
    kv_heads = fields.per_layer(kv_key, count, MAX_HEADS) if fields.has(kv_key) else heads
    sizes = fields.per_layer("feed_forward_length", count, MAX_SIZE)
    windows = _windows(source)
    return tuple(
        LayerSpec(
            index=i,
            state_class=StateClass.TOKEN if windows[i] is None else StateClass.WINDOW,
            attention=_attention(source, i, (heads[i], kv_heads[i]), windows[i]),
            feed_forward=FeedForwardSpec(size=sizes[i], activation=source.family.activation),
            post_norms=source.family.post_norms,
        )
        for i in range(count)
    )


def _windows(source: _Source) -> tuple[int | None, ...]:
    """Per layer, the number of positions seen; None: all."""
    fields, count = source.fields, source.num_layers
    window = fields.integer("attention.sliding_window", MAX_CONTEXT, default=0, least=0)
    if not source.family.sliding or not window:
        return (None,) * count
    pattern = fields.pattern("attention.sliding_window_pattern", count, GEMMA3_PERIOD)
    return tuple(window if is_sliding else None for is_sliding in pattern)


def _attention(
    source: _Source, index: int, heads: tuple[int, int], window: int | None
) -> AttentionSpec:
    num_heads, num_kv_heads = heads
    if num_heads % num_kv_heads:
        raise ModelFileError(f"{num_heads} heads cannot share {num_kv_heads} key heads evenly")
    head_dim = _head_dim(source, "attention.key_length", num_heads)
    tensors = source.file.tensors
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_dim=_head_dim(source, "attention.value_length", num_heads),
        rope=_rope(source, head_dim, is_sliding=window is not None),
        scale=_attention_scale(source, num_heads, head_dim),
        window=window,
        qk_norm=source.family.qk_norm,
        bias=source.family.needs_bias or f"blk.{index}.attn_q.bias" in tensors,
        output_bias=f"blk.{index}.attn_output.bias" in tensors,
    )


def _head_dim(source: _Source, key: str, num_heads: int) -> int:
    if source.fields.has(key):
        return source.fields.integer(key, MAX_HEAD_DIM)
    if source.hidden_size % num_heads:
        raise ModelFileError(f"{num_heads} heads do not divide {source.hidden_size} values")
    return source.hidden_size // num_heads


def _attention_scale(source: _Source, num_heads: int, head_dim: int) -> float:
    if source.family.sliding and source.num_layers == GEMMA3_27B_LAYERS:
        return float((source.hidden_size / num_heads) ** -0.5)
    return source.fields.number("attention.scale", ATTENTION_SCALE, float(head_dim**-0.5))


def _rope(source: _Source, head_dim: int, *, is_sliding: bool) -> RopeSpec:
    fields = source.fields
    num_rotated = fields.integer("rope.dimension_count", head_dim, default=head_dim)
    if num_rotated % 2:
        raise ModelFileError("an odd number of rotated values is not supported")
    base = fields.number("rope.freq_base", ROPE_BASE, 10000.0)
    scale = _rope_scale(fields)
    if is_sliding:
        # The context extension of the larger sizes applies to the full layers only.
        base, scale = fields.number("rope.freq_base_swa", ROPE_BASE, 10000.0), 1.0
    has_factors = source.fields.prefix == "llama." and ROPE_FACTORS in source.file.tensors
    return RopeSpec(
        style=source.family.rope,
        num_rotated=num_rotated,
        base=base,
        scale=scale,
        factors=ROPE_FACTORS if has_factors else None,
    )


def _rope_scale(fields: Fields) -> float:
    kind = fields.text("rope.scaling.type", "linear")
    if kind == "none":
        return 1.0
    if kind != "linear":
        raise ModelFileError(
            f"rope scaling {safe_name(kind)} is not supported; supported are none and linear"
        )
    # Files from 2023 use the second key. Zero means that there is no factor.
    for key in ("rope.scaling.factor", "rope.scale_linear"):
        if fields.has(key) and fields.number(key, (0.0, ROPE_FACTOR[1])):
            return 1.0 / fields.number(key, ROPE_FACTOR)
    return 1.0


def _check_factors(file: GGUFFile) -> None:
    if ROPE_FACTORS not in file.tensors:
        return
    factors = file.dequantise(ROPE_FACTORS)
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise ModelFileError(f"tensor {ROPE_FACTORS} holds a factor that is not above zero")
