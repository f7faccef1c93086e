"""Backend ``cpu``: compiled kernels, weights as the file has them, one native call per step."""

import ctypes
import weakref
from typing import Self

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from kvtrio.backends.base import BackendError, BackendInfo, BackendSettings
from kvtrio.backends.cpu_adapters import CpuAdapters
from kvtrio.backends.cpu_ahead import Ahead, Arena, populate_function
from kvtrio.backends.cpu_memory import make_stores
from kvtrio.backends.cpu_model import Limits, NativeModel, Stored, make_model
from kvtrio.backends.cpu_native import Native, floats_at
from kvtrio.backends.cpu_places import CpuPlaces
from kvtrio.backends.cpu_sampling import RowPlan, plan_rows, sample_finite, sample_rows
from kvtrio.backends.cpu_sizing import Plan, sized
from kvtrio.backends.cpu_step import StepWriter
from kvtrio.backends.cpu_weights import TensorFile, load_weights
from kvtrio.backends.memory import Sizing, ram_available, require_room
from kvtrio.backends.moves import run_moves
from kvtrio.core.batch import Batch, GiveBack, Sampled, SampleRow, StepResult
from kvtrio.model.adapters import AdapterData
from kvtrio.model.spec import ModelSpec


@frozen(eq=False)
class _Parts:
    """What a loaded backend consists of."""

    info: BackendInfo
    native: Native
    model: NativeModel
    writer: StepWriter
    places: CpuPlaces
    adapters: CpuAdapters
    logits: NDArray[np.float32]
    """[max_sampled, V]: where every step leaves them."""
    ahead: Ahead

    def free(self) -> None:
        self.ahead.close()
        self.adapters.close()
        self.native.cdll.kvt_model_free(self.model.handle)
        self.native.close()


class CpuBackend:
    """Implements ``Backend``; make one with ``load``."""

    def __init__(self, parts: _Parts) -> None:
        self._parts: _Parts | None = parts
        # Python does not know of this memory: a backend that is dropped gives it back itself.
        self._release = weakref.finalize(self, parts.free)
        self._release.atexit = False

    @classmethod
    def load(cls, file: TensorFile, spec: ModelSpec, settings: BackendSettings) -> Self:
        """Pack the weights and set up the KV memory. ``file`` is not needed afterwards.

        Raises BackendError where the kernels are missing or do not have what is asked for, and,
        before it allocates anything large, for too little memory; ModelFileError for damaged
        weights.
        """
        native = _opened(settings)
        try:
            return cls(_load(native, file, spec.for_context(settings.max_context), settings))
        except BaseException:
            native.close()
            raise

    @classmethod
    def sizing(cls, file: TensorFile, spec: ModelSpec, settings: BackendSettings) -> Sizing:
        """What ``load`` would take. Raises as it does, but not for too little memory."""
        native = _opened(evolve(settings, num_threads=1))
        try:
            return sized(native, file, spec.for_context(settings.max_context), settings)[1]
        finally:
            native.close()

    @property
    def info(self) -> BackendInfo:
        return self._open().info

    def step(self, batch: Batch) -> StepResult:
        """See ``Backend.step``."""
        parts = self._open()
        rows = [chunk.sample for chunk in batch.chunks if chunk.sample is not None]
        plans = plan_rows(rows, parts.info.vocab_size)
        if any(isinstance(move, GiveBack) for move in batch.loads):
            parts.ahead.close()  # nothing is to be had ahead any more
        saved = run_moves(parts.places, batch)
        self._run(batch, plans)
        if not rows:
            return StepResult((None,) * len(batch.chunks), saved)
        sampled = self._sampled(rows, plans)
        if len(rows) == len(batch.chunks):
            return StepResult(sampled, saved)
        each = iter(sampled)
        every = tuple(next(each) if chunk.sample else None for chunk in batch.chunks)
        return StepResult(every, saved)

    def _sampled(self, rows: list[SampleRow], plans: list[RowPlan]) -> tuple[Sampled | None, ...]:
        parts = self._open()
        answers = parts.writer.answers
        found = answers.candidates(parts.writer.step, parts.logits)
        are_finite = answers.is_finite[: len(rows)]
        if all(are_finite):
            return sample_rows(rows, plans, found)
        return sample_finite(rows, plans, found, are_finite)

    def logits(self, batch: Batch) -> NDArray[np.float32]:
        """Run a step without choosing: raw logits of the sampled rows, [M, vocab], a copy."""
        rows = [chunk.sample for chunk in batch.chunks if chunk.sample is not None]
        plans = [RowPlan(row.params, None, None, 0, 1, False) for row in rows]
        run_moves(self._open().places, batch)
        self._run(batch, plans)
        return self._open().logits[: len(rows)].copy()

    def load_adapter(self, data: AdapterData) -> int:
        """See ``Backend.load_adapter``."""
        adapters = self._open().adapters
        require_room(data.num_bytes, ram_available())
        return adapters.load(data)

    def unload_adapter(self, adapter_id: int) -> None:
        """See ``Backend.unload_adapter``. Raises KeyError for an unknown handle."""
        self._open().adapters.unload(adapter_id)

    def close(self) -> None:
        """Give threads and memory back. Idempotent; no other call may follow."""
        self._parts = None
        self._release()

    def _open(self) -> _Parts:
        if self._parts is None:
            raise RuntimeError("the backend is closed")
        return self._parts

    def _run(self, batch: Batch, plans: list[RowPlan]) -> None:
        parts = self._open()
        if not batch.chunks:
            for copy in batch.copies:
                parts.places.copy(copy)
            return
        parts.native.cdll.kvt_team_wake(parts.native.team)  # meanwhile the step is written
        step = parts.writer.write(batch, plans, parts.adapters.loaded)
        parts.ahead.begin(parts.writer.reached)
        parts.native.check(parts.native.cdll.kvt_step_run(parts.model.handle, ctypes.byref(step)))
        parts.ahead.end()


def _opened(settings: BackendSettings) -> Native:
    if settings.device != "cpu":
        raise BackendError(f"backend cpu does not compute on device {settings.device!r}")
    return Native.open(settings.num_threads)


def _load(native: Native, file: TensorFile, spec: ModelSpec, settings: BackendSettings) -> _Parts:
    plan, sizing = sized(native, file, spec, settings)
    sizing.require()
    info = sizing.info
    stored = Stored(
        load_weights(native, file, spec, plan.matrices),
        make_stores(native, plan.groups, plan.sizes, settings, info),
    )
    limits = Limits(
        max_rows=settings.max_rows,
        max_sampled=min(settings.max_sampled, settings.max_rows),
        max_context=settings.max_context,
    )
    try:
        model = make_model(native, spec, stored, limits)
    except MemoryError:
        raise BackendError("not enough memory for the activations of a step") from None
    address = native.cdll.kvt_model_logits(model.handle)
    writer = StepWriter(_host_offsets(info), limits)
    return _Parts(
        info=info,
        native=native,
        model=model,
        writer=writer,
        places=CpuPlaces(native, model, writer),
        adapters=CpuAdapters(native, model, spec),
        logits=floats_at(address, (limits.max_sampled, spec.vocab_size)),
        ahead=Ahead(_arenas(plan, stored, info), populate_function()),
    )


def _arenas(plan: Plan, stored: Stored, info: BackendInfo) -> list[Arena]:
    """Of all layers, K and V; of what shares RAM with others only the device's part."""
    found = []
    for cache in stored.stores.caches.values():
        size = plan.sizes[cache.group]
        count = info.places(cache.group)[0] if info.ram else cache.num_blocks
        found.append(Arena(cache.keys, size.keys, count))
        if size.values:
            found.append(Arena(cache.values, size.values, count))
    return found


def _host_offsets(info: BackendInfo) -> tuple[int, ...]:
    counts = (info.places(i)[0] for i in range(len(info.groups)))
    return tuple(0 if info.is_unified else count for count in counts)
