"""Where steps run: on the one thread that owns the model, or in virtual time.

1. A step that was started cannot be cancelled: it writes KV until its end, and the core waits for
   its answer. ``run`` returns or raises only then, whatever happens to its caller; a cancellation
   that comes meanwhile makes that step the last.
2. Every ``run`` gives other tasks a turn.
3. The model is built, used and closed on the same thread: device, stream and inference mode are
   properties of a thread, and ``trio.to_thread`` does not promise the same one twice.

This and ``model_thread`` are the only modules that use ``trio.lowlevel``.
"""

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Generic, Protocol, TypeVar

import trio
from attrs import frozen

from kvtrio.core.batch import Batch, StepResult
from kvtrio.engine.course import Course, Stepper
from kvtrio.engine.model_thread import ModelThread

Info = TypeVar("Info")
InfoCo = TypeVar("InfoCo", covariant=True)

checkpoint = trio.lowlevel.checkpoint
"""Give every other task a turn; raise a pending cancellation."""
checkpoint_if_cancelled = trio.lowlevel.checkpoint_if_cancelled
"""Raise a pending cancellation without giving anybody a turn."""
ParkingLot = trio.lowlevel.ParkingLot
"""Where tasks wait for news; unlike an event it needs no successor for the next news."""


def thread_safe_clock() -> Callable[[], float]:
    """The run's time in seconds, for any thread; ``trio.current_time`` is for the loop's own."""
    return trio.lowlevel.current_clock().current_time


class Executor(Protocol):
    """Runs one step at a time."""

    async def run(self, batch: Batch, course: Course) -> None:
        """Compute ``batch`` and whatever follows it; not cancellable within a step (rule 1). Raises
        what the backend and ``course`` raise."""
        ...

    async def load_adapter(self, data: Any) -> int:
        """Give the backend an adapter, between two steps; returns its handle."""
        ...

    async def unload_adapter(self, adapter_id: int) -> None:
        """Take it away again. The caller knows that no request uses it."""
        ...


class Model(Protocol[InfoCo]):
    """What an executor needs of a backend (``kvtrio.backends.base.Backend`` is one)."""

    @property
    def info(self) -> InfoCo: ...

    def step(self, batch: Batch) -> StepResult: ...

    def load_adapter(self, data: Any) -> int: ...

    def unload_adapter(self, adapter_id: int) -> None: ...

    def close(self) -> None: ...


@frozen(eq=False)
class ThreadExecutor(Generic[Info]):
    """Steps on the model thread. Made by ``open_thread_executor``."""

    info: Info
    """The backend's facts, read once: the backend itself stays on its thread."""
    _thread: ModelThread
    _backend: Stepper

    async def run(self, batch: Batch, course: Course) -> None:
        await self._thread.run_steps(self._backend, batch, course)

    async def load_adapter(self, data: Any) -> int:
        return await self._thread.run(self._backend.load_adapter, data)

    async def unload_adapter(self, adapter_id: int) -> None:
        await self._thread.run(self._backend.unload_adapter, adapter_id)


@asynccontextmanager
async def open_thread_executor(
    build: Callable[[], Model[Info]],
) -> AsyncIterator[ThreadExecutor[Info]]:
    """Build a backend on its own thread; on exit close it there and end the thread.

    What ``build`` raises is raised here. Loading a model cannot be cancelled either: a cancelled
    opener waits for it. Exit waits for a step that is under way.
    """
    thread = ModelThread("kvtrio model")
    try:
        backend = await thread.run(build)
        try:
            yield ThreadExecutor(backend.info, thread, backend)
        finally:
            # Not cancellable, so safe in ``finally``; behind any step, since calls keep order.
            await thread.run(backend.close)
    finally:
        thread.end()


@frozen
class VirtualExecutor:
    """Computes at once and lets ``cost(batch)`` seconds of the run's clock pass.

    For ``trio.testing.MockClock``: no thread, since its autojump does not see threads.
    """

    backend: Stepper
    cost: Callable[[Batch], float]

    async def run(self, batch: Batch, course: Course) -> None:
        following: Batch | None = batch
        while following is not None:
            result = self.backend.step(following)
            with trio.CancelScope(shield=True):  # as on the thread: a started step ends
                await trio.sleep(self.cost(following))
            course.book(following, result)
            is_last = trio.current_effective_deadline() == -math.inf
            following = None if is_last else course.decide()
            course.deliver()

    async def load_adapter(self, data: Any) -> int:
        await checkpoint()
        return self.backend.load_adapter(data)

    async def unload_adapter(self, adapter_id: int) -> None:
        await checkpoint()
        self.backend.unload_adapter(adapter_id)
