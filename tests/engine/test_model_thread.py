"""Core and engine while steps follow one another on the model's own thread."""

import threading

import pytest
import trio
from attrs import define, field

from harness.virtual import Records, SimSettings, SimStack, answer_of, read_all
from kvtrio.backends.base import BackendInfo
from kvtrio.backends.sim import SimBackend
from kvtrio.core.batch import Batch, StepResult
from kvtrio.core.events import Finished, TokenOut
from kvtrio.core.types import FinishReason
from kvtrio.engine import Handle, open_engine
from kvtrio.engine.executor import open_thread_executor
from kvtrio.engine.records import StepRecord


class Broken(Exception):
    """Something failed."""


@define(eq=False)
class Stepwise:
    """A backend that notes when it was entered and, once ``is_held``, waits to be let go on."""

    inner: SimBackend
    num_steps: int = 0
    is_held: bool = False
    enters: threading.Semaphore = field(factory=lambda: threading.Semaphore(0))
    goes: threading.Semaphore = field(factory=lambda: threading.Semaphore(0))

    @property
    def info(self) -> BackendInfo:
        return self.inner.info

    def step(self, batch: Batch) -> StepResult:
        self.num_steps += 1
        if self.is_held:
            self.enters.release()
            assert self.goes.acquire(timeout=10)
        return self.inner.step(batch)

    def load_adapter(self, data: object) -> int:
        return self.inner.load_adapter(data)

    def unload_adapter(self, adapter_id: int) -> None:
        self.inner.unload_adapter(adapter_id)

    def close(self) -> None:
        pass


def made() -> tuple[SimSettings, Stepwise]:
    settings = SimSettings()
    return settings, Stepwise(settings.backend())


async def test_a_crowd_on_the_thread_gets_its_tokens() -> None:
    """Requests that come and go while steps run are answered whole, under the core's checks."""
    settings, backend = made()
    core, records = settings.core(), Records()

    async def ask(number: int) -> None:
        handle = engine.submit(stack.request((number, number + 1), 20 + number))
        if number % 5 == 4:
            await anext(handle)
            handle.close()
            return
        tokens, finished = await answer_of(handle)
        assert len(tokens) == finished.num_generated_tokens == 20 + number

    with trio.fail_after(30):
        async with (
            open_thread_executor(lambda: backend) as executor,
            open_engine(core, executor, records, paranoid=True) as engine,
        ):
            stack = SimStack(engine, core, backend.inner, records, settings)
            async with trio.open_nursery() as nursery:
                for number in range(10):
                    nursery.start_soon(ask, number)
            await engine.wait_idle()
            assert stack.is_empty
    assert len(records.requests) == 10
    assert len(records.steps) == backend.num_steps


async def test_what_was_booked_before_an_abort_is_told_before_it() -> None:
    """The loop has not heard of a step yet when its reader leaves: the order is kept, and the
    account has the token."""
    settings, backend = made()
    backend.is_held = True
    core, records = settings.core(), Records()
    with trio.fail_after(10):
        async with (
            open_thread_executor(lambda: backend) as executor,
            open_engine(core, executor, records, paranoid=True) as engine,
        ):
            stack = SimStack(engine, core, backend.inner, records, settings)
            handle = engine.submit(stack.request((1, 2, 3), 50))
            await trio.to_thread.run_sync(backend.enters.acquire)
            backend.goes.release()
            # On the loop's own thread: no ring is heard until the second step is under way.
            assert backend.enters.acquire(timeout=10)
            assert handle.num_unread == 0
            engine.abort_all()
            backend.goes.release()
            await engine.wait_idle()
            outputs = await read_all(handle)
    assert sum(isinstance(each, TokenOut) for each in outputs) in (1, 2)
    assert isinstance(outputs[-1], Finished)
    (record,) = records.requests
    assert record.reason is FinishReason.ABORT


async def test_an_observer_that_breaks_ends_the_engine_after_the_step_under_way() -> None:
    """The steps on the thread stop, the last is booked, and the error leaves as a group."""

    class BadObserver(Records):
        def step(self, record: StepRecord) -> None:
            raise Broken

    settings, backend = made()
    core = settings.core()
    with trio.fail_after(10), pytest.RaisesGroup(Broken):
        async with (
            open_thread_executor(lambda: backend) as executor,
            open_engine(core, executor, BadObserver()) as engine,
        ):
            stack = SimStack(engine, core, backend.inner, Records(), settings)
            engine.submit(stack.request((1,), 200))
            await trio.sleep_forever()
    assert core.in_flight is None


async def test_a_step_that_breaks_on_the_thread_ends_the_engine() -> None:
    """Its error leaves as a group, and readers get what was made before."""
    settings, backend = made()
    core, handles = settings.core(), list[Handle]()

    def broken(batch: Batch) -> StepResult:
        if batch.step == 3:
            raise Broken
        return SimBackend.step(backend.inner, batch)

    backend.inner.step = broken  # type: ignore[method-assign]
    with trio.fail_after(10), pytest.RaisesGroup(Broken):
        async with (
            open_thread_executor(lambda: backend) as executor,
            open_engine(core, executor, Records()) as engine,
        ):
            stack = SimStack(engine, core, backend.inner, Records(), settings)
            handles.append(engine.submit(stack.request((1,), 200)))
            await trio.sleep_forever()
    assert sum(isinstance(each, TokenOut) for each in await anext(handles[0])) == 3
