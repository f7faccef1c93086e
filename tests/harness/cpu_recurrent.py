"""Recurrent layers behind their products: the compiled kernels, and the same over the reference."""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from attrs import frozen

from harness.kernel_calls import Floats, Kernels
from kvtrio.backends.cpu_recurrent import sizes
from kvtrio.kernels import cpu_abi as abi
from kvtrio.kernels import reference_recurrent as recurrent
from kvtrio.kernels.reference_delta_net import delta_rule, spread_heads, unit_length
from kvtrio.kernels.reference_mamba2 import state_space
from kvtrio.model.spec import DeltaNetSpec, Mamba2Spec, RecurrentSpec, ShortConvSpec

EPS = 1e-5
Tensor = torch.Tensor


@frozen(eq=False)
class Vectors:
    """Random weights of a layer besides its matrices."""

    conv: Floats
    """[channels, width]."""
    conv_bias: Floats | None
    dt_bias: Floats
    decay: Floats
    skip: Floats | None
    norm: Floats


def random_vectors(spec: RecurrentSpec, rng: np.random.Generator) -> Vectors:
    def normal(*shape: int) -> Floats:
        return rng.standard_normal(shape, dtype=np.float32)

    conv = 0.6 * normal(spec.conv.channels, spec.conv.width)
    if isinstance(spec, ShortConvSpec):
        none = np.zeros(0, np.float32)
        return Vectors(conv, None, none, none, None, none)
    is_delta = isinstance(spec, DeltaNetSpec)
    heads = num_heads(spec)
    size = spec.value_dim if isinstance(spec, DeltaNetSpec) else spec.inner_size
    return Vectors(
        conv=conv,
        conv_bias=None if is_delta else normal(spec.conv.channels),
        dt_bias=normal(heads),
        decay=-0.2 * rng.random(heads, dtype=np.float32),
        skip=None if is_delta else normal(heads),
        norm=1 + 0.3 * normal(size),
    )


def num_heads(spec: DeltaNetSpec | Mamba2Spec) -> int:
    return spec.num_value_heads if isinstance(spec, DeltaNetSpec) else spec.num_heads


def inner_size(spec: RecurrentSpec) -> int:
    match spec:
        case ShortConvSpec():
            return spec.conv.channels
        case DeltaNetSpec():
            return spec.num_value_heads * spec.value_dim
        case Mamba2Spec():
            return spec.inner_size


def row_size(spec: RecurrentSpec) -> int:
    """Values of a row as the products leave it."""
    match spec:
        case ShortConvSpec():
            return 3 * spec.conv.channels
        case DeltaNetSpec():
            return spec.conv.channels + inner_size(spec) + 2 * spec.num_value_heads
        case Mamba2Spec():
            return spec.conv.channels + inner_size(spec) + spec.num_heads


@frozen
class Run:
    """One request's rows of a step: positions start .., in a slot."""

    start: int
    num_rows: int
    slot: int


class NativeLayer:
    """A layer with ``num_slots`` states on the native side."""

    def __init__(
        self, kernels: Kernels, spec: RecurrentSpec, vectors: Vectors, num_slots: int
    ) -> None:
        self._kernels, self._spec = kernels, spec
        self._layer = sizes(spec)
        stride = kernels.call("kvt_state_values", self._layer)
        self._arrays = []
        for name in ("conv", "conv_bias", "dt_bias", "decay", "skip", "norm"):
            values = getattr(vectors, name)
            if values is not None and values.size:
                setattr(self._layer, name, len(self._arrays))
                self._arrays.append(np.ascontiguousarray(values.T))
        self._table = (abi.Vector * len(self._arrays))(
            *(abi.Vector(data=array.ctypes.data, size=array.size) for array in self._arrays)
        )
        room = np.full(num_slots * stride + 16, np.nan, np.float32)
        first = -room.ctypes.data % 64 // 4
        self.states = room[first : first + num_slots * stride].reshape(num_slots, stride)
        """What was there before means nothing to a request that begins."""

    def mix(self, rows: Floats, runs: Sequence[Run]) -> Floats:
        """Rows of all runs, one run behind the other -> [N, inner size]."""
        mixed = rows.copy()
        out = np.full((len(rows), inner_size(self._spec)), np.nan, np.float32)
        chunks = (abi.Chunk * len(runs))(
            *(abi.Chunk(start=run.start, num_rows=run.num_rows) for run in runs)
        )
        slots = np.array([run.slot for run in runs], np.int32)
        state = abi.State(
            data=self.states.ctypes.data,
            stride=self.states.shape[1],
            num_slots=len(self.states),
        )
        table = (self._layer, self._table, len(self._arrays), state, ctypes.c_float(EPS))
        self._kernels.call(
            "kvt_mix", self._kernels.team, *table, chunks, slots, len(runs), mixed, out
        )
        return out


def reference(spec: RecurrentSpec, vectors: Vectors, rows: Floats) -> Floats:
    """All rows of one request from its beginning: [L, row size] -> [L, inner size]."""
    x = torch.from_numpy(rows)
    match spec:
        case ShortConvSpec():
            b, c, values = x.chunk(3, -1)
            return (c * _convolved(spec, vectors, b * values)).numpy()
        case DeltaNetSpec():
            return _delta_net(spec, vectors, x).numpy()
        case Mamba2Spec():
            return _mamba2(spec, vectors, x).numpy()


def _convolved(spec: RecurrentSpec, vectors: Vectors, x: Tensor) -> Tensor:
    history = torch.zeros(1, spec.conv.width - 1, spec.conv.channels)
    bias = None if vectors.conv_bias is None else torch.from_numpy(vectors.conv_bias)
    out, _ = recurrent.causal_conv(x[None], torch.from_numpy(vectors.conv), bias, history)
    return out[0]


def _delta_net(spec: DeltaNetSpec, vectors: Vectors, x: Tensor) -> Tensor:
    heads, keys = spec.num_value_heads, spec.num_key_heads * spec.key_dim
    mixed, z, gates = x.split_with_sizes((spec.conv.channels, inner_size(spec), 2 * heads), -1)
    num_groups = spec.num_key_heads if spec.fused_gates else 1
    beta, alpha = gates.reshape(len(x), num_groups, -1).chunk(2, -1)
    log_decay = F.softplus(alpha.flatten(1) + torch.from_numpy(vectors.dt_bias))
    log_decay = log_decay * torch.from_numpy(vectors.decay)
    q, k, v = F.silu(_convolved(spec, vectors, mixed)).split_with_sizes(
        (keys, keys, inner_size(spec)), -1
    )
    q, k = (unit_length(part.reshape(len(x), -1, spec.key_dim), EPS) for part in (q, k))
    q, k = (spread_heads(part, heads, spec.tiled_heads) for part in (q, k))
    v = v.reshape(len(x), heads, -1)
    inputs = (q * spec.key_dim**-0.5, k, v, log_decay, beta.flatten(1).sigmoid())
    state = torch.zeros(1, heads, spec.key_dim, spec.value_dim)
    out, _ = recurrent.in_pieces(
        delta_rule, tuple(part[None] for part in inputs), state, recurrent.pieces(0, len(x))
    )
    gate = z.reshape(len(x), heads, -1)
    return recurrent.norm_then_gate(out[0], gate, torch.from_numpy(vectors.norm), EPS).flatten(1)


def _mamba2(spec: Mamba2Spec, vectors: Vectors, x: Tensor) -> Tensor:
    assert vectors.skip is not None
    z, mixed, dt = x.split_with_sizes((spec.inner_size, spec.conv.channels, spec.num_heads), -1)
    dt = F.softplus(dt + torch.from_numpy(vectors.dt_bias))
    size = spec.num_groups * spec.state_size
    values, b, c = F.silu(_convolved(spec, vectors, mixed)).split_with_sizes(
        (spec.inner_size, size, size), -1
    )
    values = values.reshape(len(x), spec.num_heads, -1)
    b, c = (part.reshape(len(x), spec.num_groups, -1) for part in (b, c))
    inputs = (values * dt[..., None], b, c, dt * torch.from_numpy(vectors.decay))
    state = torch.zeros(1, spec.num_heads, spec.head_dim, spec.state_size)
    out, _ = recurrent.in_pieces(
        state_space, tuple(part[None] for part in inputs), state, recurrent.pieces(0, len(x))
    )
    out = out[0] + values * torch.from_numpy(vectors.skip)[:, None]
    grouped = out.reshape(len(x), spec.num_groups, -1)
    weight = torch.from_numpy(vectors.norm).reshape(spec.num_groups, -1)
    gates = z.reshape(len(x), spec.num_groups, -1)
    return recurrent.gate_then_norm(grouped, gates, weight, EPS).flatten(1)
