"""The forward pass as a flat program: what the decoder does, written down once per model.

1. The decoder runs over a recorder (``cpu_recorder``), whose values are places in the program.
2. ``fused`` joins what one native operation does: a norm with the products that read it, the
   residual's addition with the product or norm before it.
3. ``narrowed`` drops the rows that nobody samples as early as their last use allows.

All three are functions from data to data; the result names tensors and knows no memory.
"""

from collections.abc import Mapping
from enum import Enum, auto

from attrs import evolve, frozen

from kvtrio.model.spec import (
    Activation,
    RoutingSpec,
)


class Kind(Enum):
    """What an operation does; x is its first input."""

    EMBED = auto()
    NORM = auto()
    """x / rms(x) * norm; only before fusion."""
    QKV = auto()
    """Products with three matrices, head norms, rope, cache: the value is q."""
    ATTENTION = auto()
    NARROW = auto()
    """A branch's input without a norm; only before fusion."""
    RANK = auto()
    """Latent attention's q, by the first of two matrices."""
    QUERIES = auto()
    """The same by the second, or by the only one."""
    LATENT = auto()
    """Its row into the cache, by the first matrix; the value is q, the second input, taken to where
    rows are by each head's matrix of the second."""
    HEADS = auto()
    """What attention's heads got, each by its own matrix."""
    PLAIN = auto()
    """act(up)."""
    RECURRENT = auto()
    """Products with up to four matrices, and what the layer does with them, up to the matrix after
    it; writes the state."""
    LINEAR = auto()
    """A product; with two inputs, added to the second."""
    GATED = auto()
    """act(gate) * up."""
    EXPERTS = auto()
    """The sum over the experts that the router chooses, plus the second input, if there is one: a
    shared expert's value, times ``sigmoid(x . shared_gate)`` where that is named."""
    SCALED = auto()
    """x * scale; only before fusion."""
    ADD = auto()
    """x * scale + second input; where ``norm`` is named, of the normed x."""
    SAMPLED = auto()
    LOGITS = auto()
    SAMPLE = auto()


@frozen(kw_only=True)
class Op:
    """One operation. Its value is named by its place in the program."""

    kind: Kind
    inputs: tuple[int, ...] = ()
    """Places of the values that it reads."""
    matrices: tuple[str, ...] = ()
    """Tensors of the model file."""
    biases: tuple[str, ...] = ()
    """One per matrix, or none at all."""
    norm: str = ""
    """Of the first input, before anything else; empty: none."""
    norm_bias: str = ""
    is_centred: bool = False
    """``norm`` takes the mean off first."""
    eps: float = 0.0
    """Of ``norm`` and ``head_norms``, and of the norms inside a recurrent layer."""
    head_norms: tuple[str, ...] = ()
    """Of q and k; or none. Of ``LATENT``: of a row's latent values."""
    layer: int | None = None
    """Whose attention and cache, or recurrent state, it is about."""
    activation: Activation | None = None
    num_used: int = 0
    """Experts of a row."""
    routing: RoutingSpec | None = None
    selection_bias: str = ""
    shared_gate: str = ""
    scale: float = 1.0
    softcap: float | None = None


Program = tuple[Op, ...]
INPUTS = frozenset({Kind.NORM, Kind.NARROW})
"""What becomes a part of what reads it."""
WRITES_STATE = frozenset({Kind.QKV, Kind.LATENT, Kind.RECURRENT})


def fused(ops: Program) -> Program:
    """The same, without operations of their own for what others can do on the way.

    A norm, or that there is none, goes into all that read it; an addition of a product that nothing
    else reads goes into the product; a factor goes into the addition behind it, or the logits
    before it.
    """
    readers = _num_readers(ops)
    found: dict[int, Op] = dict(enumerate(ops))
    for place, op in enumerate(ops):
        source = found.get(op.inputs[0]) if op.inputs else None
        if source is None:
            continue
        if source.kind in INPUTS:
            inputs = (*source.inputs, *op.inputs[1:])
            found[place] = _normed(evolve(op, inputs=inputs), source)
        elif readers[op.inputs[0]] == 1 and (joint := _joined(op, source)) is not None:
            found[place] = joint
            del found[op.inputs[0]]
    return _renumbered({i: op for i, op in found.items() if op.kind not in INPUTS})


def _normed(op: Op, norm: Op) -> Op:
    """``op`` with the norm that its input has, if it has one."""
    if norm.kind is Kind.NARROW:
        return op
    return evolve(
        op, norm=norm.norm, norm_bias=norm.norm_bias, is_centred=norm.is_centred, eps=norm.eps
    )


def _joined(op: Op, source: Op) -> Op | None:
    """One operation for ``op`` and the only one that its first input comes from."""
    match op.kind, source.kind:
        case Kind.ADD, Kind.LINEAR:
            return evolve(source, inputs=(*source.inputs, op.inputs[1]))
        case Kind.ADD, Kind.SCALED:
            inputs = (*source.inputs, op.inputs[1])
            return evolve(source, kind=Kind.ADD, inputs=inputs)
        case Kind.SCALED, Kind.LOGITS:
            return evolve(source, scale=op.scale)
        case _:
            return None


def narrowed(ops: Program) -> Program:
    """Drop the rows that nobody samples right behind the last operation that needs them, which is
    the last one that writes K and V, or a state: its value and the residual are narrowed instead of
    the end's value.

    What lies between treats each row by itself, so nothing else changes.
    """
    writes = [place for place, op in enumerate(ops) if op.kind in WRITES_STATE]
    if not writes:
        return ops
    last, end = writes[-1], next(i for i, op in enumerate(ops) if op.kind is Kind.SAMPLED)
    residual = ops[last].inputs[0]
    places = {residual: last + 1, last: last + 2}
    places |= {place: place + 2 for place in range(last + 1, end)}
    places |= {place: place + 1 for place in range(end, len(ops))}
    narrowing = tuple(evolve(ops[end], inputs=(place,)) for place in (residual, last))
    rest = ops[last + 1 : end] + ops[end + 1 :]
    moved = (evolve(op, inputs=tuple(places[i] for i in op.inputs)) for op in rest)
    return (*ops[: last + 1], *narrowing, *moved)


def _num_readers(ops: Program) -> list[int]:
    counts = [0] * len(ops)
    for op in ops:
        for place in op.inputs:
            counts[place] += 1
    return counts


def _renumbered(found: Mapping[int, Op]) -> Program:
    places = {old: new for new, old in enumerate(sorted(found))}
    return tuple(
        evolve(found[old], inputs=tuple(places[i] for i in found[old].inputs)) for old in places
    )
