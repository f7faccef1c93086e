"""A model file with its matrices in fewer bits, as llama.cpp's llama-quantize makes them.

1. Only matrices in F32, F16 or BF16 change. Norms, biases, convolutions and the routers of experts
   stay, as in llama.cpp; so do matrices whose rows are no whole blocks.
2. The head is Q8_0 in either case: its errors meet the logits directly, and llama.cpp gives it a
   finer type, too (Q6_K beside Q4_0, for which there is no formula here). Where it is the
   embedding as well, that goes with it; an embedding of its own gets the type asked for.
3. Bits are those of ggml's reference quantiser (ggml-quants.c), through ``gguf.quants``.
4. Values are float32 a slice at a time, never a whole model at once.
"""

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import gguf
import numpy as np
from attrs import define, evolve, field
from blake3 import blake3

from kvtrio.model.errors import ModelFileError
from kvtrio.model.gguf_file import expanded
from kvtrio.model.gguf_index import TensorInfo
from kvtrio.model.gguf_reader import MetaValue
from kvtrio.model.layer_tensors import is_matrix
from kvtrio.model.model_file import ModelFile
from kvtrio.model.pretokenizers import PreTokenizer

Kind = gguf.GGMLQuantizationType
Wanted = Literal["q8_0", "q4_0"]
KINDS: Mapping[Wanted, Kind] = {"q8_0": Kind.Q8_0, "q4_0": Kind.Q4_0}
FILE_TYPES: Mapping[Wanted, int] = {
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0.value,
    "q4_0": gguf.LlamaFileType.MOSTLY_Q4_0.value,
}
WIDE = (Kind.F32, Kind.F16, Kind.BF16)
EMBEDDING, HEAD, ROUTER = "token_embd.weight", "output.weight", "ffn_gate_inp.weight"
RULES = b"1"
"""Raised when the same weights become other bytes: it is part of what the model is known by."""
SLICE_VALUES = 1 << 19
"""Of float32, per thread."""


@define(eq=False)
class QuantisedFile:
    """Shows another file's matrices in fewer bits; ``close`` closes that one, too."""

    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, MetaValue]
    changed: tuple[str, ...]
    """Tensors that are shown in another type than they are stored in."""
    _source: ModelFile
    _kept: Mapping[str, np.ndarray] = field(factory=dict)
    """Bytes of those that were made before; any other is made when it is asked for."""

    @property
    def path(self) -> Path:
        """Of the model that it is made from."""
        return self._source.path

    @property
    def part_paths(self) -> tuple[Path, ...]:
        """Of the model that it is made from."""
        return self._source.part_paths

    @property
    def pre_tokenizer(self) -> PreTokenizer | None:
        """As the model's files say."""
        return self._source.pre_tokenizer

    def raw(self, name: str) -> np.ndarray:
        """The bytes of a tensor in its type: uint8 [num_bytes]. Raises KeyError."""
        tensor = self.tensors[name]
        if name not in self.changed:
            return self._source.raw(name)
        if name in self._kept:
            return self._kept[name]
        made, end = np.empty(tensor.num_bytes, np.uint8), 0
        for piece in self.pieces(name):
            made[end : end + piece.size] = piece
            end += piece.size
        return made

    def dequantise(self, name: str) -> np.ndarray:
        """A tensor as float32 of its shape, in memory of its own. Raises KeyError."""
        return expanded(self.raw(name), self.tensors[name])

    def pieces(self, name: str) -> Iterator[np.ndarray]:
        """The bytes of one of ``changed`` in order, uint8, made anew on all cores."""
        stored, kind = self._source.tensors[name], self.tensors[name].ggml_type
        rows = self._source.raw(name).reshape(prod(stored.shape[:-1]), -1)
        step = max(1, SLICE_VALUES // stored.shape[-1])
        slices = [rows[first : first + step] for first in range(0, len(rows), step)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            yield from pool.map(lambda each: _quantise(each, stored.ggml_type, kind), slices)

    def with_kept(self, kept: Mapping[str, np.ndarray]) -> Self:
        """The same over bytes that were made before."""
        return evolve(self, kept=kept)

    def close(self) -> None:
        """Close the model that it is made from; what was made goes with its last view."""
        self._kept = {}
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def quantised(source: ModelFile, wanted: Wanted) -> QuantisedFile:
    """Nothing is computed yet. Raises ModelFileError where there is nothing to change."""
    kinds = _kinds(source.tensors, KINDS[wanted])
    if not kinds:
        raise ModelFileError(f"--quantize {wanted}: no matrix of it is in F32, F16 or BF16")
    shown = {
        name: _shown(info, kinds[name]) if name in kinds else info
        for name, info in source.tensors.items()
    }
    metadata = {**source.metadata, "general.file_type": FILE_TYPES[wanted]}
    return QuantisedFile(shown, metadata, tuple(kinds), source)


def quantised_digest(content: bytes, wanted: Wanted) -> bytes:
    """What the quantised model is known by, 32 bytes: ``content`` is the digest of its source.

    It follows from the source's bytes, the type and the rules above; names and times have no part
    in it, so neither a copy under another name nor an old time on new bytes can mislead.
    """
    return blake3(b"quantised " + RULES + b" " + wanted.encode() + b" " + content).digest()


def _kinds(tensors: Mapping[str, TensorInfo], kind: Kind) -> dict[str, Kind]:
    """The tensors to change, and into what."""
    head = HEAD if HEAD in tensors else EMBEDDING
    block_size, _ = gguf.GGML_QUANT_SIZES[kind]
    return {
        name: Kind.Q8_0 if name == head else kind
        for name, info in tensors.items()
        if is_matrix(name, info.shape)
        and info.ggml_type in WIDE
        and not info.shape[-1] % block_size
        and not name.endswith(ROUTER)
    }


def _shown(info: TensorInfo, kind: Kind) -> TensorInfo:
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    num_bytes = prod(info.shape) // block_size * block_bytes
    return evolve(info, ggml_type=kind, num_bytes=num_bytes)


def _quantise(rows: np.ndarray, stored: Kind, kind: Kind) -> np.ndarray:
    """uint8. A weight that is not finite makes a scale that is not: the loader refuses it."""
    with np.errstate(all="ignore"):
        values = gguf.quants.dequantize(rows, stored)
        made: np.ndarray = gguf.quants.quantize(values, kind)
    return made.reshape(-1)
