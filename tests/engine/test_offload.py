"""The offload port: results, errors, cancellation, and how many at once."""

import threading
from functools import partial

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from kvtrio.engine.offload import InlineOffload, Offload, ThreadOffload


@pytest.mark.parametrize("offload", [ThreadOffload(2), InlineOffload()])
async def test_results_and_errors_come_back(offload: Offload) -> None:
    """A job returns or raises as if it had been called."""
    assert await offload.run(divmod, 7, 3) == (2, 1)
    with pytest.raises(ZeroDivisionError):
        await offload.run(divmod, 7, 0)


@pytest.mark.parametrize("offload", [ThreadOffload(2), InlineOffload()])
async def test_a_cancelled_caller_never_sees_a_result(offload: Offload) -> None:
    """Whoever has left does not go on to submit what was prepared for it."""
    with trio.CancelScope() as scope:
        scope.cancel()
        await offload.run(int)
    assert scope.cancelled_caught


async def test_a_started_job_outlives_its_caller_and_is_waited_for() -> None:
    """Cancelled in mid-job: the caller waits for the job's end and is cancelled then."""
    offload, started, gate = ThreadOffload(1), trio.Event(), threading.Event()
    token = trio.lowlevel.current_trio_token()
    ended: list[bool] = []

    def job() -> None:
        token.run_sync_soon(started.set)
        ended.append(gate.wait(timeout=10))

    async def caller() -> None:
        with scope:
            await offload.run(job)
        assert scope.cancelled_caught

    scope = trio.CancelScope()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(caller)
        await started.wait()
        scope.cancel()
        await wait_all_tasks_blocked()
        assert ended == []
        gate.set()
    assert ended == [True]


async def test_no_more_jobs_at_once_than_threads() -> None:
    """The third job of two threads starts when one of the first ends."""
    offload, gates = ThreadOffload(2), [threading.Event() for _ in range(3)]
    token, begun = trio.lowlevel.current_trio_token(), [trio.Event() for _ in range(3)]

    def job(number: int) -> None:
        token.run_sync_soon(begun[number].set)
        assert gates[number].wait(timeout=10)

    async with trio.open_nursery() as nursery:
        for number in range(2):
            nursery.start_soon(offload.run, job, number)
        for event in begun[:2]:
            await event.wait()
        nursery.start_soon(offload.run, job, 2)
        await wait_all_tasks_blocked()
        assert not begun[2].is_set()
        gates[0].set()
        await begun[2].wait()
        gates[1].set()
        gates[2].set()


async def test_a_small_job_does_not_wait_for_large_ones() -> None:
    """Large ones run one at a time; small ones pass them."""
    offload, gate = ThreadOffload(1, large_bytes=100), threading.Event()
    token, begun = trio.lowlevel.current_trio_token(), [trio.Event() for _ in range(2)]

    def job(number: int) -> None:
        token.run_sync_soon(begun[number].set)
        assert gate.wait(timeout=10)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(offload.run, job, 0, num_bytes=100))
        await begun[0].wait()
        nursery.start_soon(partial(offload.run, job, 1, num_bytes=100))
        assert await offload.run(len, "abc", num_bytes=99) == 3
        await wait_all_tasks_blocked()
        assert not begun[1].is_set()
        gate.set()


async def test_inline_jobs_take_no_virtual_time_but_give_a_turn(autojump_clock: MockClock) -> None:
    """Under the virtual clock a job is instantaneous, and still a checkpoint."""
    with trio.testing.assert_checkpoints():
        assert await InlineOffload().run(len, "abc") == 3
    assert trio.current_time() == 0
