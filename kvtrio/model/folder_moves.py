"""How tensors of a Hugging Face folder become those of a GGUF file: moved, changed, or as they are.

What only moves values keeps their type; what changes them becomes float32, as in converted files.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from attrs import frozen

from kvtrio.model.errors import ModelFileError, safe_name

Arrays = Sequence[np.ndarray]
Shape = tuple[int, ...]
Compute = Callable[[np.ndarray], np.ndarray]
"""Of float32 values."""


def _same(shapes: Sequence[Shape]) -> Shape:
    return shapes[0]


@frozen
class Move:
    """What moves the values of stored arrays without changing them."""

    run: Callable[[Arrays], np.ndarray]
    shape: Callable[[Sequence[Shape]], Shape] = _same
    """Of the result; raises ValueError or IndexError where the sources' shapes are impossible."""


@frozen
class Recipe:
    """How one of our tensors is made."""

    sources: tuple[str, ...]
    move: Move | None = None
    """None: the first source as it is."""
    compute: Compute | None = None
    is_mxfp4: bool = False
    """The move makes MXFP4 blocks as GGUF files have them, uint8, of two stored arrays."""

    def shape(self, stored: Mapping[str, Shape]) -> Shape:
        """Raises ModelFileError where the stored shapes do not fit."""
        shapes = [stored[name] for name in self.sources]
        try:
            return self.move.shape(shapes) if self.move else shapes[0]
        except (ValueError, IndexError):
            name = safe_name(self.sources[0])
            raise ModelFileError(f"tensor {name} has an impossible shape") from None


def plus_one(values: np.ndarray) -> np.ndarray:
    return values + 1.0


def decay(values: np.ndarray) -> np.ndarray:
    result: np.ndarray = -np.exp(values)
    return result


def _stack_shape(shapes: Sequence[Shape]) -> Shape:
    if len(set(shapes)) != 1:
        raise ValueError("unequal")
    return (len(shapes), *shapes[0])


STACKED = Move(np.stack, _stack_shape)


def shaped(*shape: int) -> Move:
    """As many values, in another shape; -1 once, for what is left."""

    def result(shapes: Sequence[Shape]) -> Shape:
        num, known = math.prod(shapes[0]), math.prod(n for n in shape if n > 0)
        if num % known or (-1 not in shape and num != known):
            raise ValueError("another number of values")
        return tuple(num // known if n < 0 else n for n in shape)

    return Move(lambda arrays: arrays[0].reshape(shape), result)


def conv_rows(arrays: Arrays) -> np.ndarray:
    return arrays[0].reshape(arrays[0].shape[0], -1)


def conv_shape(shapes: Sequence[Shape]) -> Shape:
    return shapes[0][0], math.prod(shapes[0][1:])


CONV = Move(conv_rows, conv_shape)


def half(index: int, axis: int) -> Move:
    def result(shapes: Sequence[Shape]) -> Shape:
        whole = shapes[0]
        if whole[axis] % 2:
            raise ValueError("odd")
        return (*whole[:axis], whole[axis] // 2, *whole[axis + 1 :])

    return Move(lambda arrays: np.split(arrays[0], 2, axis)[index], result)


def rows_in(parts: int, num: int | None = None) -> Callable[[Sequence[Shape]], Shape]:
    """Rows that are a multiple of ``parts``, or, given ``num``, just as many."""

    def result(shapes: Sequence[Shape]) -> Shape:
        rows = shapes[0][0]
        if parts < 1 or rows % parts or (num is not None and rows != num):
            raise ValueError("rows")
        return shapes[0]

    return result


def paired(num_heads: int) -> Move:
    """Rows of each head from halves (i, i + n / 2) to adjacent pairs."""

    def run(arrays: Arrays) -> np.ndarray:
        rows = arrays[0]
        halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
        return halves.swapaxes(1, 2).reshape(rows.shape)

    return Move(run, rows_in(2 * num_heads))


Rule = tuple[str, Recipe]
"""Our name behind ``blk.N.``, and the recipe, its sources still to be filled in."""
AS_IS, ONE_MORE = Recipe(()), Recipe((), None, plus_one)
