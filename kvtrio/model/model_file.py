"""A model on disk, whatever its format: one GGUF file, a split one, or a Hugging Face folder."""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import numpy as np

from kvtrio.model.gguf_index import TensorInfo
from kvtrio.model.gguf_reader import MetaValue
from kvtrio.model.pretokenizers import PreTokenizer


class ModelFile(Protocol):
    """What reading a model needs; see ``GGUFFile`` and ``FolderFile``."""

    @property
    def path(self) -> Path: ...
    @property
    def metadata(self) -> Mapping[str, MetaValue]: ...
    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...
    @property
    def part_paths(self) -> tuple[Path, ...]: ...
    @property
    def pre_tokenizer(self) -> PreTokenizer | None: ...
    def raw(self, name: str) -> np.ndarray: ...
    def dequantise(self, name: str) -> np.ndarray: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
