"""The tensor index of one GGUF file: names, shapes and places, all checked against the file."""

from math import prod
from mmap import mmap

import gguf
from attrs import frozen

from kvtrio.model.errors import ModelFileError, safe_name
from kvtrio.model.gguf_reader import (
    Cursor,
    MetaValue,
    count_entries,
    read_magic,
    read_metadata,
)

MAX_TENSORS = 1 << 16
"""Per file; the largest public models have about two thousand."""
MAX_DIMS = 4
MAX_TENSOR_NAME = 64
MAX_ALIGNMENT = 1 << 16
DEFAULT_ALIGNMENT = 32

_SMALLEST_TENSOR = 8 + 1 + 4 + 8 + 4 + 8
_TYPES = {kind.value: kind for kind in gguf.GGMLQuantizationType}


@frozen(kw_only=True)
class TensorInfo:
    """One tensor of the index."""

    name: str
    shape: tuple[int, ...]
    """Torch order: a matrix is [out, in]."""
    ggml_type: gguf.GGMLQuantizationType
    num_bytes: int
    part: int
    """Which file of a split model, from 0."""
    offset: int
    """In bytes, from where the weights of that file start."""


@frozen(kw_only=True)
class Head:
    """What comes before the weights."""

    metadata: dict[str, MetaValue]
    tensors: tuple[TensorInfo, ...]
    base: int
    """Where the weights start."""


def read_head(data: mmap, part: int) -> Head:
    """Metadata and tensor index of a mapped file. Raises ModelFileError."""
    cursor = Cursor(data, len(data))
    read_magic(cursor)
    num_tensors = cursor.count(_SMALLEST_TENSOR, "the tensor index")
    if num_tensors > MAX_TENSORS:
        raise ModelFileError(f"damaged: it claims {num_tensors} tensors")
    metadata = read_metadata(cursor, count_entries(cursor))
    alignment = _alignment(metadata)
    tensors = tuple(_read_tensor(cursor, part) for _ in range(num_tensors))
    base = -(-cursor.at // alignment) * alignment
    _check_places(tensors, alignment, cursor.size - base)
    return Head(metadata=metadata, tensors=tensors, base=base)


def _alignment(metadata: dict[str, MetaValue]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(value) is not int or not 8 <= value <= MAX_ALIGNMENT or value & (value - 1):
        raise ModelFileError("damaged: general.alignment is not a power of two from 8 to 65536")
    return value


def _read_tensor(cursor: Cursor, part: int) -> TensorInfo:
    name = cursor.name(MAX_TENSOR_NAME, "a tensor name")
    num_dims = int(cursor.take("I"))
    if not 1 <= num_dims <= MAX_DIMS:
        raise ModelFileError(f"damaged: tensor {safe_name(name)} has {num_dims} dimensions")
    dims = [int(cursor.take("Q")) for _ in range(num_dims)]
    kind = int(cursor.take("I"))
    if kind not in _TYPES:
        raise ModelFileError(f"unsupported: tensor {safe_name(name)} has unknown type {kind}")
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[_TYPES[kind]]
    if min(dims) < 1 or dims[0] % block_size:
        raise ModelFileError(f"damaged: tensor {safe_name(name)} has an impossible shape")
    return TensorInfo(
        name=name,
        shape=tuple(reversed(dims)),
        ggml_type=_TYPES[kind],
        num_bytes=prod(dims) // block_size * block_bytes,
        part=part,
        offset=int(cursor.take("Q")),
    )


def _check_places(tensors: tuple[TensorInfo, ...], alignment: int, num_bytes: int) -> None:
    """Names are unique and places aligned, inside the ``num_bytes`` of weights, and disjoint."""
    names: set[str] = set()
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        label = f"tensor {safe_name(tensor.name)}"
        if tensor.name in names:
            raise ModelFileError(f"damaged: {label} appears twice")
        if tensor.offset % alignment:
            raise ModelFileError(f"damaged: {label} is not aligned to {alignment} bytes")
        if tensor.offset + tensor.num_bytes > num_bytes:
            raise ModelFileError(f"truncated or damaged: {label} goes past the end of the file")
        if tensor.offset < end:
            raise ModelFileError(f"damaged: {label} overlaps another one")
        names.add(tensor.name)
        end = tensor.offset + tensor.num_bytes
