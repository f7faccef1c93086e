"""Backend ``cuda``: Triton's kernels on an NVIDIA GPU, weights in the file's quantised types.

It has never run on a GPU. It runs whole in Triton's interpreter (with ``TRITON_INTERPRET=1``, on
the CPU, for tests), and its kernels compile for GPUs. Importing this module loads Triton; no module
that is imported before it was chosen does.
"""

from typing import Self

import torch
from attrs import evolve

from kvtrio.backends.base import BackendError, BackendInfo, BackendSettings
from kvtrio.backends.cuda_adapters import AdapterTables
from kvtrio.backends.cuda_memory import travelling
from kvtrio.backends.cuda_moves import Mover
from kvtrio.backends.cuda_ops import CudaOps
from kvtrio.backends.cuda_step import CudaStep, build_cuda_step, padded_ratios
from kvtrio.backends.cuda_weights import (
    load_weights,
    num_converted,
    passing_bytes,
    weight_bytes,
)
from kvtrio.backends.groups import (
    core_groups,
    device_parts,
    host_blocks,
    layer_groups,
    pool_bytes,
    with_slots,
)
from kvtrio.backends.memory import Needs, require_memory, shrunk_host_bytes
from kvtrio.backends.torch_adapters import TorchAdapters
from kvtrio.backends.torch_backend import Parts, TorchBackend, dtype_of, ropes_of
from kvtrio.backends.torch_caches import layer_caches
from kvtrio.backends.torch_memory import available_memory, make_arenas
from kvtrio.backends.torch_states import layer_states
from kvtrio.backends.torch_step import StepLayout
from kvtrio.backends.torch_weights import TensorFile
from kvtrio.core.batch import Batch, Copy
from kvtrio.core.types import BlockId, Tier
from kvtrio.kernels.triton_common import is_interpreted
from kvtrio.model.spec import AttentionSpec, LatentAttentionSpec, ModelSpec

NO_GPU = (
    "backend cuda found no NVIDIA GPU that this torch can use (TRITON_INTERPRET=1 runs its kernels "
    "on the CPU, for tests only)"
)


class CudaBackend(TorchBackend):
    """Implements ``Backend``; make one with ``load``."""

    def __init__(self, spec: ModelSpec, parts: Parts, tables: AdapterTables) -> None:
        super().__init__(spec, parts)
        self._tables = tables
        self._mover = Mover(parts.pools, parts.layout.device)
        heads = {
            layer.index: layer.mixer.num_heads
            for layer in spec.layers
            if isinstance(layer.mixer, AttentionSpec)
        }
        self._ratios = padded_ratios(parts.layout.groups, heads)

    @classmethod
    def load(cls, file: TensorFile, spec: ModelSpec, settings: BackendSettings) -> Self:
        """See ``TorchBackend.load``; raises BackendError also where there is no GPU, and for a
        model with attention of a kind that no kernel computes."""
        dtype, device = dtype_of(settings.dtype), _device(settings.device)
        spec = spec.for_context(settings.max_context)
        if any(isinstance(layer.mixer, LatentAttentionSpec) for layer in spec.layers):
            raise BackendError(f"backend cuda has no kernels for {spec.architecture} yet")
        fitting = _with_room(file, spec, settings, device)
        info = evolve(
            _info(file, spec, fitting, device),
            host_is_short=fitting.host_bytes < settings.host_bytes,
        )
        with torch.inference_mode():
            weights = load_weights(file, spec, dtype, device)
            groups = layer_groups(spec)
            pools = travelling(make_arenas(groups, info, dtype, device), device)
            layout = StepLayout(
                groups=groups,
                ropes=ropes_of(file, spec),
                block_size=settings.block_size,
                dtype=dtype,
                device=device,
            )
            own, adapters = pools[Tier.DEVICE], TorchAdapters(spec, device)
            tables = AdapterTables(adapters.loaded, device)
            ops = CudaOps(weights, layer_caches(own), layer_states(own), tables, dtype)
        return cls(spec, Parts(info, layout, pools, ops, adapters), tables)

    def unload_adapter(self, adapter_id: int) -> None:
        """See ``Backend.unload_adapter``. Raises KeyError for an unknown handle."""
        super().unload_adapter(adapter_id)
        self._tables.forget()

    def copy(self, copy: Copy) -> None:
        """See ``moves.Places``."""
        self._open()
        self._mover.run((copy,))

    def read(self, group: int, place: BlockId, tier: Tier, num_tokens: int) -> bytes:
        """See ``moves.Places``."""
        self._mover.wait()
        return super().read(group, place, tier, num_tokens)

    def write(self, group: int, place: BlockId, tier: Tier, part: bytes) -> None:
        """See ``moves.Places``."""
        self._mover.wait()
        super().write(group, place, tier, part)

    def _begin(self, batch: Batch) -> CudaStep:
        parts = self._open()
        self._mover.run(batch.copies)
        loaded = parts.adapters.loaded
        for use in {use for chunk in batch.chunks for use in chunk.adapters}:
            loaded[use.adapter_id]
        return build_cuda_step(batch, parts.layout, self._ratios)


def _device(name: str) -> torch.device:
    """The default, "cpu", stands for the GPU; where kernels are interpreted, for what it says."""
    if is_interpreted():
        return torch.device("cpu")
    device = torch.device("cuda" if name == "cpu" else name)
    if device.type != "cuda" or not torch.cuda.is_available():
        raise BackendError(NO_GPU)
    index = device.index if device.index is not None else torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        raise BackendError(f"there is no GPU {index}; there are {torch.cuda.device_count()}")
    return torch.device("cuda", index)


def _with_room(
    file: TensorFile, spec: ModelSpec, settings: BackendSettings, device: torch.device
) -> BackendSettings:
    """The settings, with the RAM that may be taken. Raises BackendError where it is too little."""
    bare = _info(file, spec, evolve(settings, host_bytes=0), device)
    weights = bare.weight_bytes + passing_bytes(file, spec)
    needs = Needs(weights=weights, pools=bare.pool_bytes, host=settings.host_bytes)
    if device.type == "cuda":
        # Weights and pools have a memory of their own.
        require_memory(evolve(needs, host=0), available_memory(device))
        needs, device = evolve(needs, weights=0, pools=0), torch.device("cpu")
    available = available_memory(device)
    if settings.host_may_shrink:
        needs = evolve(needs, host=shrunk_host_bytes(needs, available))
    require_memory(needs, available)
    return evolve(settings, host_bytes=needs.host)


def _info(
    file: TensorFile, spec: ModelSpec, settings: BackendSettings, device: torch.device
) -> BackendInfo:
    dtype = dtype_of(settings.dtype)
    groups = core_groups(layer_groups(spec), dtype.itemsize, settings.max_context)
    settings = with_slots(groups, settings)
    num_host_blocks, num_host_parts = host_blocks(groups, settings)
    on_gpu = device.type == "cuda"
    info = BackendInfo(
        name="cuda",
        groups=groups,
        block_size=settings.block_size,
        num_blocks=settings.num_blocks,
        num_host_blocks=num_host_blocks,
        num_window_blocks=device_parts(groups, settings),
        num_host_window_blocks=num_host_parts,
        num_state_slots=settings.num_state_slots,
        num_host_state_slots=settings.num_host_state_slots or 0,
        is_unified=not on_gpu and settings.is_unified is not False,
        vocab_size=spec.vocab_size,
        max_context=settings.max_context,
        pool_bytes=0,
        weight_bytes=weight_bytes(file, spec, dtype),
        numerics=_numerics(device),
        num_converted=num_converted(file, spec),
    )
    return evolve(info, pool_bytes=pool_bytes(info))


def _numerics(device: torch.device) -> str:
    if device.type != "cuda":
        return "triton interpreter"
    major, minor = torch.cuda.get_device_capability(device)
    return f"triton sm_{major}{minor}"
