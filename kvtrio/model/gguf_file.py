"""A GGUF model on disk: metadata, tensor index and weights over memory maps, split or not."""

import re
import stat
from collections.abc import Mapping
from contextlib import suppress
from math import prod
from mmap import ACCESS_READ, mmap
from pathlib import Path
from types import TracebackType
from typing import Self

import gguf
import numpy as np
from attrs import define, frozen

from kvtrio.model.errors import ModelFileError, safe_name
from kvtrio.model.fused import unfused
from kvtrio.model.gguf_index import Head, TensorInfo, read_head
from kvtrio.model.gguf_reader import MetaValue

__all__ = ["DEQUANTISABLE", "GGUFFile", "MetaValue", "TensorInfo", "open_gguf", "parse_gguf"]

_FORMULAS = (
    "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ1_S IQ1_M IQ2_XXS IQ2_XS "
    "IQ2_S IQ3_XXS IQ3_S IQ4_NL IQ4_XS TQ1_0 TQ2_0 MXFP4 NVFP4"
)
DEQUANTISABLE = frozenset(gguf.GGMLQuantizationType[name] for name in _FORMULAS.split())
"""What ``gguf.quants.dequantize`` knows; a test compares."""

_PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


@frozen
class _Part:
    """One mapped file."""

    data: mmap
    head: Head


@define(eq=False)
class GGUFFile:
    """An open model; ``close`` it, or use it as a context manager."""

    path: Path
    metadata: Mapping[str, MetaValue]
    """Of the first part."""
    tensors: Mapping[str, TensorInfo]
    total_bytes: int
    """Size of all parts on disk."""
    part_paths: tuple[Path, ...]
    """All parts, in order."""
    _parts: list[_Part]

    @property
    def pre_tokenizer(self) -> None:
        """The metadata names its rules for cutting words."""
        return None

    @property
    def num_parameters(self) -> int:
        """Values in all tensors."""
        return sum(prod(tensor.shape) for tensor in self.tensors.values())

    @property
    def tensor_bytes(self) -> int:
        """Size of all tensors as they are stored."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    def raw(self, name: str) -> np.ndarray:
        """The stored bytes of a tensor: read-only uint8 [num_bytes] over the map, no copy.

        The view keeps the map alive after ``close``. Raises KeyError for a name not in ``tensors``.
        """
        tensor = self.tensors[name]
        part = self._parts[tensor.part]
        start = part.head.base + tensor.offset
        return np.frombuffer(part.data, np.uint8, tensor.num_bytes, start)

    def dequantise(self, name: str) -> np.ndarray:
        """A tensor as float32 of its shape, in memory of its own.

        Raises KeyError for a name not in ``tensors``, ModelFileError for a type without a formula.
        """
        return expanded(self.raw(name), self.tensors[name])

    def close(self) -> None:
        """Unmap the files, except parts that a ``raw`` view still uses: those go with the view."""
        _unmap(self._parts)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def expanded(raw: np.ndarray, tensor: TensorInfo) -> np.ndarray:
    """The values that ``raw`` stands for: float32 of the tensor's shape, in memory of their own.

    Raises ModelFileError for a type without a formula.
    """
    if tensor.ggml_type not in DEQUANTISABLE:
        name, kind = safe_name(tensor.name), tensor.ggml_type.name
        raise ModelFileError(f"tensor {name} has type {kind}, which is unsupported")
    rows = raw.reshape(*tensor.shape[:-1], -1)
    # Damaged scales may be infinite; that is for whoever looks at the values, not a warning.
    with np.errstate(all="ignore"):
        values = gguf.quants.dequantize(rows, tensor.ggml_type)
    values = values.reshape(tensor.shape)
    return values if values.flags.writeable else values.copy()


def open_gguf(path: Path) -> GGUFFile:
    """Map a model and read its head; given the first part of a split model, all its parts.

    The files must not shrink while they are open: the system kills a process that reads past
    the end of a mapped file. Raises ModelFileError with one line that names the file and what is
    wrong with it.
    """
    parts: list[_Part] = []
    paths = [path]
    try:
        parts.append(_open_part(path, 0))
        for other in _other_parts(path, parts[0].head):
            paths.append(other)
            parts.append(_open_part(other, len(parts)))
            _check_part(other, parts)
        tensors = _merge(path, parts)
    except BaseException:
        _unmap(parts)
        raise
    total, metadata = sum(len(part.data) for part in parts), parts[0].head.metadata
    return GGUFFile(path, metadata, unfused(metadata, tensors), total, tuple(paths), parts)


def parse_gguf(data: mmap, path: Path) -> GGUFFile:
    """A file of one part that is in memory; ``path`` is only remembered. Raises ModelFileError."""
    head = read_head(data, 0)
    if _split_number(path, head, "split.count", 1) > 1:
        raise ModelFileError("one part of a split file, which is not supported here")
    tensors = {tensor.name: tensor for tensor in head.tensors}
    return GGUFFile(path, head.metadata, tensors, len(data), (path,), [_Part(data, head)])


def _open_part(path: Path, number: int) -> _Part:
    data = map_file(path)
    try:
        return _Part(data, read_head(data, number))
    except ModelFileError as error:
        data.close()
        raise _wrong(path, str(error)) from None


def _unmap(parts: list[_Part]) -> None:
    for part in parts:
        # A map with views cannot be closed; the last view takes it along.
        with suppress(BufferError):
            part.data.close()
    parts.clear()


def map_file(path: Path) -> mmap:
    """A file that the operator named, to be read. Raises ModelFileError with its name."""
    try:
        # Looked at before opening: opening a named pipe would wait for a writer.
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise _wrong(path, kind)
        if status.st_size == 0:
            raise _wrong(path, "empty")
        with path.open("rb") as file:
            return mmap(file.fileno(), 0, access=ACCESS_READ)
    except FileNotFoundError:
        raise _wrong(path, "no such file") from None
    except PermissionError:
        raise _wrong(path, "no permission to read it") from None
    except (OSError, ValueError) as error:
        if isinstance(error, ModelFileError):
            raise
        raise _wrong(path, "it cannot be read") from None


def _wrong(path: Path, problem: str) -> ModelFileError:
    return ModelFileError(f"{safe_name(path.name)}: {problem}")


def _other_parts(path: Path, first: Head) -> list[Path]:
    """Paths of the second to last part, all of which exist."""
    count = _split_number(path, first, "split.count", 1)
    if count <= 1:
        return []
    match = _PART_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        problem = f"part of a split model, but its name does not end in -00001-of-{count:05}.gguf"
        raise _wrong(path, problem)
    if int(match["number"]) != 1 or _split_number(path, first, "split.no", 0) != 0:
        raise _wrong(path, "not the first part of a split model; give the first part")
    stem = match["stem"]
    others = [path.with_name(f"{stem}-{n:05}-of-{count:05}.gguf") for n in range(2, count + 1)]
    missing = [other for other in others if not other.exists()]
    if missing:
        raise _wrong(missing[0], f"missing ({len(missing)} of {count} parts are)")
    return others


def _check_part(path: Path, parts: list[_Part]) -> None:
    """The last of ``parts`` was read from ``path`` and must follow the ones before."""
    count = _split_number(path, parts[0].head, "split.count", 1)
    if _split_number(path, parts[-1].head, "split.count", 1) != count:
        raise _wrong(path, "says another number of parts than the first part")
    if _split_number(path, parts[-1].head, "split.no", 0) != len(parts) - 1:
        raise _wrong(path, "says that it is another part than its name says")


def _split_number(path: Path, head: Head, key: str, default: int) -> int:
    value = head.metadata.get(key, default)
    if type(value) is not int or not 0 <= value <= 65535:
        raise _wrong(path, f"damaged: {key} is not a small number")
    return value


def _merge(path: Path, parts: list[_Part]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for part in parts:
        for tensor in part.head.tensors:
            if tensor.name in tensors:
                raise _wrong(path, f"damaged: tensor {safe_name(tensor.name)} is in two parts")
            tensors[tensor.name] = tensor
    stated = parts[0].head.metadata.get("split.tensors.count")
    if len(parts) > 1 and stated is not None and stated != len(tensors):
        raise _wrong(path, "damaged: the parts do not hold the stated number of tensors")
    return tensors
