"""The model thread: one thread, from building to closing."""

import threading
from collections.abc import Callable

import pytest
import trio
from attrs import define, field
from trio.testing import MockClock, wait_all_tasks_blocked

from harness.virtual import SimSettings
from kvtrio.core.batch import Batch, StepResult
from kvtrio.engine.executor import VirtualExecutor, open_thread_executor

EMPTY = Batch(0, ())


@define(eq=False)
class Laps:
    """A ``Course`` of so many equal steps, which notes what it is told and where."""

    num_left: int = 1
    is_awaited: bool = True
    threads: list[tuple[str, int]] = field(factory=list)
    on_call: Callable[[str], None] = lambda what: None

    def book(self, batch: Batch, result: StepResult) -> None:
        assert result == StepResult(())
        self.note("book")
        self.num_left -= 1

    def decide(self) -> Batch | None:
        self.note("decide")
        return EMPTY if self.num_left else None

    def note(self, what: str) -> None:
        self.threads.append((what, threading.get_ident()))
        self.on_call(what)

    def deliver(self) -> None:
        self.threads.append(("deliver", threading.get_ident()))


class Broken(Exception):
    """Something failed on the thread."""


@define(eq=False)
class Recorder:
    """A backend that notes on which thread each call came."""

    threads: list[tuple[str, int]] = field(factory=list)
    fails: frozenset[str] = frozenset()
    info: str = "facts"

    def note(self, what: str) -> None:
        self.threads.append((what, threading.get_ident()))
        if what in self.fails:
            raise Broken(what)

    def build(self) -> "Recorder":
        self.note("build")
        return self

    def step(self, batch: Batch) -> StepResult:
        self.note("step")
        return StepResult(())

    def load_adapter(self, data: object) -> int:
        self.note("load")
        return 1

    def unload_adapter(self, adapter_id: int) -> None:
        self.note("unload")

    def close(self) -> None:
        self.note("close")

    @property
    def calls(self) -> list[str]:
        return [what for what, _ in self.threads]


def model_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kvtrio model"]


async def test_the_backend_lives_on_one_thread_of_its_own() -> None:
    """Built, stepped and closed on the same thread, which ends with the block."""
    backend = Recorder()
    async with open_thread_executor(backend.build) as executor:
        assert executor.info == "facts"
        for _ in range(20):
            await executor.run(EMPTY, Laps())
        (thread,) = model_threads()
    assert backend.calls == ["build", *["step"] * 20, "close"]
    assert {ident for _, ident in backend.threads} == {thread.ident}
    assert thread.ident != threading.get_ident()
    assert model_threads() == []


@pytest.mark.parametrize(
    ("fails", "calls"),
    [
        ("build", ["build"]),
        ("step", ["build", "step", "close"]),
        ("close", ["build", "step", "close"]),
    ],
)
async def test_errors_come_out_where_they_belong(fails: str, calls: list[str]) -> None:
    """What fails on the thread is raised to the opener, and the thread ends all the same."""
    backend = Recorder(fails=frozenset({fails}))
    with pytest.raises(Broken, match=fails):
        async with open_thread_executor(backend.build) as executor:
            await executor.run(EMPTY, Laps())
    assert backend.calls == calls
    assert model_threads() == []


async def test_step_follows_step_on_the_thread_and_is_told_on_the_loop() -> None:
    """The loop's task is not needed between two steps; the last step is told before it goes on."""
    backend, laps = Recorder(), Laps(num_left=5)
    async with open_thread_executor(backend.build) as executor:
        await executor.run(EMPTY, laps)
        (thread,) = model_threads()
        assert laps.threads[-1] == ("deliver", threading.get_ident())
    assert backend.calls == ["build", *["step"] * 5, "close"]
    assert laps.threads.count(("book", thread.ident or 0)) == 5
    assert laps.threads.count(("decide", thread.ident or 0)) == 5
    assert ("deliver", thread.ident) not in laps.threads


async def test_a_cancelled_run_ends_with_the_step_under_way() -> None:
    """Its answer is booked as the last; the cancellation comes at the next checkpoint."""
    backend, laps = Recorder(), Laps(num_left=1_000_000_000)
    async with open_thread_executor(backend.build) as executor:
        with trio.CancelScope() as scope:
            scope.cancel()
            await executor.run(EMPTY, laps)
            await trio.lowlevel.checkpoint()
            await executor.run(EMPTY, laps)
    assert scope.cancelled_caught
    booked = [what for what, _ in laps.threads if what != "deliver"]
    assert booked[-1] == "book"
    assert booked.count("book") == backend.calls.count("step")


async def test_other_calls_have_their_turn_between_two_steps() -> None:
    """An adapter is loaded while one step follows the other, without end."""
    backend = Recorder()
    laps = Laps(num_left=1_000_000_000)
    async with open_thread_executor(backend.build) as executor, trio.open_nursery() as nursery:
        nursery.start_soon(executor.run, EMPTY, laps)
        assert await executor.load_adapter("data") == 1
        nursery.cancel_scope.cancel()
    assert backend.calls.count("load") == 1
    assert len({ident for _, ident in backend.threads}) == 1


async def test_the_next_step_is_decided_after_other_calls() -> None:
    """An adapter that is loaded between two steps delays the second, and is no part of it."""
    entered, goes = threading.Event(), threading.Event()

    class Held(Recorder):
        def step(self, batch: Batch) -> StepResult:
            entered.set()
            assert goes.wait(timeout=10)
            return Recorder.step(self, batch)

    backend = Held()
    laps = Laps(num_left=2, on_call=backend.note)
    async with open_thread_executor(backend.build) as executor, trio.open_nursery() as nursery:
        nursery.start_soon(executor.run, EMPTY, laps)
        await trio.to_thread.run_sync(entered.wait)
        nursery.start_soon(executor.load_adapter, "data")
        await wait_all_tasks_blocked()
        goes.set()
    calls = [what for what in backend.calls if what != "deliver"]
    assert calls[1:] == ["step", "book", "load", "decide", "step", "book", "decide", "close"]


async def test_a_broken_course_is_raised_where_it_was_begun() -> None:
    """What booking raises ends the run like what a step raises."""

    def broken(what: str) -> None:
        raise Broken

    backend = Recorder()
    async with open_thread_executor(backend.build) as executor:
        with pytest.raises(Broken):
            await executor.run(EMPTY, Laps(num_left=3, on_call=broken))
    assert backend.calls == ["build", "step", "close"]


async def test_a_cancelled_block_still_closes_on_the_thread() -> None:
    """Cleaning up needs no shield of the caller's."""
    backend = Recorder()
    with trio.CancelScope() as scope:
        async with open_thread_executor(backend.build):
            scope.cancel()
            await trio.sleep_forever()
    assert backend.calls == ["build", "close"]
    assert len({ident for _, ident in backend.threads}) == 1


async def test_the_thread_is_the_same_whoever_else_uses_threads() -> None:
    """Trio's own pool hands out whichever thread is free; this one is ours alone."""
    backend = Recorder()

    async def other_user() -> None:
        while True:
            await trio.to_thread.run_sync(threading.get_ident)

    async with open_thread_executor(backend.build) as executor, trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(other_user)
        for _ in range(50):
            await executor.run(EMPTY, Laps())
        nursery.cancel_scope.cancel()
    assert len({ident for _, ident in backend.threads}) == 1


async def test_a_virtual_step_takes_its_cost_even_when_cancelled(
    autojump_clock: MockClock,
) -> None:
    """As on the thread: a started step ends, and so does the time it takes."""
    executor = VirtualExecutor(SimSettings().backend(), cost=lambda batch: 0.25)
    with trio.move_on_after(0.1):
        await executor.run(EMPTY, Laps(num_left=3))
    assert trio.current_time() == pytest.approx(0.25)
