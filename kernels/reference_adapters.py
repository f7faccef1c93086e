"""Low-rank changes to a matrix, added to some rows of its product, in plain torch."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class OutputPart:
    """B of one matrix among those stacked into one."""

    b: Tensor
    """float32 [O_part, R_part]."""
    first_output: int
    first_rank: int


@dataclass(frozen=True, eq=False)
class LowRankMatrix:
    """Changes of one adapter to a stack of matrices that read the same input."""

    a: Tensor
    """float32 [R, I]: the A of all parts, one below the other."""
    scaling: Tensor
    """float32 [R]: each part's factor, repeated for its rows."""
    parts: tuple[OutputPart, ...]


def add_low_rank(out: Tensor, x: Tensor, matrix: LowRankMatrix, scale: float) -> None:
    """``out[:, part] += ((x A^T) * scaling * scale)[:, ranks] B^T`` for each part.

    x float32 [N, I]; out float32 [N, O], changed in place. Everything is computed in float32
    whatever the compute type: the products are thin, and rounding between them would cost more
    accuracy than it saves time.
    """
    inner = (x @ matrix.a.T).mul_(matrix.scaling * scale)
    for part in matrix.parts:
        num_outputs, rank = part.b.shape
        target = out[:, part.first_output : part.first_output + num_outputs]
        source = inner[:, part.first_rank : part.first_rank + rank]
        target.addmm_(source, part.b.T)
