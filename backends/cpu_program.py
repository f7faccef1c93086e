"""The forward pass as a flat program: what the decoder does, written down once per model.

1. The decoder runs over ``Recorder``, whose values are places in the program.
2. ``fused`` joins what one native operation does: a norm with the products that read it, the
   residual's addition with the product or norm before it.
3. ``narrowed`` drops the rows that nobody samples as early as their last use allows.

All three are functions from data to data; the result names tensors and knows no memory.
"""

from collections.abc import Mapping
from enum import Enum, auto

from attrs import define, evolve, field, frozen

from kvtrio.backends import decoder
from kvtrio.model.spec import (
    Activation,
    AttentionSpec,
    DeltaNetSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LayerSpec,
    ModelSpec,
)


class Kind(Enum):
    """What an operation does; x is its first input."""

    EMBED = auto()
    NORM = auto()
    """x / rms(x) * norm; only before fusion."""
    QKV = auto()
    """Products with three matrices, head norms, rope, cache: the value is q."""
    ATTENTION = auto()
    LATENT = auto()
    """Latent attention, up to the matrix after it; no native kernel, like the next two."""
    LAYER_NORM = auto()
    NARROW = auto()
    """A branch's input without a norm."""
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
    eps: float = 0.0
    """Of ``norm`` and ``head_norms``, and of the norms inside a recurrent layer."""
    head_norms: tuple[str, ...] = ()
    """Of q and k; or none."""
    layer: int | None = None
    """Whose attention and cache, or recurrent state, it is about."""
    activation: Activation | None = None
    num_used: int = 0
    """Experts of a row."""
    shared_gate: str = ""
    scale: float = 1.0
    softcap: float | None = None


Program = tuple[Op, ...]
WRITES_STATE = frozenset({Kind.QKV, Kind.LATENT, Kind.RECURRENT})


def program(spec: ModelSpec) -> Program:
    """The model's forward pass and the choice of its tokens."""
    return narrowed(fused(recorded(spec)))


def recorded(spec: ModelSpec) -> Program:
    """As the decoder goes, one operation after the other."""
    recorder = Recorder()
    decoder.forward(spec, recorder, None)
    return tuple(recorder.ops)


@define(eq=False)
class Recorder:
    """Implements ``Ops[None, int, int]``: a value is the place of the operation that makes it."""

    ops: list[Op] = field(factory=list)

    def embed(self, step: None, weight: str, scale: float) -> int:
        return self._add(Op(kind=Kind.EMBED, matrices=(f"{weight}.weight",), scale=scale))

    def norm(self, x: int, weight: str, eps: float) -> int:
        return self._add(Op(kind=Kind.NORM, inputs=(x,), norm=f"{weight}.weight", eps=eps))

    def layer_norm(self, x: int, weight: str, bias: bool, eps: float) -> int:
        biases = (f"{weight}.bias",) if bias else ()
        op = Op(kind=Kind.LAYER_NORM, inputs=(x,), norm=f"{weight}.weight", biases=biases, eps=eps)
        return self._add(op)

    def narrowed(self, x: int) -> int:
        return self._add(Op(kind=Kind.NARROW, inputs=(x,)))

    def post_norm(self, x: int, weight: str, eps: float) -> int:
        return self.norm(x, weight, eps)

    def linear(self, step: None, x: int, weight: str, bias: bool) -> int:
        biases = (f"{weight}.bias",) if bias else ()
        matrices = (f"{weight}.weight",)
        return self._add(Op(kind=Kind.LINEAR, inputs=(x,), matrices=matrices, biases=biases))

    def qkv(self, step: None, x: int, layer: LayerSpec, eps: float) -> int:
        prefix, spec = f"blk.{layer.index}.attn_", layer.attention
        op = Op(
            kind=Kind.QKV,
            inputs=(x,),
            matrices=tuple(f"{prefix}{part}.weight" for part in "qkv"),
            biases=tuple(f"{prefix}{part}.bias" for part in "qkv") if spec.bias else (),
            head_norms=tuple(f"{prefix}{p}_norm.weight" for p in "qk") if spec.qk_norm else (),
            eps=eps,
            layer=layer.index,
        )
        return self._add(op)

    def attention(self, step: None, q: int, index: int, spec: AttentionSpec) -> int:
        return self._add(Op(kind=Kind.ATTENTION, inputs=(q,), layer=index))

    def latent_attention(self, step: None, x: int, layer: LayerSpec, eps: float) -> int:
        return self._add(Op(kind=Kind.LATENT, inputs=(x,), layer=layer.index, eps=eps))

    def short_conv(self, step: None, x: int, layer: LayerSpec) -> int:
        return self._recurrent(x, layer, ("shortconv.in_proj",), 0.0)

    def delta_net(self, step: None, x: int, layer: LayerSpec, eps: float) -> int:
        fused = layer.mixer_of(DeltaNetSpec).fused_gates
        gates = ("ssm_ba",) if fused else ("ssm_beta", "ssm_alpha")
        return self._recurrent(x, layer, ("attn_qkv", "attn_gate", *gates), eps)

    def mamba2(self, step: None, x: int, layer: LayerSpec, eps: float) -> int:
        return self._recurrent(x, layer, ("ssm_in",), eps)

    def _recurrent(self, x: int, layer: LayerSpec, names: tuple[str, ...], eps: float) -> int:
        matrices = tuple(f"blk.{layer.index}.{name}.weight" for name in names)
        op = Op(kind=Kind.RECURRENT, inputs=(x,), matrices=matrices, layer=layer.index, eps=eps)
        return self._add(op)

    def gated_ffn(self, step: None, x: int, prefix: str, spec: FeedForwardSpec) -> int:
        return self._gated(x, (prefix, ""), spec.activation)

    def plain_ffn(self, step: None, x: int, prefix: str, spec: FeedForwardSpec) -> int:
        matrices = (f"{prefix}ffn_up.weight",)
        biases = (f"{prefix}ffn_up.bias",) if spec.bias else ()
        op = Op(
            kind=Kind.PLAIN,
            inputs=(x,),
            matrices=matrices,
            biases=biases,
            activation=spec.activation,
        )
        return self.linear(step, self._add(op), f"{prefix}ffn_down", spec.bias)

    def experts(self, step: None, x: int, index: int, spec: ExpertsSpec) -> int:
        prefix, shared = f"blk.{index}.", spec.shared
        stacks = tuple(f"{prefix}ffn_{part}_exps.weight" for part in ("gate", "up", "down"))
        op = Op(
            kind=Kind.EXPERTS,
            inputs=(x,),
            matrices=(f"{prefix}ffn_gate_inp.weight", *stacks),
            activation=spec.activation,
            num_used=spec.num_used,
        )
        if shared is None:
            return self._add(op)
        value = self._gated(x, (prefix, "_shexp"), spec.activation)
        gate = f"{prefix}ffn_gate_inp_shexp.weight" if shared.gated else ""
        return self._add(evolve(op, inputs=(x, value), shared_gate=gate))

    def _gated(self, x: int, names: tuple[str, str], activation: Activation) -> int:
        """``names``: what stands before and behind "ffn_gate" and so on."""
        prefix, suffix = names
        matrices = tuple(f"{prefix}ffn_{part}{suffix}.weight" for part in ("gate", "up"))
        gated = Op(kind=Kind.GATED, inputs=(x,), matrices=matrices, activation=activation)
        return self.linear(None, self._add(gated), f"{prefix}ffn_down{suffix}", False)

    def scaled(self, x: int, factor: float) -> int:
        return self._add(Op(kind=Kind.SCALED, inputs=(x,), scale=factor))

    def add(self, x: int, y: int) -> int:
        return self._add(Op(kind=Kind.ADD, inputs=(y, x)))

    def sampled_rows(self, step: None, x: int) -> int:
        return self._add(Op(kind=Kind.SAMPLED, inputs=(x,)))

    def logits(self, step: None, x: int, weight: str, softcap: float | None) -> int:
        matrices = (f"{weight}.weight",)
        return self._add(Op(kind=Kind.LOGITS, inputs=(x,), matrices=matrices, softcap=softcap))

    def sample(self, step: None, logits: int) -> int:
        return self._add(Op(kind=Kind.SAMPLE, inputs=(logits,)))

    def _add(self, op: Op) -> int:
        self.ops.append(op)
        return len(self.ops) - 1


def fused(ops: Program) -> Program:
    """The same, without operations of their own for what others can do on the way.

    A norm goes into all that read it; an addition of a product that nothing else reads goes into
    the product; a factor goes into the addition behind it, or the logits before it.
    """
    readers = _num_readers(ops)
    found: dict[int, Op] = dict(enumerate(ops))
    for place, op in enumerate(ops):
        source = found.get(op.inputs[0]) if op.inputs else None
        if source is None:
            continue
        if source.kind is Kind.NORM:
            found[place] = evolve(
                op, inputs=(*source.inputs, *op.inputs[1:]), norm=source.norm, eps=source.eps
            )
        elif readers[op.inputs[0]] == 1 and (joint := _joined(op, source)) is not None:
            found[place] = joint
            del found[op.inputs[0]]
    return _renumbered({i: op for i, op in found.items() if op.kind is not Kind.NORM})


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
