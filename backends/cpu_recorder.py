"""The decoder's operations, written down: the first form of a model's program."""

from attrs import define, evolve, field

from kvtrio.backends import decoder
from kvtrio.backends.cpu_program import Kind, Op, Program, fused, narrowed
from kvtrio.model.spec import (
    Activation,
    AttentionSpec,
    DeltaNetSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LatentAttentionSpec,
    LayerSpec,
    ModelSpec,
)


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
        op = self.ops[self.norm(x, weight, eps)]
        added = f"{weight}.bias" if bias else ""
        self.ops[-1] = evolve(op, norm_bias=added, is_centred=True)
        return len(self.ops) - 1

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
        spec, prefix = layer.mixer_of(LatentAttentionSpec), f"blk.{layer.index}.attn_"
        latent = Op(
            kind=Kind.LATENT,
            inputs=(x, self._queries(x, spec, prefix, eps)),
            matrices=(f"{prefix}kv_a_mqa.weight", f"{prefix}k_b.weight"),
            head_norms=(f"{prefix}kv_a_norm.weight",),
            eps=eps,
            layer=layer.index,
        )
        attention = Op(kind=Kind.ATTENTION, inputs=(self._add(latent),), layer=layer.index)
        up = (f"{prefix}v_b.weight",)
        return self._add(Op(kind=Kind.HEADS, inputs=(self._add(attention),), matrices=up))

    def _queries(self, x: int, spec: LatentAttentionSpec, prefix: str, eps: float) -> int:
        if spec.query_rank is None:
            return self._add(Op(kind=Kind.QUERIES, inputs=(x,), matrices=(f"{prefix}q.weight",)))
        first = Op(kind=Kind.RANK, inputs=(x,), matrices=(f"{prefix}q_a.weight",))
        second = Op(
            kind=Kind.QUERIES,
            inputs=(self._add(first),),
            matrices=(f"{prefix}q_b.weight",),
            norm=f"{prefix}q_a_norm.weight",
            eps=eps,
        )
        return self._add(second)

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
        names = (f"{prefix}ffn_gate_inp.weight", *stacks)
        biases = tuple(name.removesuffix("weight") + "bias" for name in names)
        op = Op(
            kind=Kind.EXPERTS,
            inputs=(x,),
            matrices=names,
            biases=biases if spec.biases else (),
            activation=spec.activation,
            num_used=spec.num_used,
            routing=spec.routing,
            selection_bias=f"{prefix}exp_probs_b.bias" if spec.routing.selection_bias else "",
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
