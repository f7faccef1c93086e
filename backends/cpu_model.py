"""A model as the native side takes it: tables, and the program with names turned into indices."""

import ctypes
from collections.abc import Mapping, Sequence

from attrs import define, field, frozen

from kvtrio.backends.base import BackendError
from kvtrio.backends.cpu_native import Native, address_of, table_of
from kvtrio.backends.cpu_program import Kind, Op, Program, program
from kvtrio.backends.cpu_weights import Weights
from kvtrio.kernels import cpu_abi as abi
from kvtrio.model.spec import Activation, AttentionSpec, ModelSpec, RopeSpec, RopeStyle

ACTIVATIONS = {
    Activation.SILU: abi.Activation.SILU,
    Activation.GELU_TANH: abi.Activation.GELU_TANH,
}
PAIRS = {RopeStyle.NORM: abi.RopePairs.NORM, RopeStyle.NEOX: abi.RopePairs.NEOX}
KINDS = {
    Kind.EMBED: abi.OpKind.EMBED,
    Kind.QKV: abi.OpKind.QKV,
    Kind.ATTENTION: abi.OpKind.ATTENTION,
    Kind.LINEAR: abi.OpKind.LINEAR,
    Kind.GATED: abi.OpKind.GATED,
    Kind.ADD: abi.OpKind.ADD_NORM,
    Kind.SAMPLED: abi.OpKind.SAMPLED,
    Kind.LOGITS: abi.OpKind.LOGITS,
    Kind.SAMPLE: abi.OpKind.SAMPLE,
}
VALUES = {
    Kind.EMBED: abi.Buffer.RESIDUAL,
    Kind.QKV: abi.Buffer.QUERY,
    Kind.ATTENTION: abi.Buffer.ATTENDED,
    Kind.GATED: abi.Buffer.HIDDEN,
    Kind.ADD: abi.Buffer.RESIDUAL,
}
"""Where an operation's value lies; LINEAR and SAMPLED depend on what they read."""


@frozen(kw_only=True)
class Limits:
    """Most of what a step has."""

    max_rows: int
    max_sampled: int
    max_context: int


@define(eq=False)
class Names:
    """Gives names their places in the native tables."""

    matrices: dict[str, int] = field(factory=dict)
    vectors: dict[str, int] = field(factory=dict)
    ropes: dict[RopeSpec, int] = field(factory=dict)

    def matrix(self, name: str) -> int:
        return self.matrices.setdefault(name, len(self.matrices))

    def vector(self, name: str) -> int:
        """``abi.NONE`` for no name."""
        return self.vectors.setdefault(name, len(self.vectors)) if name else abi.NONE

    def rope(self, spec: RopeSpec) -> int:
        if spec.style is RopeStyle.NONE:
            return abi.NONE
        return self.ropes.setdefault(spec, len(self.ropes))


def require_kernels(spec: ModelSpec) -> None:
    """Raise BackendError for a model with operations that no native kernel computes."""
    mixers = [layer.mixer for layer in spec.layers]
    is_gated = any(isinstance(mixer, AttentionSpec) and mixer.gated for mixer in mixers)
    if is_gated or not all(op.kind in KINDS for op in program(spec)):
        raise BackendError(
            f"backend cpu has no kernels for this kind of {spec.architecture}; "
            "--backend torch computes it"
        )


def lowered(ops: Program, names: Names) -> list[abi.Op]:
    """The program in native operations, over fixed buffers.

    Raises ValueError for a program whose values do not fit into them: one that would read a value
    after another took its place.
    """
    buffers = _buffers(ops)
    _check_order(ops, buffers)
    return [
        _op(op, buffers, place, names)
        for place, op in enumerate(ops)
        # One native operation narrows all buffers at once.
        if op.kind is not Kind.SAMPLED or ops[place - 1].kind is not Kind.SAMPLED
    ]


def _buffers(ops: Program) -> list[abi.Buffer | None]:
    """Per operation, where its value lies; None: the logits and the answer have own places."""
    buffers: list[abi.Buffer | None] = []
    for op in ops:
        if op.kind is Kind.LINEAR:
            buffers.append(abi.Buffer.RESIDUAL if len(op.inputs) > 1 else abi.Buffer.BRANCH)
        elif op.kind is Kind.SAMPLED:
            buffers.append(buffers[op.inputs[0]])
        else:
            buffers.append(VALUES.get(op.kind))
    return buffers


def _check_order(ops: Program, buffers: Sequence[abi.Buffer | None]) -> None:
    """Every value is read before another takes its place."""
    newest: dict[abi.Buffer | None, int] = {}
    for place, op in enumerate(ops):
        for source in op.inputs:
            if newest[buffers[source]] != source:
                raise ValueError(f"operation {place} reads a value that is gone")
        newest[buffers[place]] = place


def _op(op: Op, buffers: Sequence[abi.Buffer | None], place: int, names: Names) -> abi.Op:
    source, target = (buffers[op.inputs[0]] if op.inputs else None), buffers[place]
    return abi.Op(
        kind=KINDS[op.kind],
        input=abi.NONE if source is None else source,
        output=abi.NONE if target is None else target,
        norm=names.vector(op.norm),
        eps=op.eps,
        matrices=_three([names.matrix(name) for name in op.matrices]),
        biases=_three([names.vector(name) for name in op.biases]),
        head_norms=tuple([names.vector(name) for name in op.head_norms] or [abi.NONE] * 2),
        attention=abi.NONE if op.layer is None else op.layer,
        activation=0 if op.activation is None else ACTIVATIONS[op.activation],
        scale=op.scale,
        softcap=op.softcap or 0.0,
    )


def _three(indices: list[int]) -> tuple[int, int, int]:
    first, second, third = (*indices, abi.NONE, abi.NONE, abi.NONE)[:3]
    return first, second, third


def attention(spec: AttentionSpec, layer: int, names: Names) -> abi.Attention:
    """Attention of a layer, which has the cache of its own index."""
    return abi.Attention(
        cache=layer,
        rope=names.rope(spec.rope),
        num_heads=spec.num_heads,
        window=spec.window or 0,
        scale=spec.scale,
        softcap=spec.softcap or 0.0,
        sinks=abi.NONE,
    )


def rope(spec: RopeSpec, names: Names) -> abi.Rope:
    return abi.Rope(
        base=spec.base,
        scale=spec.scale,
        magnitude=spec.magnitude,
        style=PAIRS[spec.style],
        num_rotated=spec.num_rotated,
        factors=names.vector(spec.factors or ""),
    )


@frozen(eq=False)
class Stored:
    """What a model reads and writes; the native side copies none of it."""

    weights: Weights
    caches: Sequence[abi.Cache]
    """Per layer."""


@frozen(eq=False)
class NativeModel:
    """A ``kvt_model*``, what it needs alive, and where its matrices are in its table."""

    handle: int
    matrices: Mapping[str, int]
    stored: Stored


def make_model(native: Native, spec: ModelSpec, stored: Stored, limits: Limits) -> NativeModel:
    """Raises MemoryError, or RuntimeError where the native side finds the description wrong."""
    names, weights = Names(), stored.weights
    lowered_ops = lowered(program(spec), names)
    attentions = [attention(layer.attention, layer.index, names) for layer in spec.layers]
    ropes = [rope(each, names) for each in tuple(names.ropes)]
    tables = {
        "matrices": table_of(abi.Matrix, (weights.matrices[name] for name in names.matrices)),
        "vectors": table_of(abi.Vector, (_vector(weights, name) for name in names.vectors)),
        "caches": table_of(abi.Cache, stored.caches),
        "ropes": table_of(abi.Rope, ropes),
        "attentions": table_of(abi.Attention, attentions),
        "program": table_of(abi.Op, lowered_ops),
    }
    desc = abi.ModelDesc(
        **tables,
        **{f"num_{name}": len(table) for name, table in tables.items() if name != "program"},
        num_ops=len(lowered_ops),
        num_groups=len({cache.group for cache in stored.caches}),
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        max_sampled=limits.max_sampled,
        max_rows=limits.max_rows,
        max_context=limits.max_context,
    )
    handle = ctypes.c_void_p()
    native.check(native.cdll.kvt_model_new(native.team, desc, ctypes.byref(handle)))
    return NativeModel(handle.value or 0, dict(names.matrices), stored)


def _vector(weights: Weights, name: str) -> abi.Vector:
    values = weights.vectors[name]
    return abi.Vector(data=address_of(values), size=len(values))
