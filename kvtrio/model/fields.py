"""Typed, bounded access to the metadata of a model file: no number gets further unchecked."""

from collections.abc import Mapping

import numpy as np
from attrs import frozen

from kvtrio.model.errors import ModelFileError, safe_name
from kvtrio.model.gguf_reader import MetaValue


@frozen
class Fields:
    """The keys under ``prefix`` (``llama.`` for example). All methods raise ModelFileError."""

    metadata: Mapping[str, MetaValue]
    prefix: str

    def has(self, key: str) -> bool:
        return self.prefix + key in self.metadata

    def integer(self, key: str, most: int, default: int | None = None, least: int = 1) -> int:
        """A whole number in ``least``..``most``."""
        value = self._get(key, default)
        return self._whole(key, value, least, most)

    def number(self, key: str, limits: tuple[float, float], default: float | None = None) -> float:
        """A finite number in ``limits``, both ends included."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "not a number")
        # Written so that NaN fails too.
        if not limits[0] <= value <= limits[1]:
            raise self._wrong(key, f"outside {limits[0]:g} to {limits[1]:g}")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "not text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "neither true nor false")
        return value

    def per_layer(self, key: str, num_layers: int, most: int, least: int = 1) -> tuple[int, ...]:
        """One whole number in ``least``..``most`` per layer; a file may hold one for all."""
        value = self._get(key, None)
        if isinstance(value, np.ndarray):
            numbers = self._array(key, value, num_layers)
            return tuple(self._whole(key, number, least, most) for number in numbers)
        return (self._whole(key, value, least, most),) * num_layers

    def pattern(self, key: str, num_layers: int, default: int) -> tuple[bool, ...]:
        """Which layers are not full attention. A number n: all but every n-th (0: all); or one
        flag each."""
        value = self._get(key, default)
        if isinstance(value, np.ndarray):
            return tuple(bool(flag) for flag in self._array(key, value, num_layers))
        period = self._whole(key, value, 0, num_layers + 1_000_000)
        return tuple(not period or i % period < period - 1 for i in range(num_layers))

    def _get(self, key: str, default: MetaValue | None) -> MetaValue:
        value = self.metadata.get(self.prefix + key, default)
        if value is None:
            raise ModelFileError(f"metadata key {safe_name(self.prefix + key)} is missing")
        return value

    def _array(self, key: str, value: np.ndarray, num_layers: int) -> list[int]:
        if len(value) != num_layers or value.dtype.kind not in "biu":
            raise self._wrong(key, f"not one whole number for each of {num_layers} layers")
        numbers: list[int] = value.astype(object).tolist()
        return numbers

    def _whole(self, key: str, value: object, least: int, most: int) -> int:
        if type(value) is not int:
            raise self._wrong(key, "not a whole number")
        if not least <= value <= most:
            raise self._wrong(key, f"outside {least} to {most}")
        return value

    def _wrong(self, key: str, problem: str) -> ModelFileError:
        return ModelFileError(f"metadata key {safe_name(self.prefix + key)} is {problem}")
