"""Model file to ModelSpec: one reader for all architectures, driven by the table of families.

Keys and defaults are llama.cpp's (src/llama-model.cpp, build b11434), which wrote the rules for
GGUF files by example.
"""

from kvtrio.core.types import StateClass
from kvtrio.model.attentions import attention, latent_attention, windows
from kvtrio.model.errors import ModelFileError, safe_name
from kvtrio.model.families import FAMILIES
from kvtrio.model.feed_forwards import feed_forwards
from kvtrio.model.fields import Fields
from kvtrio.model.model_file import ModelFile
from kvtrio.model.recurrent import recurrent_mixers
from kvtrio.model.ropes import check_factors
from kvtrio.model.source import MAX_CONTEXT, MAX_LAYERS, MAX_SIZE, Source
from kvtrio.model.spec import (
    AttentionSpec,
    LatentAttentionSpec,
    LayerSpec,
    Mixer,
    ModelSpec,
)
from kvtrio.model.tensors import check_tensors, needed_tensors

MAX_VOCAB = 1 << 24
MAX_SHOWN_NAME = 200
EPSILON = (1e-12, 1e-1)
SOFTCAP = (0.0, 1e6)
SCALE = (1e-6, 1e6)
"""Of embedding, branches and logits."""


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
    num_blocks, num_extra = _num_layers(fields)
    source = Source(
        file=file,
        family=FAMILIES[architecture],
        fields=fields,
        num_layers=num_blocks - num_extra,
        hidden_size=fields.integer("embedding_length", MAX_SIZE),
    )
    spec = ModelSpec(
        architecture=architecture,
        name=_shown_name(file),
        vocab_size=_vocab_size(file),
        hidden_size=source.hidden_size,
        context_length=fields.integer("context_length", MAX_CONTEXT),
        norm_eps=fields.number(_epsilon_key(source), EPSILON),
        embedding_scale=_embedding_scale(source),
        tied_output="output.weight" not in file.tensors,
        final_softcap=_softcap(source),
        layers=_layers(source),
        residual_scale=_scale(source, "residual_scale"),
        logit_scale=_logit_scale(source),
        output_norm=source.family.output_norm,
        layer_norm=source.family.layer_norm,
        norm_bias=source.family.norm_bias,
    )
    extra = tuple(f"blk.{i}." for i in range(source.num_layers, num_blocks))
    present = {name: info for name, info in file.tensors.items() if not name.startswith(extra)}
    check_tensors(present if extra else file.tensors, needed_tensors(spec))
    check_factors(file)
    return spec


def _num_layers(fields: Fields) -> tuple[int, int]:
    """Of all blocks, and of those at the end that guess at several tokens, which nobody runs."""
    num_blocks = fields.integer("block_count", MAX_LAYERS)
    most = num_blocks - 1
    return num_blocks, fields.integer("nextn_predict_layers", most, default=0, least=0)


def _epsilon_key(source: Source) -> str:
    return f"attention.layer_norm{'' if source.family.layer_norm else '_rms'}_epsilon"


def _architecture(file: ModelFile) -> str:
    general = Fields(file.metadata, "general.")
    kind = general.text("type", "model")
    if kind != "model":
        raise ModelFileError(f"it holds no model but something of type {safe_name(kind)}")
    architecture = general.text("architecture")
    if architecture not in FAMILIES:
        raise ModelFileError(
            f"architecture {safe_name(architecture)} is not supported; {len(FAMILIES)} are: "
            "the README lists them"
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


def _logit_scale(source: Source) -> float:
    if source.family.multiplied_logits:
        return source.fields.number("logit_scale", SCALE, 1.0)
    return 1.0 / _scale(source, "logit_scale")


def _softcap(source: Source) -> float | None:
    default = source.family.final_softcap
    return source.fields.number("final_logit_softcapping", SOFTCAP, default) or None


def _layers(source: Source) -> tuple[LayerSpec, ...]:
    family, last = source.family, source.num_layers - 1
    # Looked up first, so that a wild number of layers costs no memory.
    first_norm = "attn_norm" if family.pre_norms else "post_attention_norm"
    if f"blk.{last}.{first_norm}.weight" not in source.file.tensors:
        raise ModelFileError(f"tensors of layer {last} are missing")
    mixers, ffns = _mixers(source), feed_forwards(source)
    return tuple(
        LayerSpec(
            index=i,
            state_class=_state_class(mixer),
            mixer=mixer,
            feed_forward=ffns[i],
            post_norms=family.post_norms,
            pre_norms=family.pre_norms,
            parallel=family.parallel,
            ffn_norm=family.ffn_norm,
        )
        for i, mixer in enumerate(mixers)
    )


def _mixers(source: Source) -> tuple[Mixer, ...]:
    if source.family.latent:
        return (latent_attention(source),) * source.num_layers
    recurrent, seen = recurrent_mixers(source), windows(source)
    # Without any attention, files need not say how many heads it has.
    heads = [(0, 0)] * source.num_layers if all(recurrent) else source.heads()
    return tuple(
        mixer or attention(source, i, heads[i], seen[i]) for i, mixer in enumerate(recurrent)
    )


def _state_class(mixer: Mixer) -> StateClass:
    if isinstance(mixer, LatentAttentionSpec):
        return StateClass.TOKEN
    if not isinstance(mixer, AttentionSpec):
        return StateClass.POINT
    return StateClass.TOKEN if mixer.window is None else StateClass.WINDOW
