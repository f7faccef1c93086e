"""Where steps run: on the one thread that owns the model, or in virtual time.

1. A step that was started cannot be cancelled: it writes KV until its end, and the core waits for
   its answer. ``run`` returns or raises only then, whatever happens to its caller; a cancellation
   that came meanwhile makes that step the last, and is delivered at the caller's next checkpoint.
2. Step follows step on the model's thread itself: the way over the event loop and back would cost
   it a tenth of a step of two milliseconds, and more while the loop is busy. What a step brought
   is told to the loop when the next one is decided, and read while that one runs.
3. Every ``run`` gives other tasks a turn.
4. The model is built, used and closed on the same thread: device, stream and inference mode are
   properties of a thread, and ``trio.to_thread`` does not promise the same one twice.

This is the only module that uses ``trio.lowlevel``.
"""

import math
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar, TypeVarTuple

import outcome
import trio
from attrs import define, frozen

from kvtrio.core.batch import Batch, StepResult

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
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


class Course(Protocol):
    """Decides what is computed, step by step; ``Hub`` is one."""

    def follow(self, batch: Batch, result: StepResult, is_last: bool) -> Batch | None:
        """Book ``batch`` and return the next one, if there is one; none if this is the last.
        Called in any thread."""
        ...

    def deliver(self) -> None:
        """Tell what was booked. Called on the event loop; does not raise."""
        ...


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


class Stepper(Protocol):
    """The part of a backend that computes."""

    def step(self, batch: Batch) -> StepResult: ...

    def load_adapter(self, data: Any) -> int: ...

    def unload_adapter(self, adapter_id: int) -> None: ...


@define(eq=False)
class _Call:
    """A function to run and the trio task that waits for its outcome."""

    task: trio.lowlevel.Task
    run: Callable[["_Call"], Any]
    is_cancelled: bool = False
    """The task would rather not wait any longer."""

    def cancel(self, raise_cancel: object) -> trio.lowlevel.Abort:
        self.is_cancelled = True
        return trio.lowlevel.Abort.FAILED


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
            self._answer(call)

    def _answer(self, call: _Call) -> None:
        result = outcome.capture(call.run, call)
        self._token.run_sync_soon(trio.lowlevel.reschedule, call.task, result)

    def _answer_others(self) -> None:
        while not self._calls.empty():
            call = self._calls.get()
            assert call is not None, "the thread is ended when nobody waits for it"
            self._answer(call)

    async def run(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run ``fn(*args)`` on the thread and return or raise what it does; not cancellable."""
        result: T = await self._run(lambda call: fn(*args))
        return result

    async def run_steps(self, model: "Stepper", batch: Batch, course: Course) -> None:
        """``Executor.run`` on the thread; other calls have their turn between two steps."""

        def steps(call: _Call) -> None:
            following: Batch | None = batch
            while following is not None:
                result = model.step(following)
                following = course.follow(following, result, call.is_cancelled)
                self._token.run_sync_soon(course.deliver, idempotent=True)
                self._answer_others()

        await self._run(steps)

    async def _run(self, run: Callable[[_Call], Any]) -> Any:
        call = _Call(trio.lowlevel.current_task(), run)
        self._calls.put(call)
        return await trio.lowlevel.wait_task_rescheduled(call.cancel)

    def end(self) -> None:
        """Let the thread finish and wait for it: at once, since no call is under way."""
        self._calls.put(None)
        self._thread.join()


@frozen(eq=False)
class ThreadExecutor(Generic[Info]):
    """Steps on the model thread. Made by ``open_thread_executor``."""

    info: Info
    """The backend's facts, read once: the backend itself stays on its thread."""
    _thread: _OwnedThread
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

    async def run(self, batch: Batch, course: Course) -> None:
        following: Batch | None = batch
        while following is not None:
            result = self.backend.step(following)
            with trio.CancelScope(shield=True):  # as on the thread: a started step ends
                await trio.sleep(self.cost(following))
            is_last = trio.current_effective_deadline() == -math.inf
            following = course.follow(following, result, is_last)
            course.deliver()

    async def load_adapter(self, data: Any) -> int:
        await checkpoint()
        return self.backend.load_adapter(data)

    async def unload_adapter(self, adapter_id: int) -> None:
        await checkpoint()
        self.backend.unload_adapter(adapter_id)
