"""Which tensors a model must hold, and whether a file holds exactly those."""

from collections.abc import Iterator, Mapping

from kvtrio.model.errors import ModelFileError, safe_name
from kvtrio.model.gguf_file import DEQUANTISABLE
from kvtrio.model.gguf_index import TensorInfo
from kvtrio.model.spec import AttentionSpec, LayerSpec, ModelSpec

Shape = tuple[int, ...]


def needed_tensors(spec: ModelSpec) -> dict[str, Shape]:
    """Name to torch shape of every tensor that the forward pass reads."""
    needed = {
        "token_embd.weight": (spec.vocab_size, spec.hidden_size),
        "output_norm.weight": (spec.hidden_size,),
    }
    if not spec.tied_output:
        needed["output.weight"] = (spec.vocab_size, spec.hidden_size)
    for layer in spec.layers:
        needed.update(_layer_tensors(layer, spec.hidden_size))
        rope = layer.attention.rope
        if rope.factors is not None:
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
        if tensor.shape != shape:
            raise ModelFileError(
                f"tensor {safe_name(name)} has shape {_text(tensor.shape)}, not {_text(shape)}"
            )
        if tensor.ggml_type not in DEQUANTISABLE:
            kind = tensor.ggml_type.name
            raise ModelFileError(f"tensor {safe_name(name)} has type {kind}, which is unsupported")
    unknown = [name for name in present if name not in needed]
    if unknown:
        raise ModelFileError(f"tensor {safe_name(unknown[0])} is not known for this architecture")


def _text(shape: Shape) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _layer_tensors(layer: LayerSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    prefix = f"blk.{layer.index}."
    for name, shape in _attention_tensors(layer.attention, hidden):
        yield prefix + name, shape
    for name in ("attn_norm", "ffn_norm"):
        yield f"{prefix}{name}.weight", (hidden,)
    if layer.post_norms:
        for name in ("post_attention_norm", "post_ffw_norm"):
            yield f"{prefix}{name}.weight", (hidden,)
    size = layer.feed_forward.size
    yield f"{prefix}ffn_gate.weight", (size, hidden)
    yield f"{prefix}ffn_up.weight", (size, hidden)
    yield f"{prefix}ffn_down.weight", (hidden, size)


def _attention_tensors(spec: AttentionSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    rows = {
        "attn_q": spec.num_heads * spec.head_dim,
        "attn_k": spec.num_kv_heads * spec.head_dim,
        "attn_v": spec.num_kv_heads * spec.value_dim,
    }
    for name, size in rows.items():
        yield f"{name}.weight", (size, hidden)
        if spec.bias:
            yield f"{name}.bias", (size,)
    yield "attn_output.weight", (hidden, spec.num_heads * spec.value_dim)
    if spec.output_bias:
        yield "attn_output.bias", (hidden,)
    if spec.qk_norm:
        yield "attn_q_norm.weight", (spec.head_dim,)
        yield "attn_k_norm.weight", (spec.head_dim,)
