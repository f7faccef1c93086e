"""Safetensors files, read as hostile: the header is checked whole before a value is touched.

Format: https://github.com/huggingface/safetensors#format. The library's numpy interface is not used
because it has no bfloat16, in which most adapters are stored.
"""

import json
from collections.abc import Mapping
from math import prod
from mmap import mmap

import numpy as np
from attrs import frozen

from kvtrio.model.errors import ModelFileError, safe_name

MAX_HEADER = 1 << 24
MAX_TENSORS = 1 << 16
MAX_TENSOR_NAME = 512
MAX_DIMS = 8
MAX_NUMBER = 1 << 62
_SIZES = {
    name: size
    for size, names in (
        (1, "BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E8M0"),
        (2, "F16 BF16 I16 U16"),
        (4, "F32 I32 U32"),
        (8, "F64 I64 U64 C64"),
    )
    for name in names.split()
}
_FLOATS = {"F16": "<f2", "BF16": "<u2", "F32": "<f4"}


@frozen(kw_only=True)
class StoredTensor:
    """One entry of the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    """Of its bytes, from where the values begin."""


@frozen(eq=False)
class SafetensorsFile:
    """A checked header over the file's bytes."""

    tensors: Mapping[str, StoredTensor]
    _data: mmap
    _base: int

    def raw(self, name: str) -> np.ndarray:
        """The stored bytes of a tensor: uint8, a read-only view of the file. Raises KeyError."""
        tensor = self.tensors[name]
        return np.frombuffer(
            self._data, np.uint8, tensor.end - tensor.start, self._base + tensor.start
        )

    def values(self, name: str) -> np.ndarray:
        """A tensor as float32 of its shape, in memory of its own.

        Raises KeyError for a name not in ``tensors``, ModelFileError for a type that is no float of
        16 or 32 bits.
        """
        tensor = self.tensors[name]
        if tensor.dtype not in _FLOATS:
            raise ModelFileError(
                f"tensor {safe_name(name)} has type {tensor.dtype}; F32, F16 and BF16 are supported"
            )
        count, start = prod(tensor.shape), self._base + tensor.start
        stored = np.frombuffer(self._data, _FLOATS[tensor.dtype], count, start)
        stored = stored.reshape(tensor.shape)
        if tensor.dtype == "BF16":  # the upper half of a float32
            stored = np.left_shift(stored, 16, dtype=np.uint32).view(np.float32)
        values: np.ndarray = stored.astype(np.float32)
        return values


def read_safetensors(data: mmap) -> SafetensorsFile:
    """The file in ``data``. Raises ModelFileError with one line about what is wrong."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data) - 8:
        raise ModelFileError("truncated or damaged: the header would go past the end of the file")
    if size > MAX_HEADER:
        raise ModelFileError(f"damaged: its header has {size} bytes")
    header = _parse(data[8 : 8 + size])
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise ModelFileError(f"damaged: it claims {len(header)} tensors")
    tensors = {name: _tensor(name, entry) for name, entry in header.items()}
    _check_places(tensors, len(data) - 8 - size)
    return SafetensorsFile(tensors, data, 8 + size)


def parse_json(raw: bytes, *, infinite: bool = False) -> object:
    """JSON without repeated keys, numbers that are none, and halves of characters; ``infinite``:
    but Infinity is a number, as Python writes it. Raises ValueError."""
    text = raw.decode("utf-8-sig")
    constant = _infinity if infinite else _no_number
    try:
        data = json.loads(text, object_pairs_hook=_object, parse_constant=constant)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(data, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return data


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    known = dict(pairs)
    if len(known) < len(pairs):
        raise ValueError("a key appears twice")
    return known


def _no_number(text: str) -> object:
    raise ValueError(text)


def _infinity(text: str) -> float:
    if text == "NaN":
        raise ValueError(text)
    return float(text)


def _parse(raw: bytes) -> dict[str, object]:
    try:
        header = parse_json(raw)
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise ModelFileError("not a safetensors file, or its header is damaged")
    return header


def _tensor(name: str, entry: object) -> StoredTensor:
    label = f"tensor {safe_name(name)}"
    if not 1 <= len(name) <= MAX_TENSOR_NAME:
        raise ModelFileError(f"damaged: a tensor name has {len(name)} characters")
    fields = entry if isinstance(entry, dict) else {}
    shape, places = _numbers(fields.get("shape")), _numbers(fields.get("data_offsets"))
    kind = fields.get("dtype")
    if not isinstance(kind, str) or kind not in _SIZES:
        raise ModelFileError(f"damaged: {label} has an unknown type")
    if shape is None or len(shape) > MAX_DIMS:
        raise ModelFileError(f"damaged: {label} has an impossible shape")
    if places is None or len(places) != 2 or places[1] - places[0] != prod(shape) * _SIZES[kind]:
        raise ModelFileError(f"damaged: {label} has bytes that do not fit its shape")
    return StoredTensor(dtype=kind, shape=shape, start=places[0], end=places[1])


def _numbers(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list):
        return None
    is_good = all(type(number) is int and 0 <= number < MAX_NUMBER for number in value)
    return tuple(value) if is_good else None


def _check_places(tensors: Mapping[str, StoredTensor], num_bytes: int) -> None:
    """The tensors fill the ``num_bytes`` of values without hole or overlap, as the format asks."""
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if tensor.start != end:
            raise ModelFileError(f"damaged: tensor {safe_name(name)} leaves a hole or overlaps")
        end = tensor.end
    if end != num_bytes:
        raise ModelFileError("truncated or damaged: the tensors do not fill the file")
