"""The cuda backend in Triton's interpreter, with small random models."""

from collections.abc import Mapping

import gguf
import numpy as np
from attrs import evolve, frozen

from harness.devices import late_device
from harness.torch_models import (
    BIASED,
    DELTA,
    LATENT,
    MAMBA_SCALED,
    RandomFile,
    random_file,
    settings,
    spec,
)
from kvtrio.backends.cuda_backend import CudaBackend
from kvtrio.backends.torch_backend import TorchBackend
from kvtrio.model.gguf_file import TensorInfo
from kvtrio.model.layer_tensors import is_matrix
from kvtrio.model.spec import ModelSpec


@frozen(eq=False)
class QuantisedFile:
    """Random weights of which most matrices are quantised, as in a model file."""

    plain: RandomFile
    packed: Mapping[str, tuple[gguf.GGMLQuantizationType, np.ndarray]]
    """uint8 [rows, row bytes]."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        infos = dict(self.plain.tensors)
        for name, (kind, rows) in self.packed.items():
            infos[name] = TensorInfo(
                name=name,
                shape=infos[name].shape,
                ggml_type=kind,
                num_bytes=rows.nbytes,
                part=0,
                offset=0,
            )
        return infos

    def raw(self, name: str) -> np.ndarray:
        if name in self.packed:
            return self.packed[name][1].reshape(-1)
        return self.plain.raw(name)

    def dequantise(self, name: str) -> np.ndarray:
        if name not in self.packed:
            return self.plain.dequantise(name)
        kind, rows = self.packed[name]
        return gguf.quants.dequantize(rows, kind)


TYPES = tuple(gguf.GGMLQuantizationType[name] for name in ("Q8_0", "Q5_1", "Q4_0", "Q5_0", "Q4_1"))


def quantised_file(model: ModelSpec, seed: int = 0) -> QuantisedFile:
    """The weights of ``random_file``, in one type after the other where rows are long enough."""
    plain = random_file(model, seed)
    matrices = [
        (name, array)
        for name, array in plain.arrays.items()
        if is_matrix(name, array.shape) and array.ndim == 2 and array.shape[1] % 32 == 0
        and "conv" not in name and "gate_inp" not in name
    ]  # fmt: skip
    packed = {
        name: (TYPES[i % len(TYPES)], gguf.quants.quantize(array, TYPES[i % len(TYPES)]))
        for i, (name, array) in enumerate(matrices)
    }
    return QuantisedFile(plain, packed)


EVERY_KIND = spec(
    evolve(BIASED.layers[0], mixer=evolve(BIASED.layers[0].attention, window=7)),
    evolve(DELTA.layers[0], index=1),
    evolve(MAMBA_SCALED.layers[0], index=2, feed_forward=None),
    evolve(LATENT.layers[1], index=3),
)
"""A window, sinks, biased and scored experts, two kinds of states, latent attention."""


def random_cuda(model: ModelSpec, **changes: object) -> CudaBackend:
    """Quantised weights, all else in float32."""
    return CudaBackend.load(quantised_file(model), model, settings(**changes))


def late_cuda(model: ModelSpec, **changes: object) -> CudaBackend:
    """The same, with copies between the tiers as late as they may be."""
    return CudaBackend.load_on((late_device(),), quantised_file(model), model, settings(**changes))


def same_torch(model: ModelSpec, **changes: object) -> TorchBackend:
    """The reference with the very same weights."""
    return TorchBackend.load(quantised_file(model), model, settings(**changes))
