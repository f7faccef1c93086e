"""Packed matrices and their products over numpy arrays, and what they are to give."""

import ctypes
from collections.abc import Sequence

import gguf
import numpy as np
from attrs import frozen
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from harness.cpu_attention import aligned
from harness.kernel_calls import Floats, Kernels
from kvtrio.kernels import cpu_abi as abi
from kvtrio.kernels.cpu_single import ExpertsCall

Rows = NDArray[np.uint8]
FLOAT_TYPES = (Type.F32, Type.F16, Type.BF16)
SCALES = {
    Type.Q4_0: (0,), Type.Q4_1: (0, 2), Type.Q5_0: (0,), Type.Q5_1: (0, 2), Type.Q8_0: (0,),
    Type.Q2_K: (80, 82), Type.Q3_K: (108,), Type.Q4_K: (0, 2), Type.Q5_K: (0, 2),
    Type.Q6_K: (208,), Type.IQ4_NL: (0,), Type.IQ4_XS: (0,), Type.MXFP4: (),
}  # fmt: skip
"""Where halves stand in a block; all other bytes may have any value."""
TYPES = (*SCALES, *FLOAT_TYPES)


def random_rows(
    kind: Type, rows: int, cols: int, rng: np.random.Generator, quants: int | None = None
) -> Rows:
    """Rows of a GGUF file, uint8 [rows, row bytes]: scales of ordinary size, any quants, or all
    bytes ``quants``."""
    if kind in FLOAT_TYPES:
        return gguf.quants.quantize(rng.standard_normal((rows, cols), np.float32), kind).view(
            np.uint8
        )
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    shape = (rows, cols // block_size, block_bytes)
    blocks = rng.integers(0, 256, shape, np.uint8)
    if quants is not None:
        blocks[:] = quants
    for place in SCALES[kind]:
        scales = rng.normal(0, 0.01, (*shape[:2], 1)).astype(np.float16)
        blocks[:, :, place : place + 2] = scales.view(np.uint8)
    if kind is Type.MXFP4:
        blocks[:, :, 0] = rng.integers(118, 126, shape[:2])
    return blocks.reshape(rows, -1)


def values(kind: Type, rows: Rows) -> Floats:
    """What the rows stand for."""
    return gguf.quants.dequantize(rows.view(np.float32) if kind is Type.F32 else rows, kind)


def rounded_inputs(kind: Type, isa: str, x: Floats) -> NDArray[np.float64]:
    """Activations as a product with a matrix of this type sees them."""
    if kind not in FLOAT_TYPES:
        groups = x.reshape(len(x), -1, 32)
        largest = np.abs(groups).max(-1, keepdims=True)
        with np.errstate(divide="ignore"):
            inverse = np.where(largest > 0, np.float32(127) / largest, np.float32(0))
        q = np.rint(groups * inverse).astype(np.float64)
        return (q * (largest / np.float32(127))).reshape(x.shape)
    if kind is Type.BF16 and isa == "avx512":
        return values(kind, gguf.quants.quantize(x, kind)).astype(np.float64)
    return x.astype(np.float64)


@frozen(eq=False)
class NativeMatrix:
    """A matrix in the library's memory layout."""

    kernels: Kernels
    struct: abi.Matrix
    packed: Rows

    @classmethod
    def pack(cls, kernels: Kernels, kind: Type, rows: Rows, cols: int) -> "NativeMatrix":
        size = kernels.cdll.kvt_packed_bytes(kind.value, len(rows), cols)
        packed = aligned(size)
        source = np.ascontiguousarray(rows)
        sizes = (len(rows), cols, packed)
        kernels.call("kvt_pack", kernels.team, kind.value, source, *sizes)
        struct = abi.Matrix(rows=len(rows), cols=cols, bytes=size, type=kind.value, stack=1)
        struct.data = packed.ctypes.data
        return cls(kernels, struct, packed)

    def row(self, number: int) -> Floats:
        out = np.empty(self.struct.cols, np.float32)
        self.kernels.call("kvt_dequantise_row", self.struct, number, out)
        return out

    def multiply(self, x: Floats, bias: Floats | None = None, onto: Floats | None = None) -> Floats:
        """x [N, cols] W^T, with bias [rows] and added to ``onto`` [N, rows]."""
        return self._run(x, None, 0, bias, onto)

    def gated(self, x: Floats, gate: "NativeMatrix", activation: abi.Activation) -> Floats:
        return self._run(x, gate.struct, int(activation), None, None)

    def _run(
        self,
        x: Floats,
        gate: abi.Matrix | None,
        activation: int,
        bias: Floats | None,
        onto: Floats | None,
    ) -> Floats:
        out = (
            np.full((len(x), self.struct.rows), np.nan, np.float32) if onto is None else onto.copy()
        )
        self.kernels.call(
            "kvt_multiply", self.kernels.team, self.struct, gate, activation, bias,
            np.ascontiguousarray(x), len(x), int(onto is not None), out,
        )  # fmt: skip
        return out


def multiply_many(matrices: Sequence[NativeMatrix], x: Floats) -> list[Floats]:
    """Each matrix's product with x, in one call."""
    kernels = matrices[0].kernels
    structs = (abi.Matrix * len(matrices))(*(each.struct for each in matrices))
    outs = [np.full((len(x), each.struct.rows), np.nan, np.float32) for each in matrices]
    pointers = (ctypes.c_void_p * len(outs))(*(out.ctypes.data for out in outs))
    kernels.call("kvt_multiply_many", kernels.team, structs, len(matrices), x, len(x), pointers)
    return outs


@frozen(kw_only=True)
class Choice:
    """Whose experts a row uses, and what they do besides products."""

    num_used: int
    activation: abi.Activation = abi.Activation.SILU
    routing: abi.Routing | None = None
    """None: the softmax over those with the largest logits."""
    biases: tuple[Floats | None, Floats | None, Floats | None, Floats | None] = (None,) * 4
    """Of gate, up and down [experts, rows], and of the choice [experts]."""


@frozen(eq=False)
class NativeStack:
    """Matrices of one shape, one behind the other: one per expert."""

    kernels: Kernels
    struct: abi.Matrix
    packed: Rows

    @classmethod
    def pack(
        cls, kernels: Kernels, kind: Type, sources: Sequence[Rows], cols: int
    ) -> "NativeStack":
        size = kernels.cdll.kvt_packed_bytes(kind.value, len(sources[0]), cols)
        packed = aligned(len(sources) * size)
        for i, rows in enumerate(sources):
            sizes = (len(rows), cols, packed[i * size :])
            kernels.call("kvt_pack", kernels.team, kind.value, np.ascontiguousarray(rows), *sizes)
        struct = abi.Matrix(rows=len(sources[0]), cols=cols, bytes=len(packed), type=kind.value)
        struct.data, struct.stack = packed.ctypes.data, len(sources)
        return cls(kernels, struct, packed)

    @staticmethod
    def apply(
        stacks: Sequence["NativeStack"],
        choice: Choice,
        logits: Floats,
        x: Floats,
        shared: Floats | None = None,
        factors: Floats | None = None,
    ) -> Floats:
        """Experts gate, up and down on x [N, cols]."""
        call = ExpertsCall(num_used=choice.num_used, activation=choice.activation)
        call.stacks = (abi.Matrix * 3)(*(each.struct for each in stacks))
        call.routing = choice.routing or abi.Routing(scoring=abi.Scoring.CHOSEN)
        biases = [None if bias is None else bias.ctypes.data for bias in choice.biases]
        call.biases[:] = biases[:3]
        call.selection_bias = biases[3]
        out = np.full((len(x), stacks[2].struct.rows), np.nan, np.float32)
        if shared is not None:
            out[:] = shared
        kernels = stacks[0].kernels
        inputs = (np.ascontiguousarray(logits), np.ascontiguousarray(x), len(x))
        kernels.call("kvt_experts", kernels.team, call, *inputs, factors, out)
        return out
