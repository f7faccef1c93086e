"""The model thread: one thread, from building to closing."""

import threading

import pytest
import trio
from attrs import define, field
from trio.testing import MockClock

from harness.virtual import SimSettings
from kvtrio.core.batch import Batch, StepResult
from kvtrio.engine.executor import VirtualExecutor, open_thread_executor

EMPTY = Batch(0, ())


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
            assert await executor.step(EMPTY) == StepResult(())
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
            await executor.step(EMPTY)
    assert backend.calls == calls
    assert model_threads() == []


async def test_a_started_step_returns_although_its_caller_was_cancelled() -> None:
    """Its answer arrives; the cancellation comes at the next checkpoint."""
    backend = Recorder()
    answers: list[StepResult] = []
    async with open_thread_executor(backend.build) as executor:
        with trio.CancelScope() as scope:
            scope.cancel()
            answers.append(await executor.step(EMPTY))
            await trio.lowlevel.checkpoint()
            answers.append(await executor.step(EMPTY))
    assert scope.cancelled_caught
    assert len(answers) == 1


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
            await executor.step(EMPTY)
        nursery.cancel_scope.cancel()
    assert len({ident for _, ident in backend.threads}) == 1


async def test_a_virtual_step_takes_its_cost_even_when_cancelled(
    autojump_clock: MockClock,
) -> None:
    """As on the thread: a started step ends, and so does the time it takes."""
    executor = VirtualExecutor(SimSettings().backend(), cost=lambda batch: 0.25)
    with trio.move_on_after(0.1):
        await executor.step(EMPTY)
    assert trio.current_time() == pytest.approx(0.25)
