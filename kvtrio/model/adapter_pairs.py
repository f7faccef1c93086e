"""The two halves of each low-rank matrix, matched with each other and with the base model."""

from collections.abc import Iterable, Mapping
from enum import Enum

import numpy as np
from attrs import frozen

from kvtrio.model.errors import ModelFileError, safe_name
from kvtrio.model.fused import fused_shapes
from kvtrio.model.layer_tensors import Shape, is_matrix
from kvtrio.model.spec import ModelSpec
from kvtrio.model.tensors import needed_tensors

MAX_RANK = 4096
MAX_VALUES = 1 << 30
"""In all halves together: 4 GiB as float32."""
NUM_LISTED = 3
HEAD = "output.weight"
UNMATCHED = "no such matrix in the base model"
EMBEDDING = "token_embd.weight"


class Side(Enum):
    """Which half of B A."""

    A = "a"
    B = "b"


@frozen(kw_only=True)
class Half:
    """One tensor of an adapter file."""

    name: str
    """In the file."""
    target: str
    """The base model's tensor that it changes."""
    side: Side
    shape: Shape


@frozen(kw_only=True)
class Pair:
    """A [rank, in] and B [out, rank] for one base tensor [out, in]."""

    target: str
    a: Half
    b: Half

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@frozen(eq=False)
class LowRank:
    """W x becomes W x + scale * scaling * B (A x)."""

    a: np.ndarray
    """float32 [rank, in], contiguous."""
    b: np.ndarray
    """float32 [out, rank], contiguous."""
    scaling: float
    """The adapter's own factor, alpha / rank for example; a float32 value."""

    @property
    def num_bytes(self) -> int:
        return self.a.nbytes + self.b.nbytes


@frozen(kw_only=True, eq=False)
class Content:
    """What an adapter's file or folder says, whatever its form."""

    targets: Mapping[str, LowRank]
    invocation_tokens: tuple[int, ...]
    """As stated; unchecked."""
    task_name: str = ""
    prompt_prefix: str = ""


def adaptable(spec: ModelSpec) -> dict[str, Shape]:
    """Name to [out, in] of every matrix that an adapter may change; experts' are not among them.

    ``output.weight`` is the head, also where the base has none of its own: there an adapter of the
    head acts on the head alone and leaves the embedding as it is.
    """
    needed = needed_tensors(spec).items()
    shapes = {name: shape for name, shape in needed if len(shape) == 2 and is_matrix(name, shape)}
    del shapes[EMBEDDING]
    return {**shapes, HEAD: (spec.vocab_size, spec.hidden_size)}


def pair_up(
    halves: Iterable[Half], spec: ModelSpec, more: Mapping[str, Shape] | None = None
) -> tuple[Pair, ...]:
    """All halves as pairs that fit the base, by target name; ``more`` can be changed, too.

    Raises ModelFileError, before any value is read, for a half without the other, a target that
    the base does not have, a wrong shape, or no pair at all.
    """
    shapes = {**fused_shapes(spec, adaptable(spec)), **(more or {})}
    sides: dict[Side, dict[str, Half]] = {Side.A: {}, Side.B: {}}
    unmatched = []
    for half in halves:
        if half.target in sides[half.side]:
            raise ModelFileError(f"tensor {safe_name(half.name)}: its target has one already")
        sides[half.side][half.target] = half
        if half.target not in shapes:
            unmatched.append(half.name)
    refuse_listed(UNMATCHED, unmatched)
    pairs = _joined(sides[Side.A], sides[Side.B])
    for pair in pairs:
        _check_shapes(pair, shapes[pair.target])
    _check_size(pairs)
    return pairs


def refuse_listed(problem: str, names: list[str]) -> None:
    """Raise ModelFileError when there are ``names``: how many tensors, and the first few."""
    if names:
        listed = ", ".join(safe_name(name) for name in names[:NUM_LISTED])
        more = ", ..." if len(names) > NUM_LISTED else ""
        plural = "tensor" if len(names) == 1 else "tensors"
        raise ModelFileError(f"{len(names)} {plural}: {problem}: {listed}{more}")


def low_rank(a: np.ndarray, b: np.ndarray, scaling: float, pair: Pair) -> LowRank:
    """Values as they are used. Raises ModelFileError for one that is not finite."""
    factor = _as_float32(scaling)
    if not np.isfinite(factor) or factor == 0.0:
        raise ModelFileError(f"tensor {safe_name(pair.target)}: its scaling is zero or not finite")
    for values, half in ((a, pair.a), (b, pair.b)):
        if not np.isfinite(values).all():
            raise ModelFileError(f"tensor {safe_name(half.name)} holds a value that is not finite")
    return LowRank(np.ascontiguousarray(a, np.float32), np.ascontiguousarray(b, np.float32), factor)


def _as_float32(value: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def _joined(a: Mapping[str, Half], b: Mapping[str, Half]) -> tuple[Pair, ...]:
    lonely = [half.name for half in (*a.values(), *b.values()) if half.target not in a.keys() & b]
    refuse_listed("the other half is missing", lonely)
    if not a:
        raise ModelFileError("it holds no low-rank pair: it would change nothing")
    return tuple(Pair(target=target, a=a[target], b=b[target]) for target in sorted(a))


def _check_shapes(pair: Pair, base: Shape) -> None:
    num_out, num_in = base
    rank = pair.a.shape[0] if pair.a.shape else 0
    if not 1 <= rank <= MAX_RANK:
        raise ModelFileError(f"tensor {safe_name(pair.a.name)} has rank {rank}")
    for half, wanted in ((pair.a, (rank, num_in)), (pair.b, (num_out, rank))):
        if half.shape != wanted:
            raise ModelFileError(
                f"tensor {safe_name(half.name)} has shape {list(half.shape)}, not {list(wanted)}: "
                "it is for another base model, or damaged"
            )


def _check_size(pairs: tuple[Pair, ...]) -> None:
    num_values = sum(pair.rank * (pair.a.shape[1] + pair.b.shape[0]) for pair in pairs)
    if num_values > MAX_VALUES:
        raise ModelFileError(f"it has {num_values} values; at most {MAX_VALUES} are supported")
