"""The head of one GGUF file: metadata and tensor index, in one pass over a memory map.

1. The file is hostile: every length is compared with the bytes that are left before it is used.
2. Sizes are Python integers, so no product can wrap around.
3. Memory grows with the bytes read, never with a number that the file states.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. ``gguf.GGUFReader`` builds
objects per array element: 8 to 16 s for a vocabulary of 262,144 tokens, which take 0.2 s here.
"""

import struct
from mmap import mmap
from typing import NoReturn

import numpy as np
from attrs import define

from kvtrio.model.errors import ModelFileError, safe_name

MetaValue = bool | int | float | str | list[str] | np.ndarray
"""A scalar as Python value; text as str (UTF-8, broken bytes as lone surrogates); an array of
text as list; any other array as one-dimensional ndarray that owns its memory."""

MAX_ENTRIES = 1 << 16
"""Metadata entries; real files have about fifty."""
LONG_TEXT = 1 << 16
"""Bytes; none in an array is longer."""
MAX_KEY = 65535
"""The format's own limit, in bytes."""

# Struct codes by GGUF's number of the type. A bool is read as a byte: any but zero is true.
_SCALARS = dict(
    zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), ("B", "b", "H", "h", *"IifBQqd"), strict=True)
)
_BOOL, _STRING, _ARRAY = 7, 8, 9
_SMALLEST_ENTRY = 8 + 1 + 4 + 1
"""Bytes of a metadata entry with a one-letter key and a one-byte value."""
_LENGTH = struct.Struct("<Q")


@define(eq=False)
class Cursor:
    """A position in the map; every read checks the end first. Methods raise ModelFileError."""

    data: mmap
    size: int
    at: int = 0

    def take(self, code: str) -> int | float:
        """One little-endian number of struct format ``code``."""
        self.advance(struct.calcsize(code))
        (value,) = struct.unpack_from("<" + code, self.data, self.at - struct.calcsize(code))
        assert isinstance(value, int | float)
        return value

    def count(self, smallest: int, what: str) -> int:
        """A number of things of at least ``smallest`` bytes each, which must fit into the rest."""
        value = int(self.take("Q"))
        if value * smallest > self.size - self.at:
            raise _past_end(what)
        return value

    def text(self, what: str) -> str:
        """A string with its length before it."""
        length = self.count(1, what)
        start = self.advance(length)
        # Broken bytes take twice their size as text: only a short one may have some.
        errors = "surrogateescape" if length <= LONG_TEXT else "strict"
        with memoryview(self.data) as view, view[start : start + length] as part:
            try:
                return str(part, "utf-8", errors)
            except UnicodeDecodeError:
                raise ModelFileError(f"damaged: {what} is no text") from None

    def name(self, limit: int, what: str) -> str:
        """A string of 1 to ``limit`` bytes."""
        length = self.count(1, what)
        if not 1 <= length <= limit:
            raise ModelFileError(f"damaged: {what} has {length} bytes")
        start = self.advance(length)
        return self.data[start : start + length].decode("utf-8", "surrogateescape")

    def advance(self, num_bytes: int) -> int:
        """Step over ``num_bytes``; return where they start."""
        if num_bytes > self.size - self.at:
            raise ModelFileError("truncated: it ends inside the header")
        self.at += num_bytes
        return self.at - num_bytes


def read_magic(cursor: Cursor) -> None:
    """Step over magic and version if they are ones that we read."""
    magic = cursor.data[:4]
    if magic != b"GGUF":
        _refuse_other_format(cursor.data[:64])
    cursor.advance(4)
    version = int(cursor.take("I"))
    if version in (2, 3):
        return
    if version and version & 0xFFFF == 0:
        raise ModelFileError("a big-endian GGUF file; only little-endian ones are supported")
    if version == 1:
        raise ModelFileError("GGUF version 1, which is too old; convert the model again")
    raise ModelFileError(f"GGUF version {version}; versions 2 and 3 are supported")


def _refuse_other_format(start: bytes) -> NoReturn:
    if start.startswith(b"version https://git-lfs"):
        raise ModelFileError("a Git LFS pointer, not the model; fetch it with git lfs pull")
    # ggml, ggjt, ggmf and ggla, written as little-endian numbers.
    if start[:4] in (b"lmgg", b"tjgg", b"fmgg", b"algg"):
        raise ModelFileError("a GGML file from before GGUF; convert the model again")
    raise ModelFileError("not a GGUF file")


def read_metadata(cursor: Cursor, num_entries: int) -> dict[str, MetaValue]:
    """``num_entries`` keys with their values."""
    metadata: dict[str, MetaValue] = {}
    for _ in range(num_entries):
        key = cursor.name(MAX_KEY, "a metadata key")
        if key in metadata:
            raise ModelFileError(f"damaged: metadata key {safe_name(key)} appears twice")
        metadata[key] = _read_value(cursor, key)
    return metadata


def count_entries(cursor: Cursor) -> int:
    """The number of metadata entries, bounded."""
    num_entries = cursor.count(_SMALLEST_ENTRY, "the metadata")
    if num_entries > MAX_ENTRIES:
        raise ModelFileError(f"damaged: it claims {num_entries} metadata entries")
    return num_entries


def _read_value(cursor: Cursor, key: str) -> MetaValue:
    kind = int(cursor.take("I"))
    if kind == _STRING:
        return cursor.text(f"metadata key {safe_name(key)}")
    if kind == _ARRAY:
        return _read_array(cursor, f"metadata key {safe_name(key)}")
    if kind not in _SCALARS:
        raise ModelFileError(f"damaged: metadata key {safe_name(key)} has unknown type {kind}")
    value = cursor.take(_SCALARS[kind])
    return bool(value) if kind == _BOOL else value


def _read_array(cursor: Cursor, what: str) -> MetaValue:
    kind = int(cursor.take("I"))
    if kind == _STRING:
        return _read_texts(cursor, cursor.count(_LENGTH.size, what), what)
    if kind == _ARRAY:
        raise ModelFileError(f"unsupported: {what} has nested arrays")
    if kind not in _SCALARS:
        raise ModelFileError(f"damaged: {what} has elements of unknown type {kind}")
    dtype = np.dtype("<" + _SCALARS[kind])
    count = cursor.count(dtype.itemsize, what)
    start = cursor.advance(count * dtype.itemsize)
    array = np.frombuffer(cursor.data, dtype, count, start)
    return array != 0 if kind == _BOOL else array.copy()


def _read_texts(cursor: Cursor, count: int, what: str) -> list[str]:
    # The hot loops: half a million tokens and merges. Hence local names and no calls of ours.
    data, start, at = cursor.data, cursor.at, cursor.at
    unpack, last = _LENGTH.unpack_from, cursor.size - _LENGTH.size
    for _ in range(count):  # first only steps: a text costs several times its bytes to hold
        if at > last:
            raise _past_end(what)
        length = unpack(data, at)[0]
        at += 8 + length
        if length > LONG_TEXT and at <= cursor.size:
            raise ModelFileError(f"damaged: {what} has a text of {length} bytes")
    if at > cursor.size:
        raise _past_end(what)
    cursor.at, at = at, start
    texts = [""] * count  # no more than the 8 bytes that each has at least; growing takes twice
    for i in range(count):
        start = at + 8
        at = start + unpack(data, at)[0]
        texts[i] = data[start:at].decode("utf-8", "surrogateescape")
    return texts


def _past_end(what: str) -> ModelFileError:
    return ModelFileError(f"truncated or damaged: {what} would go past the end of the file")
