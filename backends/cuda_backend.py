"""Backend ``cuda``: Triton's kernels on NVIDIA GPUs, weights in the file's quantised types.

It has never run on a GPU. It runs whole in Triton's interpreter (with ``TRITON_INTERPRET=1``, on
the CPU, for tests), and its kernels compile for GPUs. Importing this module loads Triton; no module
that is imported before it was chosen does.
"""

from collections.abc import Callable, Sequence
from typing import Self

import torch
from attrs import frozen
from torch import Tensor

from kvtrio.backends.base import BackendError, BackendInfo, BackendSettings
from kvtrio.backends.cuda_devices import Device, find_devices, surely
from kvtrio.backends.cuda_forward import Forward
from kvtrio.backends.cuda_graphs import Graph, are_captured, graph_maker
from kvtrio.backends.cuda_loading import load_stages
from kvtrio.backends.cuda_relief import Fitter
from kvtrio.backends.cuda_stage import Stage
from kvtrio.backends.cuda_staged import (
    StagedAdapters,
    StagedStates,
    read_staged,
    write_staged,
)
from kvtrio.backends.moves import run_moves
from kvtrio.backends.torch_weights import TensorFile
from kvtrio.core.batch import Batch, Copy, StepResult
from kvtrio.core.types import BlockId, Tier
from kvtrio.model.adapters import AdapterData
from kvtrio.model.spec import ModelSpec

NO_ROOM_FOR_GRAPHS = (
    "not enough memory on the GPU to capture decoding steps; --no-cuda-graphs does "
    "without, and a smaller --gpu-memory-fraction leaves more"
)


@frozen(eq=False)
class _Parts:
    """What a loaded backend consists of."""

    info: BackendInfo
    stages: tuple[Stage, ...]
    adapters: StagedAdapters


class CudaBackend:
    """Implements ``Backend``; make one with ``load``."""

    def __init__(self, spec: ModelSpec, info: BackendInfo, stages: tuple[Stage, ...]) -> None:
        self._spec = spec
        self._parts: _Parts | None = _Parts(info, stages, StagedAdapters(spec, stages, info.memory))
        self._forward = Forward(spec, stages)
        self._fitter = Fitter(self._forward.choices, StagedStates(stages))

    @classmethod
    def load(cls, file: TensorFile, spec: ModelSpec, settings: BackendSettings) -> Self:
        """Load the weights and set up the pools. ``file`` is not needed afterwards.

        Raises BackendError for an unknown type, a GPU that is not there, or too little memory, and
        as far as it can be foretold before anything is allocated; ModelFileError for damaged
        weights.
        """
        devices = find_devices(settings.device, max(1, len(settings.tensor_split)))
        return cls.load_on(devices, file, spec, settings)

    @classmethod
    def load_on(
        cls,
        devices: Sequence[Device],
        file: TensorFile,
        spec: ModelSpec,
        settings: BackendSettings,
    ) -> Self:
        """The same on given devices."""
        spec = spec.for_context(settings.max_context)
        info, stages = load_stages(devices, file, spec, settings)
        backend = cls(spec, info, stages)
        if all(device.place.type == "cuda" for device in devices):
            backend.warm(settings.max_rows)
        if are_captured(devices, settings):
            backend.capture(graph_maker(), settings.max_sampled)
        return backend

    def warm(self, max_rows: int) -> None:
        """Have all kernels compiled that prompts need, in steps of up to so many rows."""
        with torch.inference_mode():
            self._forward.warm((max_rows, self.info.max_context))

    def capture(self, make: Callable[[], Graph], max_rows: int) -> None:
        """Capture steps of up to so many decoding rows, and launch those from now on.

        Of a backend with one stage. Raises BackendError where there is too little memory.
        """
        parts = self._open()
        try:
            with torch.inference_mode():
                self._forward.capture(make, (max_rows, parts.info.max_context))
            return
        except torch.OutOfMemoryError:
            pass
        raise BackendError(NO_ROOM_FOR_GRAPHS)

    @property
    def info(self) -> BackendInfo:
        return self._open().info

    def step(self, batch: Batch) -> StepResult:
        """See ``Backend.step``. What does not fit into memory is done in parts: ``cuda_relief``."""
        self._open()
        with torch.inference_mode():
            saved = self._moved(batch)
            done = self._fitter.run(batch)
        return StepResult(done.sampled, saved, done.unplaced)

    def logits(self, batch: Batch) -> Tensor:
        """Run a step without choosing: raw logits of the sampled rows, float32 [M, vocab]."""
        self._open()
        with torch.inference_mode():
            self._moved(batch)
            return self._forward.logits(batch)

    def load_adapter(self, data: AdapterData) -> int:
        """See ``Backend.load_adapter``."""
        with torch.inference_mode():
            return self._open().adapters.load(data)

    def unload_adapter(self, adapter_id: int) -> None:
        """See ``Backend.unload_adapter``. Raises KeyError for an unknown handle."""
        self._open().adapters.unload(adapter_id)

    def copy(self, copy: Copy) -> None:
        """See ``moves.Places``."""
        self._run_copies((copy,))

    def read(self, group: int, place: BlockId, tier: Tier, num_tokens: int) -> bytes:
        """See ``moves.Places``."""
        self._wait()
        stages = self._open().stages
        return surely(
            stages[0].device, lambda: read_staged(stages, (group, place, tier), num_tokens)
        )

    def give_back(self, group: int, place: BlockId, tier: Tier) -> None:
        """RAM is pinned here and each kind of state has its share: nobody asks."""
        raise AssertionError("pinned memory is not given back")

    def write(self, group: int, place: BlockId, tier: Tier, part: bytes) -> None:
        """See ``moves.Places``."""
        self._wait()
        stages = self._open().stages
        surely(stages[0].device, lambda: write_staged(stages, (group, place, tier), part))

    def close(self) -> None:
        """Give the memory back. Idempotent; no other call may follow."""
        if self._parts is not None:
            self._wait()
            del self._forward, self._fitter
            self._parts = None

    def _open(self) -> _Parts:
        if self._parts is None:
            raise RuntimeError("the backend is closed")
        return self._parts

    def _moved(self, batch: Batch) -> tuple[tuple[bytes, ...], ...]:
        saved = run_moves(self, batch)
        if batch.copies:
            self._run_copies(batch.copies)
        return saved

    def _run_copies(self, copies: tuple[Copy, ...]) -> None:
        for stage in self._open().stages:
            stage.device.activate()
            stage.mover.run(copies)

    def _wait(self) -> None:
        for stage in self._open().stages:
            stage.mover.wait()
