"""A file's tensors as the CPU kernels keep them: matrices packed in their own types, vectors wide.

Packing keeps what a type says and changes the order only. A type that the kernels do not compute
with becomes Q8_0 on its way in.
"""

from collections.abc import Iterator, Mapping
from math import prod
from typing import Protocol

import gguf
import numpy as np
from attrs import frozen
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from tqdm import tqdm

from kvtrio.backends.cpu_native import Native, address_of, aligned
from kvtrio.kernels import cpu_abi as abi
from kvtrio.model.errors import ModelFileError
from kvtrio.model.gguf_file import TensorInfo
from kvtrio.model.layer_tensors import is_matrix
from kvtrio.model.spec import AttentionSpec, LatentAttentionSpec, ModelSpec, RopeSpec
from kvtrio.model.tensors import needed_tensors

SLICE_BYTES = 8 << 20
"""Of float32 values that are converted at a time."""
SCALE_PLACES: Mapping[Type, tuple[int, ...]] = {
    Type.Q4_0: (0,), Type.Q4_1: (0, 2), Type.Q5_0: (0,), Type.Q5_1: (0, 2), Type.Q8_0: (0,),
    Type.Q2_K: (80, 82), Type.Q3_K: (108,), Type.Q4_K: (0, 2), Type.Q5_K: (0, 2),
    Type.Q6_K: (208,), Type.IQ4_NL: (0,), Type.IQ4_XS: (0,),
}  # fmt: skip
"""Where a block has its float16 scales, in bytes: the one part that may be no finite number."""
CONVOLUTIONS = ("ssm_conv1d.weight", "shortconv.conv.weight")
ROUTER = "ffn_gate_inp.weight"
"""Tiny, and rounded inputs would send rows to other experts: it is kept in F32."""
MXFP4_LARGEST = 252
"""Largest exponent byte at which 12 * 2^(e - 128) is a float32."""


class TensorFile(Protocol):
    """What loading needs of a model file."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def raw(self, name: str) -> np.ndarray: ...

    def dequantise(self, name: str) -> np.ndarray: ...


@frozen
class MatrixPlan:
    """One matrix on its way from the file into memory."""

    name: str
    rows: int
    cols: int
    stack: int
    """Matrices, one behind the other: one per expert."""
    stored: Type
    kept: Type
    """As packed."""
    num_bytes: int
    """Packed, of all."""


@frozen(eq=False)
class Weights:
    """All tensors of a model, by their names in the file."""

    matrices: Mapping[str, abi.Matrix]
    vectors: Mapping[str, NDArray[np.float32]]
    """Norms, biases, rope factors, and of recurrent layers all that is no matrix: convolutions as
    [width, channels]."""


def plan_matrices(native: Native, file: TensorFile, spec: ModelSpec) -> tuple[MatrixPlan, ...]:
    """How each matrix will be kept; nothing is allocated."""
    shapes = needed_tensors(spec)
    names = [name for name, shape in shapes.items() if is_matrix(name, shape)]
    return tuple(_plan(native, file.tensors[name]) for name in names)


def _plan(native: Native, tensor: TensorInfo) -> MatrixPlan:
    *stacks, rows, cols = tensor.shape
    stack = prod(stacks)
    wanted = Type.F32 if tensor.name.endswith(ROUTER) else tensor.ggml_type
    for kept in (wanted, Type.Q8_0):
        num_bytes = native.cdll.kvt_packed_bytes(kept.value, rows, cols)
        if num_bytes >= 0:
            kinds = (tensor.ggml_type, kept)
            return MatrixPlan(tensor.name, rows, cols, stack, *kinds, stack * num_bytes)
    raise ModelFileError(f"tensor {tensor.name} has rows of {cols} values, which is unsupported")


def weight_bytes(plans: tuple[MatrixPlan, ...], spec: ModelSpec) -> int:
    """Bytes of all kept tensors."""
    shapes = needed_tensors(spec).items()
    vectors = sum(4 * prod(shape) for name, shape in shapes if not is_matrix(name, shape))
    return vectors + sum(aligned(plan.num_bytes) for plan in plans)


def passing_bytes(plans: tuple[MatrixPlan, ...]) -> int:
    """Bytes that loading needs besides: the largest converted matrix, on its way in."""
    converted = (plan for plan in plans if plan.kept != plan.stored)
    return max((2 * plan.stack * plan.rows * plan.cols for plan in converted), default=0)


def load_weights(
    native: Native, file: TensorFile, spec: ModelSpec, plans: tuple[MatrixPlan, ...]
) -> Weights:
    """Pack all matrices, on all threads, into one piece of memory that goes with ``native``.

    Nothing refers to the file afterwards. Raises ModelFileError when a weight is not finite,
    BackendError where there is no memory.
    """
    address = native.allocate(sum(aligned(plan.num_bytes) for plan in plans))
    total = sum(file.tensors[plan.name].num_bytes for plan in plans)
    matrices = {}
    # Shown only on a terminal (disable=None), and only when loading takes a while.
    with tqdm(total=total, desc="loading", unit="B", unit_scale=True, delay=1, disable=None) as bar:
        for plan in plans:
            _pack(native, file, plan, address)
            matrices[plan.name] = abi.Matrix(
                rows=plan.rows,
                cols=plan.cols,
                data=address,
                bytes=plan.num_bytes,
                type=plan.kept.value,
                stack=plan.stack,
            )
            address += aligned(plan.num_bytes)
            bar.update(file.tensors[plan.name].num_bytes)
    return Weights(matrices, dict(_vectors(file, spec)))


def _vectors(file: TensorFile, spec: ModelSpec) -> Iterator[tuple[str, NDArray[np.float32]]]:
    for name, shape in needed_tensors(spec).items():
        if is_matrix(name, shape):
            continue
        values = file.dequantise(name)
        if name.endswith(CONVOLUTIONS):
            values = values.T
        values = np.ascontiguousarray(values, np.float32).reshape(-1)
        _require(bool(np.isfinite(values).all()), name)
        yield name, values
    for layer in spec.layers:
        mixer = layer.mixer
        rope = mixer.rope if isinstance(mixer, AttentionSpec | LatentAttentionSpec) else None
        if rope is not None and rope.divisors:
            yield divisors_name(rope), np.array(rope.divisors, np.float32)


def divisors_name(rope: RopeSpec) -> str:
    """Of the vector that a rope's angles are divided by; empty: there is none.

    Those that are no tensor of the file are known by what they are.
    """
    return rope.factors or (f"divisors {rope.divisors}" if rope.divisors else "")


def _pack(native: Native, file: TensorFile, plan: MatrixPlan, address: int) -> None:
    raw = file.raw(plan.name)
    if plan.kept != plan.stored:
        raw = _converted(raw, plan)
    else:
        _require(is_finite(raw, plan.stored), plan.name)
    kind, step = plan.kept.value, plan.num_bytes // plan.stack
    for place, matrix in enumerate(raw.reshape(plan.stack, -1)):
        sizes = (plan.rows, plan.cols, address + place * step)
        native.check(native.cdll.kvt_pack(native.team, kind, address_of(matrix), *sizes))


def _converted(raw: np.ndarray, plan: MatrixPlan) -> np.ndarray:
    """The rows as they are kept, a slice at a time: [rows of the stack, row values or bytes]."""
    rows = raw.reshape(plan.stack * plan.rows, -1)
    step = max(1, SLICE_BYTES // (4 * plan.cols))
    slices = []
    for first in range(0, len(rows), step):
        with np.errstate(all="ignore"):
            values = gguf.quants.dequantize(rows[first : first + step], plan.stored)
            kept = gguf.quants.quantize(values, plan.kept)
        # A finite value may be too large for the scale of the type that it becomes.
        _require(bool(np.isfinite(values).all()) and is_finite(kept, plan.kept), plan.name)
        slices.append(kept)
    return np.ascontiguousarray(np.concatenate(slices))


def is_finite(raw: np.ndarray, stored: Type) -> bool:
    """Whether all values that the stored bytes stand for are finite."""
    if stored == Type.F32:
        return bool(np.isfinite(raw.view(np.float32)).all())
    if stored == Type.F16:
        return _all_halves_finite(raw.view(np.uint16))
    if stored == Type.BF16:
        return not bool(((raw.view(np.uint16) & 0x7F80) == 0x7F80).any())
    _, block_bytes = gguf.GGML_QUANT_SIZES[stored]
    blocks = raw.reshape(-1, block_bytes)
    if stored == Type.MXFP4:
        return int(blocks[:, 0].max()) <= MXFP4_LARGEST
    return all(
        _all_halves_finite(blocks[:, place : place + 2].copy().view(np.uint16))
        for place in SCALE_PLACES[stored]
    )


def _all_halves_finite(bits: np.ndarray) -> bool:
    return not bool(((bits & 0x7C00) == 0x7C00).any())


def _require(is_finite: bool, name: str) -> None:
    if not is_finite:
        raise ModelFileError(f"tensor {name} holds a weight that is not a finite number")
