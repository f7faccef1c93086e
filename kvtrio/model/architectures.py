"""Model file to ModelSpec: one reader for all architectures, driven by the table of families.

Keys and defaults are llama.cpp's (src/llama-model.cpp, build b11434), which wrote the rules for
GGUF files by example.
"""

import numpy as np

from kvtrio.core.types import StateClass
from kvtrio.model.errors import ModelFileError, safe_name
from kvtrio.model.families import FAMILIES
from kvtrio.model.feed_forwards import feed_forwards
from kvtrio.model.fields import Fields
from kvtrio.model.model_file import ModelFile
from kvtrio.model.recurrent import recurrent_mixers
from kvtrio.model.source import MAX_HEAD_DIM, MAX_LAYERS, MAX_SIZE, Source
from kvtrio.model.spec import AttentionSpec, LayerSpec, Mixer, ModelSpec, RopeSpec, RopeStyle
from kvtrio.model.tensors import check_tensors, needed_tensors

MAX_VOCAB = 1 << 24
MAX_CONTEXT = 1 << 31
MAX_SHOWN_NAME = 200
EPSILON = (1e-12, 1e-1)
ROPE_BASE = (1.0, 1e12)
ROPE_FACTOR = (1e-3, 1e6)
ATTENTION_SCALE = (1e-6, 1e3)
SOFTCAP = (0.0, 1e6)
SCALE = (1e-6, 1e6)
"""Of embedding, branches and logits."""

GEMMA3_PERIOD = 6
"""Five sliding layers, then a full one."""
GEMMA3_27B_LAYERS = 62
"""Only the 27B scales queries by (hidden size / heads)^-0.5, and no key says so."""
ROPE_FACTORS = "rope_freqs.weight"


def read_spec(file: ModelFile) -> ModelSpec:
    """The model as data; every tensor it needs is in the file with the right shape.

    Raises ModelFileError with one line that names the file and what is missing, inconsistent
    or unsupported.
    """
    try:
        return _read_spec(file)
    except ModelFileError as error:
        raise ModelFileError(f"{safe_name(file.path.name)}: {error}") from None


def _read_spec(file: ModelFile) -> ModelSpec:
    architecture = _architecture(file)
    fields = Fields(file.metadata, architecture + ".")
    source = Source(
        file=file,
        family=FAMILIES[architecture],
        fields=fields,
        num_layers=fields.integer("block_count", MAX_LAYERS),
        hidden_size=fields.integer("embedding_length", MAX_SIZE),
    )
    spec = ModelSpec(
        architecture=architecture,
        name=_shown_name(file),
        vocab_size=_vocab_size(file),
        hidden_size=source.hidden_size,
        context_length=fields.integer("context_length", MAX_CONTEXT),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon", EPSILON),
        embedding_scale=_embedding_scale(source),
        tied_output="output.weight" not in file.tensors,
        final_softcap=_softcap(fields),
        layers=_layers(source),
        residual_scale=_scale(source, "residual_scale"),
        logit_scale=1.0 / _scale(source, "logit_scale"),
        output_norm=source.family.output_norm,
    )
    check_tensors(file.tensors, needed_tensors(spec))
    _check_factors(file)
    return spec


def _architecture(file: ModelFile) -> str:
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
    return architecture


def _shown_name(file: ModelFile) -> str:
    """The model's own name, cut, without what no terminal or JSON reader should see."""
    name = Fields(file.metadata, "general.").text("name", "")
    return "".join(c if c.isprintable() else "?" for c in name[:MAX_SHOWN_NAME])


def _vocab_size(file: ModelFile) -> int:
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


def _embedding_scale(source: Source) -> float:
    if source.family.scaled_embedding:
        return float(source.hidden_size**0.5)
    return _scale(source, "embedding_scale")


def _scale(source: Source, key: str) -> float:
    # Zero means that there is none.
    if not source.family.granite_scales or not source.fields.number(key, (0.0, SCALE[1]), 0.0):
        return 1.0
    return source.fields.number(key, SCALE)


def _softcap(fields: Fields) -> float | None:
    return fields.number("final_logit_softcapping", SOFTCAP, 0.0) or None


def _layers(source: Source) -> tuple[LayerSpec, ...]:
    family, last = source.family, source.num_layers - 1
    # Looked up first, so that a wild number of layers costs no memory.
    if f"blk.{last}.attn_norm.weight" not in source.file.tensors:
        raise ModelFileError(f"tensors of layer {last} are missing")
    mixers, ffns = _mixers(source), feed_forwards(source)
    return tuple(
        LayerSpec(
            index=i,
            state_class=_state_class(mixer),
            mixer=mixer,
            feed_forward=ffns[i],
            post_norms=family.post_norms,
            ffn_norm=family.ffn_norm,
        )
        for i, mixer in enumerate(mixers)
    )


def _mixers(source: Source) -> tuple[Mixer, ...]:
    recurrent, windows = recurrent_mixers(source), _windows(source)
    # Without any attention, files need not say how many heads it has.
    heads = [(0, 0)] * source.num_layers if all(recurrent) else source.heads()
    return tuple(
        mixer or _attention(source, i, heads[i], windows[i]) for i, mixer in enumerate(recurrent)
    )


def _state_class(mixer: Mixer) -> StateClass:
    if not isinstance(mixer, AttentionSpec):
        return StateClass.POINT
    return StateClass.TOKEN if mixer.window is None else StateClass.WINDOW


def _windows(source: Source) -> tuple[int | None, ...]:
    """Per layer, the number of positions seen; None: all."""
    fields, count = source.fields, source.num_layers
    window = fields.integer("attention.sliding_window", MAX_CONTEXT, default=0, least=0)
    if not source.family.sliding or not window:
        return (None,) * count
    pattern = fields.pattern("attention.sliding_window_pattern", count, GEMMA3_PERIOD)
    return tuple(window if is_sliding else None for is_sliding in pattern)


def _attention(
    source: Source, index: int, heads: tuple[int, int], window: int | None
) -> AttentionSpec:
    num_heads, num_kv_heads = heads
    if not num_heads or not num_kv_heads or num_heads % num_kv_heads:
        raise ModelFileError(f"{num_heads} heads cannot share {num_kv_heads} key heads evenly")
    head_dim = _head_dim(source, "attention.key_length", num_heads)
    tensors = source.file.tensors
    value_dim = _head_dim(source, "attention.value_length", num_heads)
    if source.family.gated_attention and value_dim != head_dim:
        raise ModelFileError(f"gates of {head_dim} values do not fit heads of {value_dim}")
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        rope=_rope(source, head_dim, is_sliding=window is not None),
        scale=_attention_scale(source, num_heads, head_dim),
        window=window,
        qk_norm=source.family.qk_norm,
        bias=source.family.needs_bias or f"blk.{index}.attn_q.bias" in tensors,
        output_bias=f"blk.{index}.attn_output.bias" in tensors,
        gated=source.family.gated_attention,
    )


def _head_dim(source: Source, key: str, num_heads: int) -> int:
    if source.fields.has(key):
        return source.fields.integer(key, MAX_HEAD_DIM)
    if source.hidden_size % num_heads:
        raise ModelFileError(f"{num_heads} heads do not divide {source.hidden_size} values")
    return source.hidden_size // num_heads


def _attention_scale(source: Source, num_heads: int, head_dim: int) -> float:
    if source.family.sliding and source.num_layers == GEMMA3_27B_LAYERS:
        return float((source.hidden_size / num_heads) ** -0.5)
    return source.fields.number("attention.scale", ATTENTION_SCALE, float(head_dim**-0.5))


def _rope(source: Source, head_dim: int, *, is_sliding: bool) -> RopeSpec:
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
        style=_rope_style(source),
        num_rotated=num_rotated,
        base=base,
        scale=scale,
        factors=ROPE_FACTORS if has_factors else None,
    )


def _rope_style(source: Source) -> RopeStyle:
    # Granite's files use this key, a mere remark elsewhere, as a switch.
    switch = "rope.scaling.finetuned"
    if source.family.granite_scales and not source.fields.flag(switch, default=True):
        return RopeStyle.NONE
    return source.family.rope


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


def _check_factors(file: ModelFile) -> None:
    if ROPE_FACTORS not in file.tensors:
        return
    factors = file.dequantise(ROPE_FACTORS)
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise ModelFileError(f"tensor {ROPE_FACTORS} holds a factor that is not above zero")
