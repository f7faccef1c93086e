"""Which tensors a model must hold, and whether a file holds exactly those."""

from collections.abc import Mapping

from kvtrio.model.errors import ModelFileError, safe_name
from kvtrio.model.gguf_file import DEQUANTISABLE
from kvtrio.model.gguf_index import TensorInfo
from kvtrio.model.layer_tensors import Shape, layer_tensors
from kvtrio.model.spec import AttentionSpec, LatentAttentionSpec, Mixer, ModelSpec


def needed_tensors(spec: ModelSpec) -> dict[str, Shape]:
    """Name to torch shape of every tensor that the forward pass reads."""
    needed = {
        "token_embd.weight": (spec.vocab_size, spec.hidden_size),
        f"{spec.output_norm}.weight": (spec.hidden_size,),
    }
    needed |= dict.fromkeys(norm_biases(spec), (spec.hidden_size,))
    if not spec.tied_output:
        needed["output.weight"] = (spec.vocab_size, spec.hidden_size)
    for layer in spec.layers:
        prefix = f"blk.{layer.index}."
        needed.update((prefix + name, s) for name, s in layer_tensors(layer, spec.hidden_size))
        needed |= _rope_tensors(layer.mixer)
    return needed


def norm_biases(spec: ModelSpec) -> list[str]:
    """Their names, where norms have some."""
    if not spec.norm_bias:
        return []
    names = [f"blk.{layer.index}.{name}" for layer in spec.layers for name in layer.norms]
    return [f"{name}.bias" for name in (*names, spec.output_norm)]


def _rope_tensors(mixer: Mixer) -> dict[str, Shape]:
    if not isinstance(mixer, AttentionSpec | LatentAttentionSpec):
        return {}
    rope = mixer.rope
    names = [rope.factors, rope.long.tensor if rope.long else None]
    return {name: (rope.num_rotated // 2,) for name in names if name is not None}


def check_tensors(present: Mapping[str, TensorInfo], needed: Mapping[str, Shape]) -> None:
    """Raise ModelFileError unless ``present`` is exactly ``needed``, in types we can expand.

    A tensor that nobody reads is refused too: it means that the model computes something
    else than we would.
    """
    for name, shape in needed.items():
        tensor = present.get(name)
        if tensor is None:
            raise ModelFileError(f"tensor {safe_name(name)} is missing")
        if _significant(tensor.shape) != _significant(shape):
            raise ModelFileError(
                f"tensor {safe_name(name)} has shape {_text(tensor.shape)}, not {_text(shape)}"
            )
        if tensor.ggml_type not in DEQUANTISABLE:
            kind = tensor.ggml_type.name
            raise ModelFileError(f"tensor {safe_name(name)} has type {kind}, which is unsupported")
    unknown = [name for name in present if name not in needed]
    if unknown:
        raise ModelFileError(f"tensor {safe_name(unknown[0])} is not known for this architecture")


def _significant(shape: Shape) -> Shape:
    """Without leading axes of one: programs that rewrite GGUF files drop those."""
    first = next((i for i, size in enumerate(shape) if size != 1), len(shape) - 1)
    return shape[first:]


def _text(shape: Shape) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
