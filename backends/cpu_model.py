"""A model as the native side takes it: tables, and the program with names turned into indices."""

import ctypes
from collections.abc import Mapping, Sequence

from attrs import frozen

from kvtrio.backends.cpu_memory import Stores
from kvtrio.backends.cpu_native import Native, address_of, table_of
from kvtrio.backends.cpu_program import Kind, Op, Program
from kvtrio.backends.cpu_recorder import program
from kvtrio.backends.cpu_recurrent import Names, recurrent
from kvtrio.backends.cpu_weights import Weights, divisors_name
from kvtrio.kernels import cpu_abi as abi
from kvtrio.model.spec import (
    Activation,
    AttentionSpec,
    Gating,
    LatentAttentionSpec,
    LayerSpec,
    ModelSpec,
    RopeSpec,
    RopeStyle,
    RoutingSpec,
)

ACTIVATIONS = {
    Activation.SILU: abi.Activation.SILU,
    Activation.GELU_TANH: abi.Activation.GELU_TANH,
    Activation.CLAMPED: abi.Activation.CLAMPED,
}
SCORING = {Gating.SOFTMAX: abi.Scoring.SOFTMAX, Gating.SIGMOID: abi.Scoring.SIGMOID}
PAIRS = {RopeStyle.NORM: abi.RopePairs.NORM, RopeStyle.NEOX: abi.RopePairs.NEOX}
KINDS = {
    Kind.EMBED: abi.OpKind.EMBED,
    Kind.QKV: abi.OpKind.QKV,
    Kind.ATTENTION: abi.OpKind.ATTENTION,
    Kind.RECURRENT: abi.OpKind.RECURRENT,
    Kind.LINEAR: abi.OpKind.LINEAR,
    Kind.RANK: abi.OpKind.LINEAR,
    Kind.QUERIES: abi.OpKind.LINEAR,
    Kind.LATENT: abi.OpKind.LATENT,
    Kind.HEADS: abi.OpKind.HEADS,
    Kind.PLAIN: abi.OpKind.PLAIN,
    Kind.GATED: abi.OpKind.GATED,
    Kind.EXPERTS: abi.OpKind.EXPERTS,
    Kind.ADD: abi.OpKind.ADD,
    Kind.SAMPLED: abi.OpKind.SAMPLED,
    Kind.LOGITS: abi.OpKind.LOGITS,
    Kind.SAMPLE: abi.OpKind.SAMPLE,
}
VALUES = {
    Kind.EMBED: abi.Buffer.RESIDUAL,
    Kind.QKV: abi.Buffer.QUERY,
    Kind.ATTENTION: abi.Buffer.ATTENDED,
    Kind.RECURRENT: abi.Buffer.ATTENDED,
    Kind.RANK: abi.Buffer.HIDDEN,
    Kind.QUERIES: abi.Buffer.ATTENDED,
    Kind.LATENT: abi.Buffer.QUERY,
    Kind.HEADS: abi.Buffer.HIDDEN,
    Kind.GATED: abi.Buffer.HIDDEN,
    Kind.PLAIN: abi.Buffer.HIDDEN,
    Kind.EXPERTS: abi.Buffer.BRANCH,
    Kind.ADD: abi.Buffer.RESIDUAL,
}
"""Where an operation's value lies; LINEAR and SAMPLED depend on what they read."""


@frozen(kw_only=True)
class Limits:
    """Most of what a step has."""

    max_rows: int
    max_sampled: int
    max_context: int


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
    layer, is_recurrent = op.layer, op.kind is Kind.RECURRENT
    return abi.Op(
        kind=KINDS[op.kind],
        input=abi.NONE if source is None else source,
        output=abi.NONE if target is None else target,
        norm=names.vector(op.norm),
        norm_bias=names.vector(op.norm_bias),
        is_centred=op.is_centred,
        eps=op.eps,
        matrices=_filled([names.matrix(name) for name in op.matrices], 4),
        biases=_filled([names.vector(name) for name in op.biases], 4),
        head_norms=_filled([names.vector(name) for name in op.head_norms], 2),
        activation=0 if op.activation is None else ACTIVATIONS[op.activation],
        scale=op.scale,
        softcap=op.softcap or 0.0,
        attention=abi.NONE if layer is None or is_recurrent else names.attention(layer),
        recurrent=names.recurrent(layer) if layer is not None and is_recurrent else abi.NONE,
        num_used=op.num_used,
        is_shared=op.kind is Kind.EXPERTS and len(op.inputs) > 1,
        shared_gate=names.vector(op.shared_gate),
        routing=_routing(op.routing or RoutingSpec(), names.vector(op.selection_bias)),
    )


def _routing(spec: RoutingSpec, bias: int) -> abi.Routing:
    usual = spec == RoutingSpec()
    return abi.Routing(
        scoring=abi.Scoring.CHOSEN if usual else SCORING[spec.gating],
        is_normalised=spec.normalised,
        scale=spec.scale,
        bias=bias,
        num_groups=spec.num_groups,
        num_groups_used=spec.num_groups_used,
    )


def _filled(indices: list[int], count: int) -> tuple[int, ...]:
    return (*indices, *[abi.NONE] * (count - len(indices)))


def attention(layer: LayerSpec, index: int, names: Names) -> abi.Attention:
    """Attention of a layer, which has the cache of the same index."""
    spec = layer.mixer
    assert isinstance(spec, AttentionSpec | LatentAttentionSpec)
    made = abi.Attention(
        cache=index,
        rope=names.rope(spec.rope),
        num_heads=spec.num_heads,
        scale=spec.scale,
        sinks=abi.NONE,
    )
    if isinstance(spec, LatentAttentionSpec):
        return made
    made.window, made.softcap = spec.window or 0, spec.softcap or 0.0
    made.is_gated, made.has_joint_norms = spec.gated, spec.joint_norm
    if spec.sinks:
        made.sinks = names.vector(f"blk.{layer.index}.attn_sinks.weight")
    if spec.temperature is not None:
        made.temperature_length = spec.temperature.length
        made.temperature = spec.temperature.scale
    return made


def rope(spec: RopeSpec, names: Names) -> abi.Rope:
    return abi.Rope(
        base=spec.base,
        scale=spec.scale,
        magnitude=spec.magnitude,
        style=PAIRS[spec.style],
        num_rotated=spec.num_rotated,
        factors=names.vector(divisors_name(spec)),
    )


@frozen(eq=False)
class Stored:
    """What a model reads and writes; the native side copies none of it."""

    weights: Weights
    stores: Stores


@frozen(eq=False)
class NativeModel:
    """A ``kvt_model*``, what it needs alive, and where its matrices are in its table."""

    handle: int
    matrices: Mapping[str, int]
    stored: Stored


def make_model(native: Native, spec: ModelSpec, stored: Stored, limits: Limits) -> NativeModel:
    """Raises MemoryError, or RuntimeError where the native side finds the description wrong."""
    names, weights, stores = Names(), stored.weights, stored.stores
    lowered_ops = lowered(program(spec), names)
    attentions = [
        attention(spec.layers[layer], index, names) for layer, index in names.attentions.items()
    ]
    recurrents = [
        recurrent(spec.layers[layer], index, names) for layer, index in names.recurrents.items()
    ]
    ropes = [rope(each, names) for each in tuple(names.ropes)]
    tables = {
        "matrices": table_of(abi.Matrix, (weights.matrices[name] for name in names.matrices)),
        "vectors": table_of(abi.Vector, (_vector(weights, name) for name in names.vectors)),
        "caches": table_of(abi.Cache, (stores.caches[layer] for layer in names.attentions)),
        "states": table_of(abi.State, (stores.states[layer] for layer in names.recurrents)),
        "ropes": table_of(abi.Rope, ropes),
        "attentions": table_of(abi.Attention, attentions),
        "recurrents": table_of(abi.Recurrent, recurrents),
        "program": table_of(abi.Op, lowered_ops),
    }
    desc = abi.ModelDesc(
        **tables,
        **{f"num_{name}": len(table) for name, table in tables.items() if name != "program"},
        num_ops=len(lowered_ops),
        num_groups=len({each.group for each in (*tables["caches"], *tables["states"])}),
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
