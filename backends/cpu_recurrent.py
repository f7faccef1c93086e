"""Recurrent layers as the native side takes them."""

from typing import assert_never

from attrs import define, field

from kvtrio.backends.cpu_native import Native
from kvtrio.kernels import cpu_abi as abi
from kvtrio.model.spec import (
    DeltaNetSpec,
    LayerSpec,
    Mamba2Spec,
    RecurrentSpec,
    RopeSpec,
    RopeStyle,
    ShortConvSpec,
)

FLOAT_BYTES = 4


@define(eq=False)
class Names:
    """Gives names their places in the native tables."""

    matrices: dict[str, int] = field(factory=dict)
    vectors: dict[str, int] = field(factory=dict)
    ropes: dict[RopeSpec, int] = field(factory=dict)
    attentions: dict[int, int] = field(factory=dict)
    """By layer, as the next."""
    recurrents: dict[int, int] = field(factory=dict)

    def matrix(self, name: str) -> int:
        return self.matrices.setdefault(name, len(self.matrices))

    def vector(self, name: str) -> int:
        """``abi.NONE`` for no name."""
        return self.vectors.setdefault(name, len(self.vectors)) if name else abi.NONE

    def rope(self, spec: RopeSpec) -> int:
        if spec.style is RopeStyle.NONE:
            return abi.NONE
        return self.ropes.setdefault(spec, len(self.ropes))

    def attention(self, layer: int) -> int:
        return self.attentions.setdefault(layer, len(self.attentions))

    def recurrent(self, layer: int) -> int:
        return self.recurrents.setdefault(layer, len(self.recurrents))


def state_bytes(native: Native, spec: RecurrentSpec) -> int:
    """Bytes of one slot of one such layer: whole cache lines."""
    return FLOAT_BYTES * native.check(native.cdll.kvt_state_values(sizes(spec)))


def recurrent(layer: LayerSpec, state: int, names: Names) -> abi.Recurrent:
    """A layer, whose state has the index ``state``, with its vectors."""
    spec, prefix = layer.mixer, f"blk.{layer.index}."
    assert isinstance(spec, RecurrentSpec)
    made = sizes(spec)
    made.state = state
    if isinstance(spec, ShortConvSpec):
        made.conv = names.vector(prefix + "shortconv.conv.weight")
        return made
    made.conv = names.vector(prefix + "ssm_conv1d.weight")
    made.dt_bias = names.vector(prefix + "ssm_dt.bias")
    made.decay = names.vector(prefix + "ssm_a")
    made.norm = names.vector(prefix + "ssm_norm.weight")
    if isinstance(spec, Mamba2Spec):
        made.conv_bias = names.vector(prefix + "ssm_conv1d.bias")
        made.skip = names.vector(prefix + "ssm_d")
    return made


def sizes(spec: RecurrentSpec) -> abi.Recurrent:
    """A layer without state and vectors."""
    none = abi.Recurrent(
        width=spec.conv.width,
        channels=spec.conv.channels,
        **dict.fromkeys(("conv", "conv_bias", "dt_bias", "decay", "skip", "norm"), abi.NONE),
    )
    match spec:
        case ShortConvSpec():
            none.kind = abi.Mixing.SHORT_CONV
        case DeltaNetSpec():
            none.kind = abi.Mixing.DELTA_NET
            none.num_heads, none.num_groups = spec.num_value_heads, spec.num_key_heads
            none.key_dim, none.value_dim = spec.key_dim, spec.value_dim
            none.is_tiled, none.has_fused_gates = spec.tiled_heads, spec.fused_gates
        case Mamba2Spec():
            none.kind = abi.Mixing.STATE_SPACE
            none.num_heads, none.num_groups = spec.num_heads, spec.num_groups
            none.key_dim, none.value_dim = spec.state_size, spec.head_dim
        case _:
            assert_never(spec)
    return none
