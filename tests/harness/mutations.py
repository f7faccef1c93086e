"""Changes to model files, from a seed: bytes of heads, and what heads say."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from attrs import evolve, field, frozen
from model.gguf_builder import Tensor, entry, head_bytes, index_line, padded

from kvtrio.model.gguf_file import map_file
from kvtrio.model.gguf_index import read_head

NUM_TOKENS = 320
"""What is left of a vocabulary: the bytes' own tokens are among the first."""
WILD = (0, 1, 2, 255, 2**16, 2**24, 2**31, 2**32 - 1, 2**32, 2**62, 2**63, 2**64 - 1)
ODD: tuple[Any, ...] = (
    *(0, 1, -1, 7, 2**24, 2**31, 2**40, 2**63, 10**30, 0.0, -0.5, 1e-300, 1e300, float("nan")),
    *("", "x", "x" * 5000, "\x1b[31m", "a\nb", True, False, None, [], [1, 2], ["x"], {}, {"a": 1}),
    *([[]], [None] * 9, {"type": "Sequence"}, list(range(4096)), "\ud800"),
)


# --- bytes ---


def changed_bytes(rng: Random, data: bytes, end: int) -> bytes:
    """Something before ``end`` flipped, replaced by a number, cut off, doubled or taken out."""
    at, size = rng.randrange(end), rng.choice((1, 2, 4, 8, 64, 1024))
    wild = rng.choice(WILD)
    match rng.randrange(6):
        case 0:
            flips = {rng.randrange(end): rng.randrange(256) for _ in range(rng.choice((1, 2, 6)))}
            return bytes(flips.get(i, byte) for i, byte in enumerate(data[:end])) + data[end:]
        case 1:
            return data[:at] + wild.to_bytes(8, "little") + data[at + 8 :]
        case 2:
            return data[:at] + (wild % 2**32).to_bytes(4, "little") + data[at + 4 :]
        case 3:
            return data[:at]
        case 4:
            return data[:at] + data[at : at + size] * 2 + data[at + size :]
        case _:
            return data[:at] + data[at + size :]


# --- GGUF ---


@frozen(eq=False)
class GgufBase:
    """The head of a good file, taken apart. Its weights are as good as zeros."""

    name: str
    metadata: Mapping[str, object]
    tensors: tuple[Tensor, ...]
    """Without their bytes."""
    body: int
    """Bytes of weights."""
    whole: bytes = field(init=False)
    """The head."""

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "whole", _head(self.metadata, self.tensors))

    def changed(self, rng: Random) -> tuple[bytes, int]:
        """Another head, and how many bytes follow it."""
        if rng.random() < 0.5:
            head = changed_bytes(rng, self.whole, len(self.whole))
            return head, 0 if self.whole.startswith(head) else self.body
        if rng.random() < 0.6:
            return _head(self._other_metadata(rng), self.tensors), self.body
        tensors = list(self.tensors)
        at = rng.randrange(len(tensors))
        tensors[at : at + 1] = _other_tensors(rng, tensors[at])
        return _head(self.metadata, tensors), self.body

    def _other_metadata(self, rng: Random) -> dict[str, object]:
        metadata = dict(self.metadata)
        key = rng.choice(list(metadata))
        value = metadata.pop(key)
        match rng.randrange(4):
            case 0:
                return metadata
            case 1:
                return metadata | {key: rng.choice(GGUF_ODD)}
            case 2:
                return metadata | {key: metadata[rng.choice(list(metadata))]}
            case _:
                return metadata | {key: _other_value(rng, value)}


def _head(metadata: Mapping[str, object], tensors: Sequence[Tensor]) -> bytes:
    entries = b"".join(entry(key, value) for key, value in metadata.items())
    lines = b"".join(index_line(each, each.offset or 0) for each in tensors)
    return padded(head_bytes(len(tensors), len(metadata)) + entries + lines, 32)


GGUF_ODD: tuple[object, ...] = (
    *(0, 1, 7, 1000, 2**24, 2**31, 2**32 - 1, 0.0, -1.0, 1e-38, 1e38, float("nan"), float("inf")),
    *("", "x" * 5000, "\x1b[31m", True, False, [], ["x"], ["x"] * 500),
    *(np.zeros(0, np.int32), np.arange(4096, dtype=np.uint64), np.full(8, -1, np.int64)),
    *(np.full(4, np.nan, np.float32), np.full(1000, True)),
)


def _other_value(rng: Random, value: object) -> object:
    """Of the same type."""
    match value:
        case bool():
            return not value
        case int() | float():
            return type(value)(rng.choice((0, 1, 2, 3, 65, 1000, 2**31)))
        case str():
            return value[: rng.randrange(len(value) + 1)] + rng.choice(("", "}", "{{", "\x1b", "é"))
        case list() | np.ndarray():
            cut = list(value)[: rng.randrange(len(value) + 1)]
            return cut if isinstance(value, list) else np.array(cut, value.dtype)
    return value


def _other_tensors(rng: Random, tensor: Tensor) -> list[Tensor]:
    """In place of one: none, two, or another."""
    dims = list(tensor.dims)
    at = rng.randrange(len(dims))
    match rng.randrange(7):
        case 0:
            return []
        case 1:
            return [tensor, evolve(tensor, name=rng.choice((tensor.name, "blk.9999.x", "x")))]
        case 2:
            dims[at] = rng.choice((*WILD, dims[at] * 2, dims[at] // 2, dims[at] + 32))
        case 3:
            dims = rng.choice(([], [*dims, 1], [*dims, 2], dims[:-1], dims[::-1], [1] * 5))
        case 4:
            return [evolve(tensor, kind=rng.choice((*range(42), 2**31)))]
        case 5:
            return [evolve(tensor, offset=rng.choice((*WILD, 32, 64, 4096)))]
        case _:
            parts = tensor.name.split(".")
            parts[rng.randrange(len(parts))] = rng.choice(("", "0", "3", "99", "weight", "\x1b"))
            return [evolve(tensor, name=".".join(parts))]
    return [evolve(tensor, dims=tuple(dims))]


def gguf_base(path: Path) -> GgufBase:
    """A file with no more than ``NUM_TOKENS`` tokens left of its vocabulary."""
    head = read_head(map_file(path), 0)
    kept = dict(head.metadata)
    num_tokens = len(kept.get("tokenizer.ggml.tokens", ()))
    for key, value in head.metadata.items():
        if isinstance(value, list | np.ndarray) and num_tokens and len(value) == num_tokens:
            kept[key] = value[:NUM_TOKENS]
        elif key.endswith("_token_id") and isinstance(value, int):
            kept[key] = min(value, NUM_TOKENS - 1)
    if "tokenizer.ggml.merges" in kept:
        known = set(kept["tokenizer.ggml.tokens"])
        merges = kept["tokenizer.ggml.merges"]
        kept["tokenizer.ggml.merges"] = [each for each in merges if _is_made(each, known)]
    tensors, body = [], 0
    for info in head.tensors:
        dims, size = tuple(reversed(info.shape)), info.num_bytes
        if num_tokens and info.shape[0] == num_tokens:
            dims, size = (*dims[:-1], NUM_TOKENS), size // num_tokens * NUM_TOKENS
        tensors.append(Tensor(info.name, dims, info.ggml_type.value, b"", body))
        body += -(-size // 32) * 32
    return GgufBase(path.stem, kept, tuple(tensors), body)


def _is_made(merge: str, known: set[str]) -> bool:
    left, _, right = merge.partition(" ")
    return {left, right, left + right} <= known


# --- JSON ---


def changed_json(rng: Random, raw: bytes) -> bytes:
    """Bytes of it, or one value anywhere within: taken away, or another one."""
    if rng.random() < 0.3:
        return changed_bytes(rng, raw, len(raw))
    data = json.loads(raw)
    inside, key = rng.choice(_places(data))
    match rng.randrange(4):
        case 0:
            del inside[key]
        case 1 if isinstance(inside[key], int | float):
            inside[key] = rng.choice((0, -1, 3, 65, inside[key] * 2, inside[key] + 1, 2**20))
        case 2 if isinstance(inside, dict):
            inside[key + "x"] = inside.pop(key)
        case _:
            inside[key] = rng.choice(ODD)
    return json.dumps(data).encode("utf-8", "surrogatepass")


def _places(data: Any) -> list[tuple[Any, Any]]:
    """Every value's owner and key; few of long rows."""
    found: list[tuple[Any, Any]] = []
    if isinstance(data, dict | list):
        keys = list(data) if isinstance(data, dict) else list(range(len(data)))
        for key in keys[:40]:
            found.append((data, key))
            found += _places(data[key])
    return found


def changed_safetensors(rng: Random, raw: bytes) -> bytes:
    """Its head, as bytes or as JSON."""
    size = int.from_bytes(raw[:8], "little")
    if rng.random() < 0.4:
        return changed_bytes(rng, raw, 8 + size)
    head = changed_json(rng, raw[8 : 8 + size])
    return len(head).to_bytes(8, "little") + head + raw[8 + size :]


Change = Callable[[Random, bytes], bytes]
CHANGES: Mapping[str, Change] = {".json": changed_json, ".safetensors": changed_safetensors}
"""By a file's ending."""
