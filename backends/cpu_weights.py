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
from kvtrio.model.spec import AttentionSpec, ModelSpec, RopeSpec
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
    stored: Type
    kept: Type
    """As packed."""
    num_bytes: int
    """Packed."""


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
    rows, cols = tensor.shape
    for kept in (tensor.ggml_type, Type.Q8_0):
        num_bytes = native.cdll.kvt_packed_bytes(kept.value, rows, cols)
        if num_bytes >= 0:
            return MatrixPlan(tensor.name, rows, cols, tensor.ggml_type, kept, num_bytes)
    raise ModelFileError(f"tensor {tensor.name} has rows of {cols} values, which is unsupported")


def weight_bytes(plans: tuple[MatrixPlan, ...], spec: ModelSpec) -> int:
    """Bytes of all kept tensors."""
    shapes = needed_tensors(spec).items()
    vectors = sum(4 * prod(shape) for name, shape in shapes if not is_matrix(name, shape))
    return vectors + sum(aligned(plan.num_bytes) for plan in plans)


def passing_bytes(plans: tuple[MatrixPlan, ...]) -> int:
    """Bytes that loading needs besides: the largest converted matrix, on its way in."""
    return max((2 * plan.rows * plan.cols for plan in plans if plan.kept != plan.stored), default=0)


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
        rope = layer.mixer.rope if isinstance(layer.mixer, AttentionSpec) else None
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
    native.check(
        native.cdll.kvt_pack(
            native.team, plan.kept.value, address_of(raw), plan.rows, plan.cols, address
        )
    )


def _converted(raw: np.ndarray, plan: MatrixPlan) -> np.ndarray:
    """The rows as Q8_0, a slice at a time: uint8 [rows, row bytes]."""
    rows = raw.reshape(plan.rows, -1)
    step = max(1, SLICE_BYTES // (4 * plan.cols))
    slices = []
    for first in range(0, plan.rows, step):
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
