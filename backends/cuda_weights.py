"""A file's tensors as the cuda backend keeps them: matrices in their own types where kernels know
those, repacked and on the device; all else as backend torch keeps it.

What backend torch stacks into one matrix is one product here too, of parts that may differ in type.
"""

from collections.abc import Mapping, Sequence
from math import prod

import torch
from attrs import frozen
from torch import Tensor
from tqdm import tqdm

from kvtrio.backends.torch_weights import TensorFile, kept_type, load_stack
from kvtrio.kernels.triton_pack import KINDS, Packed, pack, packed_bytes
from kvtrio.model.errors import ModelFileError
from kvtrio.model.gguf_file import TensorInfo

Plan = Mapping[str, tuple[str, ...]]
"""As ``weight_plan`` gives it, of a whole model or a part of one."""
EXPERTS = "_exps.weight"
LARGEST_EXPONENT = 252
"""Of MXFP4: the largest at which 12 * 2^(e - 128) is a float32."""


@frozen(eq=False)
class Matrix:
    """Matrices that read the same rows, or those of a layer's experts, one below the other."""

    parts: tuple[Packed | Tensor, ...]
    """Tensors are of the compute type, [rows, cols]."""

    @property
    def num_outputs(self) -> int:
        return sum(num_rows(part) for part in self.parts)


def num_rows(part: Packed | Tensor) -> int:
    """Outputs of one of a matrix's parts."""
    return part.rows if isinstance(part, Packed) else part.shape[0]


@frozen(eq=False)
class Weights:
    """All tensors of a model, by the names of ``weight_plan``."""

    matrices: Mapping[str, Matrix]
    tensors: Mapping[str, Tensor]
    """All that have no packed part: norms, biases, routers, matrices of floats."""


def is_packed(tensor: TensorInfo) -> bool:
    """Whether kernels compute with its type: matrices, and stacks of experts."""
    kind, shape = KINDS.get(tensor.ggml_type.name), tensor.shape
    is_known = len(shape) == 2 or (len(shape) == 3 and tensor.name.endswith(EXPERTS))
    return kind is not None and is_known and shape[-1] % kind.block == 0


def weight_bytes(file: TensorFile, plan: Plan, dtype: torch.dtype) -> int:
    """Bytes of all kept tensors."""
    names = (part for parts in plan.values() for part in parts)
    return sum(_kept_bytes(file.tensors[name], dtype) for name in names)


def passing_bytes(file: TensorFile, plan: Plan) -> int:
    """Bytes that loading needs besides: twice the largest tensor with a byte for each code, or
    as float32."""
    names = (part for parts in plan.values() for part in parts)
    return max(4 * prod(file.tensors[name].shape) for name in names)


def num_converted(file: TensorFile, plan: Plan) -> int:
    """Tensors of quantised types that are dequantised."""
    names = (part for parts in plan.values() for part in parts)
    plain = ("F32", "F16", "BF16")
    tensors = [file.tensors[name] for name in names]
    return sum(not is_packed(each) and each.ggml_type.name not in plain for each in tensors)


def _kept_bytes(tensor: TensorInfo, dtype: torch.dtype) -> int:
    if is_packed(tensor):
        return packed_bytes(tensor.ggml_type.name, prod(tensor.shape[:-1]), tensor.shape[-1])
    return prod(tensor.shape) * kept_type(tensor.name, tensor.shape, dtype).itemsize


def load_weights(file: TensorFile, plan: Plan, dtype: torch.dtype, device: torch.device) -> Weights:
    """All of ``plan`` on the device. Raises ModelFileError when a weight is not finite."""
    matrices: dict[str, Matrix] = {}
    tensors: dict[str, Tensor] = {}
    total = sum(file.tensors[part].num_bytes for parts in plan.values() for part in parts)
    # Shown only on a terminal (disable=None), and only when loading takes a while.
    with tqdm(total=total, desc="loading", unit="B", unit_scale=True, delay=1, disable=None) as bar:
        for name, parts in plan.items():
            if any(is_packed(file.tensors[part]) for part in parts):
                matrices[name] = _matrix(file, parts, dtype, device)
            else:
                tensors[name] = load_stack(file, parts, dtype).to(device)
            bar.update(sum(file.tensors[part].num_bytes for part in parts))
    return Weights(matrices, tensors)


def _matrix(
    file: TensorFile, names: Sequence[str], dtype: torch.dtype, device: torch.device
) -> Matrix:
    return Matrix(tuple(_part(file, name, dtype, device) for name in names))


def _part(file: TensorFile, name: str, dtype: torch.dtype, device: torch.device) -> Packed | Tensor:
    tensor = file.tensors[name]
    if not is_packed(tensor):
        return load_stack(file, (name,), dtype).to(device)
    rows, cols = prod(tensor.shape[:-1]), tensor.shape[-1]
    # A copy: the map cannot be written to, and torch would say so.
    raw = torch.from_numpy(file.raw(name).reshape(rows, -1).copy()).to(device)
    packed = pack(tensor.ggml_type.name, raw, cols)
    if not _is_finite(packed):
        raise ModelFileError(f"tensor {name} holds a weight that is not a finite number")
    return packed


def _is_finite(packed: Packed) -> bool:
    if packed.kind.is_exponent:
        return int(packed.d.max()) <= LARGEST_EXPONENT
    return all(
        bool(torch.isfinite(part).all()) for part in (packed.d, packed.m) if part is not None
    )
