"""The one thread that owns the model: calls in order, and steps that follow one another.

Step follows step on the thread itself: the way over the event loop and back would cost a tenth of a
step of two milliseconds, and more while the loop is busy. What a step brought is told to the loop
when the next one is decided, and read while that one runs.
"""

import socket
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar, TypeVarTuple

import outcome
import trio
from attrs import define, field

from kvtrio.core.batch import Batch
from kvtrio.engine.course import Course, Stepper

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@define(eq=False)
class _Bell:
    """Rung in the thread, heard on the loop."""

    _here: socket.socket = field(init=False)
    _there: socket.socket = field(init=False)
    _is_rung: bool = field(init=False, default=False)
    """And not heard yet: whoever hears it looks at all that there is by then."""

    def __attrs_post_init__(self) -> None:
        self._here, self._there = socket.socketpair()
        self._here.setblocking(False)
        self._there.setblocking(False)

    def ring(self) -> None:
        if not self._is_rung:
            self._is_rung = True
            self._there.send(b"\0")

    async def heard(self) -> None:
        """Wait for the next ring; several at once are one."""
        await trio.lowlevel.wait_readable(self._here)
        self._here.recv(4096)
        self._is_rung = False

    def close(self) -> None:
        self._here.close()
        self._there.close()


@define(eq=False)
class _Steps:
    """Steps under way. The loop sets ``is_last``, the thread ``result``."""

    is_last: bool = False
    result: outcome.Maybe[None] | None = None
    """None: they go on."""


class ModelThread:
    """Use from one trio run only."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._token = trio.lowlevel.current_trio_token()
        self._bell = _Bell()
        # A daemon: if trio itself breaks, nobody is left to end this thread.
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Let the thread finish and wait for it: at once, since no call is under way."""
        self._calls.put(None)
        self._thread.join()
        self._bell.close()

    async def run(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run ``fn(*args)`` on the thread and return or raise what it does; not cancellable."""
        task = trio.lowlevel.current_task()

        def call() -> None:
            result = outcome.capture(fn, *args)
            self._token.run_sync_soon(trio.lowlevel.reschedule, task, result)

        self._calls.put(call)
        answer: T = await trio.lowlevel.wait_task_rescheduled(_refuse_to_abort)
        return answer

    async def run_steps(self, model: Stepper, batch: Batch, course: Course) -> None:
        """``Executor.run``, with ``model`` on the thread; other calls have their turn between two
        steps."""
        steps = _Steps()
        self._calls.put(lambda: self._step_on(steps, model, batch, course))
        try:
            while steps.result is None:
                await self._bell.heard()
                course.deliver()
        except trio.Cancelled:
            (await self._end_of(steps)).unwrap()
            course.deliver()
            raise
        except BaseException:
            await self._end_of(steps)
            raise
        steps.result.unwrap()

    async def _end_of(self, steps: _Steps) -> outcome.Maybe[None]:
        steps.is_last = True
        with trio.CancelScope(shield=True):
            while steps.result is None:
                await self._bell.heard()
        assert steps.result is not None
        return steps.result

    # --- in the thread ---

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def _step_on(self, steps: _Steps, model: Stepper, batch: Batch, course: Course) -> None:
        def step() -> None:
            following: Batch | None = batch
            while following is not None:
                result = model.step(following)
                course.book(following, result)
                if not self._calls.empty():
                    # Before the next step is decided: their time is no part of it.
                    self._bell.ring()
                    self._answer_others()
                following = None if steps.is_last else course.decide()
                if following is not None and course.is_awaited:
                    self._bell.ring()

        steps.result = outcome.capture(step)
        self._bell.ring()

    def _answer_others(self) -> None:
        while not self._calls.empty():
            call = self._calls.get()
            assert call is not None, "the thread is ended when nobody waits for it"
            call()


def _refuse_to_abort(raise_cancel: object) -> trio.lowlevel.Abort:
    return trio.lowlevel.Abort.FAILED
