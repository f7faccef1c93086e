"""Where a step runs: on the one thread that owns the model, or in virtual time.

1. A step that was started cannot be cancelled: it writes KV until its end, and the core waits for
   its answer. ``step`` returns or raises only then, whatever happens to its caller; a cancellation
   that came meanwhile is delivered at the caller's next checkpoint.
2. Every ``step`` gives other tasks a turn.
3. The model is built, used and closed on the same thread: device, stream and inference mode are
   properties of a thread, and ``trio.to_thread`` does not promise the same one twice.

This is the only module that uses ``trio.lowlevel``.
"""

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar, TypeVarTuple

import outcome
import trio
from attrs import frozen

from kvtrio.core.batch import Batch, StepResult

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Info = TypeVar("Info")
InfoCo = TypeVar("InfoCo", covariant=True)

checkpoint = trio.lowlevel.checkpoint
"""Give every other task a turn; raise a pending cancellation."""
checkpoint_if_cancelled = trio.lowlevel.checkpoint_if_cancelled
"""Raise a pending cancellation without giving anybody a turn."""


class Executor(Protocol):
    """Runs one step at a time."""

    async def step(self, batch: Batch) -> StepResult:
        """Compute ``batch``; not cancellable (rule 1). Raises what the backend raises."""
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


class Stepper(Protocol):
    """The part of a backend that computes."""

    def step(self, batch: Batch) -> StepResult: ...

    def load_adapter(self, data: Any) -> int: ...

    def unload_adapter(self, adapter_id: int) -> None: ...


@frozen
class _Call:
    """A function to run and the trio task that waits for its outcome."""

    task: trio.lowlevel.Task
    run: Callable[[], Any]


class _OwnedThread:
    """One OS thread; runs what it is given in order. Use from one trio run only."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._token = trio.lowlevel.current_trio_token()
        # A daemon: if trio itself breaks, nobody is left to end this thread.
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            result = outcome.capture(call.run)
            self._token.run_sync_soon(trio.lowlevel.reschedule, call.task, result)

    async def run(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run ``fn(*args)`` on the thread and return or raise what it does; not cancellable."""
        self._calls.put(_Call(trio.lowlevel.current_task(), lambda: fn(*args)))
        result: T = await trio.lowlevel.wait_task_rescheduled(_refuse_to_abort)
        return result

    def end(self) -> None:
        """Let the thread finish and wait for it: at once, since no call is under way."""
        self._calls.put(None)
        self._thread.join()


def _refuse_to_abort(raise_cancel: object) -> trio.lowlevel.Abort:
    return trio.lowlevel.Abort.FAILED


@frozen(eq=False)
class ThreadExecutor(Generic[Info]):
    """Steps on the model thread. Made by ``open_thread_executor``."""

    info: Info
    """The backend's facts, read once: the backend itself stays on its thread."""
    _thread: _OwnedThread
    _backend: Stepper

    async def step(self, batch: Batch) -> StepResult:
        return await self._thread.run(self._backend.step, batch)

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
    thread = _OwnedThread("kvtrio model")
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

    async def step(self, batch: Batch) -> StepResult:
        result = self.backend.step(batch)
        with trio.CancelScope(shield=True):  # as on the thread: a started step ends
            await trio.sleep(self.cost(batch))
        return result

    async def load_adapter(self, data: Any) -> int:
        await checkpoint()
        return self.backend.load_adapter(data)

    async def unload_adapter(self, adapter_id: int) -> None:
        await checkpoint()
        self.backend.unload_adapter(adapter_id)
