"""How the engine ends: by a broken backend, by cancellation, by leaving."""

import threading

import pytest
import trio
from attrs import define, field, frozen
from trio.testing import MockClock, wait_all_tasks_blocked

from harness.virtual import Records, SimSettings, SimStack, answer_of, read_all, sim_stack
from kvtrio.backends.base import BackendInfo
from kvtrio.backends.sim import SimBackend
from kvtrio.core import invariants
from kvtrio.core.batch import Batch, StepResult
from kvtrio.core.events import Output
from kvtrio.core.machine import Core
from kvtrio.engine import EngineStopped, Handle, open_engine
from kvtrio.engine.executor import VirtualExecutor, open_thread_executor
from kvtrio.engine.records import StepRecord


class Broken(Exception):
    """The device is gone."""


@frozen
class Breaking:
    """A backend whose step ``at_step`` raises."""

    inner: SimBackend
    at_step: int

    def step(self, batch: Batch) -> StepResult:
        if batch.step == self.at_step:
            raise Broken
        return self.inner.step(batch)


def pieces(at_step: int) -> tuple[SimSettings, Core, VirtualExecutor]:
    settings = SimSettings()
    executor = VirtualExecutor(Breaking(settings.backend(), at_step), settings.cost)
    return settings, settings.core(), executor


async def test_a_broken_step_ends_engine_body_and_readers(autojump_clock: MockClock) -> None:
    """The exception leaves as a group; readers inside are cancelled, nothing hangs."""
    settings, core, executor = pieces(at_step=4)
    read: list[Output] = []
    with trio.fail_after(10), pytest.RaisesGroup(Broken):
        async with open_engine(core, executor, Records()) as engine:
            stack = SimStack(engine, core, settings.backend(), Records(), settings)
            async for outputs in engine.submit(stack.request((1, 2), 50)):
                read += outputs
    assert len(read) == 2 + 4  # Started, Progress and the tokens of four steps


async def test_whoever_outlives_the_engine_is_told(autojump_clock: MockClock) -> None:
    """Old handles give what they hold and then EngineStopped; submit and wait_idle do not hang."""
    settings, core, executor = pieces(at_step=3)
    outcomes: list[str] = []

    async def outside(handle: Handle) -> None:
        try:
            await read_all(handle)
        except EngineStopped:
            outcomes.append("stopped")

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            with pytest.RaisesGroup(Broken):
                async with open_engine(core, executor, Records()) as engine:
                    stack = SimStack(engine, core, settings.backend(), Records(), settings)
                    late = engine.submit(stack.request((1,), 50))
                    nursery.start_soon(outside, engine.submit(stack.request((2,), 50)))
                    await trio.sleep_forever()
    assert outcomes == ["stopped"]
    assert len(await anext(late)) == 2 + 3
    with pytest.raises(EngineStopped):
        await anext(late)
    late.close()
    with pytest.raises(EngineStopped):
        engine.submit(stack.request((3,)))
    with trio.fail_after(1):
        await engine.wait_idle()


async def test_a_broken_observer_ends_the_engine(autojump_clock: MockClock) -> None:
    """An account that cannot be kept is an error like any other, not a log line."""

    class BadObserver(Records):
        def step(self, record: StepRecord) -> None:
            raise Broken

    settings, core, executor = pieces(at_step=-1)
    with trio.fail_after(10), pytest.RaisesGroup(Broken):
        async with open_engine(core, executor, BadObserver()) as engine:
            stack = SimStack(engine, core, settings.backend(), Records(), settings)
            await read_all(engine.submit(stack.request((1,))))
            await trio.sleep_forever()


async def test_cancelled_during_a_step_the_engine_books_it_and_leaves(
    autojump_clock: MockClock,
) -> None:
    """The step runs to its end and is booked; the core is whole, and no further step starts."""
    settings, core, executor = pieces(at_step=-1)
    records = Records()
    with trio.move_on_after(0.0001) as scope:
        async with open_engine(core, executor, records, paranoid=True) as engine:
            stack = SimStack(engine, core, settings.backend(), records, settings)
            handle = engine.submit(stack.request((1, 2, 3), 50))
            await trio.sleep_forever()
    assert scope.cancelled_caught
    (step,) = records.steps
    assert trio.current_time() == pytest.approx(step.duration_s) != 0.0001
    assert core.in_flight is None
    invariants.check(core)
    assert len(await anext(handle)) == 3


async def test_a_close_while_the_engine_is_being_cancelled_is_booked(
    autojump_clock: MockClock,
) -> None:
    """A handler that closes on its way out gets its request's account written."""
    settings, core, executor = pieces(at_step=-1)
    records = Records()
    with trio.move_on_after(0.0001):
        async with open_engine(core, executor, records) as engine:
            stack = SimStack(engine, core, settings.backend(), records, settings)
            with engine.submit(stack.request((1, 2, 3), 50)) as handle:
                await read_all(handle)
    assert [record.reason.value for record in records.requests] == ["abort"]
    assert not core.has_work


async def test_leaving_the_body_ends_the_engine_after_its_step(autojump_clock: MockClock) -> None:
    """A normal exit waits for the step under way and for nothing else."""
    async with sim_stack() as stack:
        stack.engine.submit(stack.request((1,), 100))
        await trio.sleep(0.001)
    assert len(stack.records.steps) == 1
    assert stack.core.in_flight is None


async def test_an_error_of_the_body_ends_the_engine_too(autojump_clock: MockClock) -> None:
    """It leaves as a group, like an error of the engine itself."""
    with pytest.RaisesGroup(Broken):
        _, core, executor = pieces(at_step=-1)
        async with open_engine(core, executor, Records()):
            raise Broken


@define(eq=False)
class Gated:
    """A backend whose steps wait at a gate, on a real thread."""

    inner: SimBackend
    entered: trio.Event
    token: trio.lowlevel.TrioToken
    gate: threading.Event = field(factory=threading.Event)

    @property
    def info(self) -> BackendInfo:
        return self.inner.info

    def step(self, batch: Batch) -> StepResult:
        self.token.run_sync_soon(self.entered.set)
        assert self.gate.wait(timeout=10)
        return self.inner.step(batch)

    def close(self) -> None:
        pass


async def test_on_the_real_thread_too_a_cancelled_engine_waits_for_its_step() -> None:
    """While the step is held, nobody leaves; when it ends, it is booked and all leave."""
    settings = SimSettings()
    backend = Gated(settings.backend(), trio.Event(), trio.lowlevel.current_trio_token())
    core, records = settings.core(), Records()
    left = trio.Event()

    async def serve() -> None:
        async with (
            open_thread_executor(lambda: backend) as executor,
            open_engine(core, executor, records, paranoid=True) as engine,
        ):
            stack = SimStack(engine, core, backend.inner, records, settings)
            engine.submit(stack.request((1, 2, 3), 50))
            await trio.sleep_forever()

    async def cancelled() -> None:
        with scope:
            await serve()
        left.set()

    scope = trio.CancelScope()
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancelled)
            await backend.entered.wait()
            scope.cancel()
            await wait_all_tasks_blocked()
            assert not left.is_set()
            assert core.in_flight is not None
            backend.gate.set()
            await left.wait()
    assert core.in_flight is None
    assert len(records.steps) == 1


async def test_callers_go_on_while_a_step_is_held() -> None:
    """Submitting, closing and refusing need no step to end."""
    settings = SimSettings()
    backend = Gated(settings.backend(), trio.Event(), trio.lowlevel.current_trio_token())
    core, records = settings.core(), Records()
    with trio.fail_after(10):
        async with (
            open_thread_executor(lambda: backend) as executor,
            open_engine(core, executor, records, paranoid=True) as engine,
        ):
            stack = SimStack(engine, core, backend.inner, records, settings)
            running = engine.submit(stack.request((1, 2, 3), 5))
            await backend.entered.wait()
            joined = engine.submit(stack.request((4,), 5))
            engine.submit(stack.request((5,), 5)).close()
            assert [record.reason.value for record in records.requests] == ["abort"]
            assert engine.statistics().num_waiting == 1
            backend.gate.set()
            assert len((await answer_of(running))[0]) == len((await answer_of(joined))[0]) == 5
            assert stack.is_empty
