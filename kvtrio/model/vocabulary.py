"""A vocabulary as it stands in a GGUF file's metadata, checked before anything is built from it.

The keys lie under ``tokenizer.ggml.``; their meaning is that of llama.cpp's ``llama-vocab.cpp``.
"""

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import numpy as np
from attrs import field, frozen

from kvtrio.model.errors import ModelFileError

PREFIX = "tokenizer.ggml."


class TokenType(IntEnum):
    """Values of ``token_type``; any other value is treated as UNDEFINED."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@frozen(eq=False)
class Vocabulary:
    """Token texts and what the file says about them; index = token id."""

    texts: list[str]
    """Broken UTF-8 appears as lone surrogates (Python's ``surrogateescape``)."""
    types: tuple[TokenType, ...]
    scores: list[float] | None
    """SentencePiece scores, higher merges first; None where the file has none."""
    ids: dict[str, int] = field(repr=False)
    """Text to token id; texts are unique."""

    @property
    def size(self) -> int:
        return len(self.texts)


def read_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """Raises ModelFileError when an array is missing, of the wrong kind or of the wrong length."""
    texts = read_strings(metadata, "tokens")
    if not texts:
        raise ModelFileError(f"{PREFIX}tokens is missing or empty")
    texts = [text or f"[EMPTY_{i}]" for i, text in enumerate(texts)]
    ids = {text: i for i, text in enumerate(texts)}
    if len(ids) != len(texts):
        twin = next(i for i, text in enumerate(texts) if ids[text] != i)
        raise ModelFileError(f"{PREFIX}tokens: tokens {twin} and {ids[texts[twin]]} are the same")
    return Vocabulary(texts, _read_types(metadata, len(texts)), _read_scores(metadata, texts), ids)


def read_strings(metadata: Mapping[str, Any], name: str) -> list[str]:
    """A list of strings, empty if the key is absent. Raises ModelFileError on other types."""
    value = metadata.get(PREFIX + name, [])
    if isinstance(value, np.ndarray) and value.size == 0:
        return []
    if not isinstance(value, list) or not all(type(item) is str for item in value):
        raise ModelFileError(f"{PREFIX}{name} is not a list of strings")
    return value


def read_text(metadata: Mapping[str, Any], name: str) -> str:
    """A text, empty if the key is absent. Raises ModelFileError on other types."""
    value = metadata.get(PREFIX + name, "")
    if not isinstance(value, str):
        raise ModelFileError(f"{PREFIX}{name} is not a text")
    return value


def read_flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    value = metadata.get(PREFIX + name, default)
    if not isinstance(value, bool | np.bool_):
        raise ModelFileError(f"{PREFIX}{name} is not true or false")
    return bool(value)


def read_id(metadata: Mapping[str, Any], name: str, size: int) -> int | None:
    """The token id under ``name``; None if absent. Raises ModelFileError outside 0 .. size - 1."""
    value = metadata.get(PREFIX + name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ModelFileError(f"{PREFIX}{name} is not a whole number")
    if not 0 <= value < size:
        raise ModelFileError(f"{PREFIX}{name} is {int(value)}, but there are {size} tokens")
    return int(value)


def _read_types(metadata: Mapping[str, Any], size: int) -> tuple[TokenType, ...]:
    array = read_numbers(metadata, "token_type", size)
    if array is None:
        return (TokenType.NORMAL,) * size
    if array.dtype.kind not in "iu":
        raise ModelFileError(f"{PREFIX}token_type does not hold whole numbers")
    known = {int(kind): kind for kind in TokenType}
    return tuple(known.get(value, TokenType.UNDEFINED) for value in array.tolist())


def _read_scores(metadata: Mapping[str, Any], texts: list[str]) -> list[float] | None:
    array = read_numbers(metadata, "scores", len(texts))
    if array is None:
        return None
    scores = array.astype(np.float64)
    if np.isnan(scores).any():
        raise ModelFileError(f"{PREFIX}scores holds values that are not numbers")
    result: list[float] = scores.tolist()
    return result


def read_numbers(metadata: Mapping[str, Any], name: str, size: int) -> np.ndarray | None:
    """One number for each token; None if absent. Raises ModelFileError on anything else."""
    array = metadata.get(PREFIX + name)
    if array is None:
        return None
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iuf":
        raise ModelFileError(f"{PREFIX}{name} is not a list of numbers")
    if len(array) != size:
        raise ModelFileError(f"{PREFIX}{name} has {len(array)} entries for {size} tokens")
    return array
