"""A Hugging Face folder as a model file: config.json, safetensors, and the tokenizer's files.

It shows the metadata and tensors that a GGUF file of the same model has, so everything behind it
reads either. Weights stay in the mapped files; what is arranged otherwise is made when asked for.
"""

from collections.abc import Mapping
from contextlib import suppress
from math import prod
from mmap import mmap
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import gguf
import numpy as np
from attrs import define, field

from kvtrio.model.errors import ModelFileError, safe_name
from kvtrio.model.folder_config import FolderModel
from kvtrio.model.folder_kinds import read_config
from kvtrio.model.folder_moves import Recipe, Shape
from kvtrio.model.folder_ropes import made_factors
from kvtrio.model.folder_tensors import recipes
from kvtrio.model.folder_tokenizer import read_tokenizer
from kvtrio.model.gguf_file import expanded, map_file
from kvtrio.model.gguf_index import TensorInfo
from kvtrio.model.gguf_reader import MetaValue
from kvtrio.model.layer_tensors import is_matrix
from kvtrio.model.paths import OpenPath, open_path
from kvtrio.model.pretokenizers import PreTokenizer
from kvtrio.model.safetensors_file import SafetensorsFile, parse_json, read_safetensors

CONFIG, INDEX, WEIGHTS = "config.json", "model.safetensors.index.json", "model.safetensors"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "consolidated.00.pth")
MAX_JSON_BYTES = 64 << 20
MAX_PARTS = 1000
Kind = gguf.GGMLQuantizationType
_TYPES = {"F32": Kind.F32, "F16": Kind.F16, "BF16": Kind.BF16}
_STORED: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "U8": np.dtype(np.uint8),
}


@define(eq=False)
class FolderFile:
    """An open model folder; ``close`` it, or use it as a context manager. As ``GGUFFile``."""

    path: Path
    metadata: Mapping[str, MetaValue]
    tensors: Mapping[str, TensorInfo]
    total_bytes: int
    part_paths: tuple[Path, ...]
    """config.json and the files of weights, in order: what decides a result."""
    pre_tokenizer: PreTokenizer | None
    """How the tokenizer cuts words, where the files say so."""
    _recipes: Mapping[str, Recipe]
    _where: Mapping[str, SafetensorsFile]
    """Stored tensors, by name."""
    _made: Mapping[str, np.ndarray]
    """Tensors that are stored nowhere."""
    _maps: list[mmap] = field(factory=list)

    @property
    def num_parameters(self) -> int:
        """Values in all tensors."""
        return sum(prod(tensor.shape) for tensor in self.tensors.values())

    @property
    def tensor_bytes(self) -> int:
        """Size of all tensors as they are shown."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    def raw(self, name: str) -> np.ndarray:
        """The bytes of a tensor in its type: uint8 [num_bytes], a read-only view of the file where
        nothing had to be arranged. Raises KeyError for a name not in ``tensors``."""
        tensor = self.tensors[name]
        if name in self._made:
            return self._made[name].reshape(-1).view(np.uint8)
        recipe = self._recipes[name]
        arrays = [self._stored(source) for source in recipe.sources]
        values = recipe.move.run(arrays) if recipe.move else arrays[0]
        if tensor.ggml_type is Kind.F32:
            values = _wide(values, self._where[recipe.sources[0]].tensors[recipe.sources[0]].dtype)
            values = recipe.compute(values) if recipe.compute else values
            values = values.astype(np.float32, copy=False)
        return np.ascontiguousarray(values).reshape(-1).view(np.uint8)

    def dequantise(self, name: str) -> np.ndarray:
        """A tensor as float32 of its shape, in memory of its own. Raises KeyError."""
        tensor, raw = self.tensors[name], self.raw(name)
        if tensor.ggml_type is Kind.MXFP4:
            return expanded(raw, tensor)
        kind = tensor.ggml_type.name
        values: np.ndarray = _wide(raw.view(_STORED[kind]), kind).reshape(tensor.shape)
        return values if values.flags.writeable else values.copy()

    def _stored(self, source: str) -> np.ndarray:
        file = self._where[source]
        tensor = file.tensors[source]
        return file.raw(source).view(_STORED[tensor.dtype]).reshape(tensor.shape)

    def close(self) -> None:
        """Unmap the files, except those that a ``raw`` view still uses: they go with the view."""
        for data in self._maps:
            with suppress(BufferError):
                data.close()
        self._maps.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _wide(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "BF16":  # the upper half of a float32
        wide: np.ndarray = np.left_shift(values, 16, dtype=np.uint32).view(np.float32)
        return wide
    return values.astype(np.float32, copy=False)


def open_folder(path: Path) -> FolderFile:
    """Read a folder's JSON and map its weights; the files must not shrink while they are open.

    Raises ModelFileError with one line that names the folder and what is wrong.
    """
    maps: list[mmap] = []
    try:
        with open_path(path) as folder:
            return _open(path, folder, maps)
    except BaseException:
        for data in maps:
            with suppress(BufferError):
                data.close()
        raise


def _open(path: Path, folder: OpenPath, maps: list[mmap]) -> FolderFile:
    if not folder.has(CONFIG):
        raise ModelFileError(f"a folder without {CONFIG} is no model")
    model = read_config(_json(folder, CONFIG))
    parts = [path / name for name in _part_names(folder)]
    where: dict[str, SafetensorsFile] = {}
    for part in parts:
        maps.append(map_file(part))
        file = _read_part(maps[-1], part)
        if double := where.keys() & file.tensors.keys():
            raise ModelFileError(f"tensor {safe_name(min(double))} is in two files")
        where |= dict.fromkeys(file.tensors, file)
    shapes = {name: file.tensors[name].shape for name, file in where.items()}
    wanted = recipes(model, shapes)
    made = made_factors(model)
    tensors = {name: _info(name, recipe, where, shapes) for name, recipe in wanted.items()}
    tensors |= {name: _made_info(name, array) for name, array in made.items()}
    _check_vocabulary(model, tensors)
    tokenizer = read_tokenizer(folder, model)
    return FolderFile(
        path=path,
        metadata=_metadata(path, model) | dict(tokenizer.metadata),
        tensors=tensors,
        total_bytes=sum(map(len, maps)),
        part_paths=(path / CONFIG, *parts),
        pre_tokenizer=tokenizer.rules,
        recipes=wanted,
        where=where,
        made=made,
        maps=maps,
    )


def _check_vocabulary(model: FolderModel, tensors: Mapping[str, TensorInfo]) -> None:
    """Before anything is as large as config.json says that the vocabulary is."""
    embedding, size = tensors.get("token_embd.weight"), model.config.whole("vocab_size")
    if embedding is None or embedding.shape[0] != size:
        raise ModelFileError(f"config.json: vocab_size {size} is not the number of embeddings")


def _json(folder: OpenPath, name: str) -> bytes:
    with folder.child(name) as child:
        return bytes(child.read(MAX_JSON_BYTES))


def _part_names(folder: OpenPath) -> list[str]:
    if folder.has(INDEX):
        return _parts_of_index(_json(folder, INDEX))
    if folder.has(WEIGHTS):
        return [WEIGHTS]
    for name in PICKLES:
        if folder.has(name):
            raise ModelFileError(f"{name} is a pickle, which can run code; save it as {WEIGHTS}")
    raise ModelFileError(f"neither {WEIGHTS} nor {INDEX} is there")


def _parts_of_index(raw: bytes) -> list[str]:
    """Names of the files; they lie in the folder itself."""
    try:
        data = parse_json(raw)
    except ValueError:
        data = None
    weights = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(weights, dict) or not all(type(name) is str for name in weights.values()):
        raise ModelFileError(f"{INDEX} is damaged")
    names = sorted(set(weights.values()))
    is_plain = all(name.endswith(".safetensors") and "/" not in name for name in names)
    if not is_plain or not 1 <= len(names) <= MAX_PARTS:
        raise ModelFileError(f"{INDEX} names files that are no safetensors of this folder")
    return names


def _read_part(data: mmap, path: Path) -> SafetensorsFile:
    try:
        return read_safetensors(data)
    except ModelFileError as error:
        raise ModelFileError(f"{safe_name(path.name)}: {error}") from None


def _info(
    name: str, recipe: Recipe, where: Mapping[str, SafetensorsFile], shapes: Mapping[str, Shape]
) -> TensorInfo:
    kinds = {where[source].tensors[source].dtype for source in recipe.sources}
    if recipe.is_mxfp4 and kinds == {"U8"}:
        return _tensor(name, recipe.shape(shapes), Kind.MXFP4)
    if len(kinds) != 1 or not kinds <= _TYPES.keys():
        raise ModelFileError(
            f"tensor {safe_name(recipe.sources[0])} is not F32, F16 or BF16 throughout"
        )
    shape = recipe.shape(shapes)
    is_kept = is_matrix(name, shape) and recipe.compute is None
    kind = _TYPES[kinds.pop()] if is_kept else Kind.F32
    return _tensor(name, shape, kind)


def _made_info(name: str, array: np.ndarray) -> TensorInfo:
    return _tensor(name, array.shape, Kind.F32)


def _tensor(name: str, shape: Shape, kind: Kind) -> TensorInfo:
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    num_bytes = prod(shape) // block_size * block_bytes
    return TensorInfo(name=name, shape=shape, ggml_type=kind, num_bytes=num_bytes, part=0, offset=0)


def _metadata(path: Path, model: FolderModel) -> dict[str, MetaValue]:
    return {
        "general.architecture": model.architecture,
        "general.name": path.resolve().name,
        **{f"{model.architecture}.{key}": value for key, value in model.values.items()},
    }
