"""GGUF bytes for tests: small valid models, and any kind of broken one."""

import struct
from collections.abc import Mapping, Sequence

import gguf
import numpy as np
from attrs import frozen

F32 = gguf.GGMLQuantizationType.F32
CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
KINDS = {np.dtype(code).name: kind for kind, code in CODES.items()}


@frozen
class Encoded:
    """A metadata value given as GGUF type number and bytes."""

    kind: int
    data: bytes


@frozen
class Tensor:
    """A line of the tensor index and its bytes."""

    name: str
    dims: tuple[int, ...]
    """GGUF order: contiguous first."""
    kind: int
    data: bytes
    offset: int | None = None
    """None: right after the tensor before."""


def tensor(name: str, values: np.ndarray) -> Tensor:
    """A float32 tensor of torch shape ``values.shape``."""
    array = np.ascontiguousarray(values, np.float32)
    return Tensor(name, tuple(reversed(array.shape)), F32.value, array.tobytes())


def text(value: str | bytes) -> bytes:
    raw = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def scalar(code: str, value: float) -> Encoded:
    """A number in a chosen type: ``scalar("Q", 3)`` is a uint64."""
    kinds = {code: kind for kind, code in CODES.items()}
    return Encoded(kinds[code], struct.pack("<" + code, value))


def encode(value: object) -> Encoded:
    """bool, int (as uint32), float (as float32), str, list of str, or numeric array."""
    match value:
        case Encoded():
            return value
        case bool():
            return scalar("?", value)
        case int():
            return scalar("I", value)
        case float():
            return scalar("f", value)
        case str():
            return Encoded(8, text(value))
        case list():
            return Encoded(9, struct.pack("<IQ", 8, len(value)) + b"".join(map(text, value)))
        case np.ndarray():
            head = struct.pack("<IQ", KINDS[value.dtype.name], len(value))
            return Encoded(9, head + value.tobytes())
    raise TypeError(type(value))


def entry(key: str, value: object) -> bytes:
    encoded = encode(value)
    return text(key) + struct.pack("<I", encoded.kind) + encoded.data


def index_line(item: Tensor, offset: int) -> bytes:
    dims = struct.pack(f"<I{len(item.dims)}Q", len(item.dims), *item.dims)
    return text(item.name) + dims + struct.pack("<IQ", item.kind, offset)


def head_bytes(num_tensors: int, num_entries: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_entries)


def gguf_bytes(
    metadata: Mapping[str, object],
    tensors: Sequence[Tensor] = (),
    alignment: int = 32,
) -> bytes:
    """A whole file of version 3."""
    index, body = b"", b""
    for item in tensors:
        index += index_line(item, len(body) if item.offset is None else item.offset)
        body += padded(item.data, alignment)
    entries = b"".join(entry(key, value) for key, value in metadata.items())
    start = padded(head_bytes(len(tensors), len(metadata)) + entries + index, alignment)
    # The last tensor is not padded, so that a byte less is a tensor too short.
    spare = -len(tensors[-1].data) % alignment if tensors else 0
    return start + body[: len(body) - spare]


def padded(data: bytes, alignment: int) -> bytes:
    return data + b"\0" * (-len(data) % alignment)


HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 8, 2, 1, 4, 12, 5


def tiny_metadata(architecture: str, num_layers: int = 1) -> dict[str, object]:
    """Keys of a model with hidden size 8, heads 2/1 of 4 values, ffn 12 and 5 tokens."""
    own: dict[str, object] = {
        "block_count": num_layers,
        "context_length": 64,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 1e6,
    }
    if architecture == "gemma3":
        own["attention.sliding_window"] = 16
    tokens: dict[str, object] = {"tokenizer.ggml.tokens": [f"t{i}" for i in range(VOCAB)]}
    general: dict[str, object] = {"general.architecture": architecture, "general.name": "tiny"}
    return general | {f"{architecture}.{key}": value for key, value in own.items()} | tokens


def tiny_tensors(architecture: str, num_layers: int = 1, seed: int = 0) -> list[Tensor]:
    """The tensors that ``tiny_metadata`` asks for, with random values and tied output."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for layer in range(num_layers):
        layer_shapes = tiny_layer(architecture)
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in layer_shapes.items()}
    return [tensor(name, rng.standard_normal(shape)) for name, shape in shapes.items()]


def tiny_layer(architecture: str) -> dict[str, tuple[int, ...]]:
    query, key = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (HIDDEN,),
        "attn_q.weight": (query, HIDDEN),
        "attn_k.weight": (key, HIDDEN),
        "attn_v.weight": (key, HIDDEN),
        "attn_output.weight": (HIDDEN, query),
        "ffn_norm.weight": (HIDDEN,),
        "ffn_gate.weight": (FFN, HIDDEN),
        "ffn_up.weight": (FFN, HIDDEN),
        "ffn_down.weight": (HIDDEN, FFN),
    }
    if architecture == "qwen2":
        shapes |= {"attn_q.bias": (query,), "attn_k.bias": (key,), "attn_v.bias": (key,)}
    if architecture in ("qwen3", "gemma3"):
        shapes |= {"attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,)}
    if architecture == "gemma3":
        shapes |= {"post_attention_norm.weight": (HIDDEN,), "post_ffw_norm.weight": (HIDDEN,)}
    return shapes


def tiny_model(architecture: str, num_layers: int = 1) -> bytes:
    return gguf_bytes(
        tiny_metadata(architecture, num_layers), tiny_tensors(architecture, num_layers)
    )
