"""Which tensors a model must hold, and whether a file holds exactly those."""

from collections.abc import Mapping

from kvtrio.model.errors import ModelFileError, safe_name
from kvtrio.model.gguf_file import DEQUANTISABLE
from kvtrio.model.gguf_index import TensorInfo
from kvtrio.model.layer_tensors import Shape, layer_tensors
from kvtrio.model.spec import AttentionSpec, ModelSpec


def needed_tensors(spec: ModelSpec) -> dict[str, Shape]:
    """Name to torch shape of every tensor that the forward pass reads."""
    needed = {
        "token_embd.weight": (spec.vocab_size, spec.hidden_size),
        f"{spec.output_norm}.weight": (spec.hidden_size,),
    }
    if not spec.tied_output:
        needed["output.weight"] = (spec.vocab_size, spec.hidden_size)
    for layer in spec.layers:
        prefix = f"blk.{layer.index}."
        needed.update((prefix + name, s) for name, s in layer_tensors(layer, spec.hidden_size))
        rope = layer.mixer.rope if isinstance(layer.mixer, AttentionSpec) else None
        if rope is not None and rope.factors is not None:
            needed[rope.factors] = (rope.num_rotated // 2,)
    return needed


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
