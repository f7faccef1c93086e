"""The head of one GGUF file: metadata and tensor index, in one pass over a memory map.

1. The file is hostile: every length is compared with the bytes that are left before it is used.
2. Sizes are Python integers, so no product can wrap around.
3. Memory grows with the bytes read, never with a number that the file states.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. ``gguf.GGUFReader`` builds
objects per array element: 8 to 16 s for a vocabulary of 262,144 tokens, which take 0.2 s here.
"""

import struct
from math import prod
from mmap import mmap
from typing import NoReturn

import gguf
import numpy as np
from attrs import define, frozen

from kvtrio.model.errors import ModelFileError, safe_name

type_names = {kind.value: kind for kind in gguf.GGMLQuantizationType}

MetaValue = bool | int | float | str | list[str] | np.ndarray
"""A scalar as Python value; text as str (UTF-8, broken bytes as lone surrogates); an array of
text as list; any other array as one-dimensional ndarray that owns its memory."""

MAX_DIMS = 4
MAX_KEY = 65535
MAX_TENSOR_NAME = 64
MAX_ALIGNMENT = 1 << 16
DEFAULT_ALIGNMENT = 32

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "B",
    10: "Q",
    11: "q",
    12: "d",
}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_SMALLEST_ENTRY = 8 + 1 + 4 + 1
"""Bytes of a metadata entry with a one-letter key and a one-byte value."""
_SMALLEST_TENSOR = 8 + 1 + 4 + 8 + 4 + 8
_SIZE = struct.Struct("<Q")


@frozen(kw_only=True)
class RawTensor:
    """One line of the tensor index, checked against the file."""

    name: str
    shape: tuple[int, ...]
    """Torch order: the contiguous dimension is last."""
    ggml_type: gguf.GGMLQuantizationType
    offset: int
    """From the start of the file."""
    num_bytes: int


@frozen(kw_only=True)
class Head:
    """What comes before the weights."""

    metadata: dict[str, MetaValue]
    tensors: tuple[RawTensor, ...]


@define(eq=False)
class Cursor:
    """A position in the map; every read checks the end first."""

    data: mmap
    size: int
    at: int = 0

    def take(self, code: str) -> int | float:
        """One little-endian number of struct format ``code``."""
        self.need(struct.calcsize(code))
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize(code)
        assert isinstance(value, int | float)
        return value

    def count(self, code: str, smallest: int, what: str) -> int:
        """A number of things of at least ``smallest`` bytes each, which must fit into the rest."""
        value = int(self.take(code))
        if value * smallest > self.size - self.at:
            raise ModelFileError(f"damaged: {what} do not fit into the file")
        return value

    def need(self, num_bytes: int) -> None:
        if num_bytes > self.size - self.at:
            raise ModelFileError("truncated: it ends inside the header")

    def text(self, limit: int, what: str) -> str:
        """A string of 1 to ``limit`` bytes."""
        length = self.count("Q", 1, f"the bytes of {what}")
        if not 1 <= length <= limit:
            raise ModelFileError(f"damaged: {what} has {length} bytes")
        self.at += length
        return self.data[self.at - length : self.at].decode("utf-8", "surrogateescape")


def read_head(data: mmap) -> Head:
    """Metadata and tensor index of a mapped file. Raises ModelFileError."""
    cursor = Cursor(data, len(data))
    _check_magic(cursor)
    num_tensors = cursor.count("Q", _SMALLEST_TENSOR, "the tensors")
    num_entries = cursor.count("Q", _SMALLEST_ENTRY, "the metadata entries")
    metadata: dict[str, MetaValue] = {}
    for _ in range(num_entries):
        key = cursor.text(MAX_KEY, "a metadata key")
        if key in metadata:
            raise ModelFileError(f"damaged: metadata key {safe_name(key)} appears twice")
        metadata[key] = _read_value(cursor, key)
    index = [_read_tensor(cursor) for _ in range(num_tensors)]
    tensors = _place_tensors(index, _alignment(metadata), cursor)
    return Head(metadata=metadata, tensors=tensors)


def _check_magic(cursor: Cursor) -> None:
    magic = cursor.data[:4]
    if magic != b"GGUF":
        _refuse_other_format(cursor.data[:64])
    cursor.at = 4
    version = int(cursor.take("I"))
    if version in (2, 3):
        return
    if version & 0xFFFF == 0 and version:
        raise ModelFileError("a big-endian GGUF file; only little-endian ones are supported")
    if version == 1:
        raise ModelFileError("GGUF version 1, which is too old; convert the model again")
    raise ModelFileError(f"GGUF version {version}; versions 2 and 3 are supported")


def _refuse_other_format(start: bytes) -> NoReturn:
    if start.startswith(b"version https://git-lfs"):
        raise ModelFileError("a Git LFS pointer, not the model; fetch it with git lfs pull")
    if start[:4] in (b"lmgg", b"tjgg", b"fmgg", b"algg"):
        raise ModelFileError("a GGML file from before GGUF; convert the model again")
    raise ModelFileError("not a GGUF file")


def _read_value(cursor: Cursor, key: str) -> MetaValue:
    kind = int(cursor.take("I"))
    if kind == _STRING:
        length = cursor.count("Q", 1, f"the bytes of {safe_name(key)}")
        cursor.at += length
        raw = cursor.data[cursor.at - length : cursor.at]
        return raw.decode("utf-8", "surrogateescape")
    if kind == _ARRAY:
        return _read_array(cursor, key)
    if kind not in _SCALARS:
        raise ModelFileError(f"damaged: metadata key {safe_name(key)} has unknown type {kind}")
    value = cursor.take(_SCALARS[kind])
    return bool(value) if kind == _BOOL else value


def _read_array(cursor: Cursor, key: str) -> MetaValue:
    kind = int(cursor.take("I"))
    what = f"the elements of {safe_name(key)}"
    if kind == _STRING:
        return _read_texts(cursor, cursor.count("Q", 8, what))
    if kind not in _SCALARS:
        problem = "nested arrays" if kind == _ARRAY else f"elements of unknown type {kind}"
        raise ModelFileError(f"unsupported: metadata key {safe_name(key)} has {problem}")
    dtype = np.dtype("<" + _SCALARS[kind])
    count = cursor.count("Q", dtype.itemsize, what)
    array = np.frombuffer(cursor.data, dtype, count, cursor.at).copy()
    cursor.at += array.nbytes
    return array != 0 if kind == _BOOL else array


def _read_texts(cursor: Cursor, count: int) -> list[str]:
    # The one hot loop: half a million tokens and merges. Hence local names and no calls of ours.
    data, size, at = cursor.data, cursor.size, cursor.at
    unpack, texts = _SIZE.unpack_from, []
    last = size - 8
    for _ in range(count):
        if at > last:
            break
        start = at + 8
        at = start + unpack(data, at)[0]
        if at > size:
            break
        texts.append(data[start:at].decode("utf-8", "surrogateescape"))
    if len(texts) < count:
        raise ModelFileError("truncated: it ends inside the header")
    cursor.at = at
    return texts


def _alignment(metadata: dict[str, MetaValue]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(value) is not int or not 8 <= value <= MAX_ALIGNMENT or value & (value - 1):
        raise ModelFileError("damaged: general.alignment is not a power of two from 8 to 65536")
    return value


def _read_tensor(cursor: Cursor) -> RawTensor:
    """An index line as it stands; its offset still counts from the start of the weights."""
    name = cursor.text(MAX_TENSOR_NAME, "a tensor name")
    label = f"tensor {safe_name(name)}"
    num_dims = int(cursor.take("I"))
    if not 1 <= num_dims <= MAX_DIMS:
        raise ModelFileError(f"damaged: {label} has {num_dims} dimensions")
    dims = [int(cursor.take("Q")) for _ in range(num_dims)]
    kind = int(cursor.take("I"))
    if kind not in type_names:
        raise ModelFileError(f"unsupported: {label} has unknown type {kind}")
    block, block_bytes = gguf.GGML_QUANT_SIZES[type_names[kind]]
    if min(dims) < 1 or dims[0] % block:
        raise ModelFileError(f"damaged: {label} has an impossible shape")
    return RawTensor(
        name=name,
        shape=tuple(reversed(dims)),
        ggml_type=type_names[kind],
        offset=int(cursor.take("Q")),
        num_bytes=prod(dims) // block * block_bytes,
    )


def _place_tensors(index: list[RawTensor], alignment: int, cursor: Cursor) -> tuple[RawTensor, ...]:
    """The index with offsets from the start of the file, none outside it, no two overlapping."""
    base = -(-cursor.at // alignment) * alignment
    placed = tuple(_moved(tensor, base) for tensor in index)
    names: set[str] = set()
    for tensor in placed:
        label = f"tensor {safe_name(tensor.name)}"
        if tensor.name in names:
            raise ModelFileError(f"damaged: {label} appears twice")
        names.add(tensor.name)
        if tensor.offset % alignment:
            raise ModelFileError(f"damaged: {label} is not aligned to {alignment} bytes")
        if tensor.offset + tensor.num_bytes > cursor.size:
            raise ModelFileError(f"truncated or damaged: {label} ends after the end of the file")
    _check_overlap(placed)
    return placed


def _moved(tensor: RawTensor, base: int) -> RawTensor:
    return RawTensor(
        name=tensor.name,
        shape=tensor.shape,
        ggml_type=tensor.ggml_type,
        offset=tensor.offset + base,
        num_bytes=tensor.num_bytes,
    )


def _check_overlap(tensors: tuple[RawTensor, ...]) -> None:
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            raise ModelFileError(f"damaged: tensor {safe_name(tensor.name)} overlaps another one")
        end = tensor.offset + tensor.num_bytes
