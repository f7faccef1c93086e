"""A caller that goes away: what it held is free within one step."""

import pytest
import trio
from trio.testing import MockClock

from harness.virtual import SimSettings, answer_of, sim_stack
from kvtrio.core.events import Progress, TokenOut
from kvtrio.core.types import FinishReason


async def test_leaving_the_queue_is_immediate(autojump_clock: MockClock) -> None:
    """A waiting request is gone with its close, and never gets a step."""
    async with sim_stack(SimSettings(num_places=1)) as stack:
        with stack.engine.submit(stack.request((1,), 4)) as first:
            waiting = stack.engine.submit(stack.request((2,), 4))
            await trio.sleep(0.001)  # in the first step
            waiting.close()
            assert stack.engine.statistics().num_waiting == 0
            (record,) = stack.records.requests
            assert record.reason is FinishReason.ABORT
            assert record.place is None
            assert record.queue_s == pytest.approx(0.001)
            await answer_of(first)
        assert len(stack.records.requests) == 2


@pytest.mark.parametrize("kind", [Progress, TokenOut])
async def test_leaving_frees_everything_within_one_step(
    autojump_clock: MockClock, kind: type[Progress] | type[TokenOut]
) -> None:
    """Closed in mid-prefill or in mid-answer: the step under way is the last."""
    async with sim_stack() as stack:
        handle = stack.engine.submit(stack.request(tuple(range(100)), 50))
        async for outputs in handle:
            if isinstance(outputs[-1], kind):
                break
        num_steps = len(stack.records.steps)
        assert not stack.is_empty
        handle.close()
        await stack.engine.wait_idle()
        assert stack.is_empty
        assert len(stack.records.steps) == num_steps + 1
        assert stack.records.requests[-1].reason is FinishReason.ABORT


async def test_a_block_in_flight_is_not_given_away(autojump_clock: MockClock) -> None:
    """A request is closed while its step runs and another arrives in the same instant: the sim
    backend, which would see a foreign write, sees none."""
    async with sim_stack(SimSettings(num_places=1)) as stack:
        handle = stack.engine.submit(stack.request(tuple(range(60)), 50))
        await trio.sleep(0.001)
        handle.close()
        assert stack.num_held_blocks > 0
        tokens, _ = await answer_of(stack.engine.submit(stack.request((5, 6), 3)))
        assert len(tokens) == 3
        assert stack.is_empty


async def test_close_is_idempotent_and_ends_the_iteration(autojump_clock: MockClock) -> None:
    """Twice, after the end, or while another task reads: no error, no second abort."""
    async with sim_stack() as stack:
        handle = stack.engine.submit(stack.request((1,), 2))
        await answer_of(handle)
        handle.close()
        handle.close()
        assert [record.reason for record in stack.records.requests] == [FinishReason.LENGTH]
        other = stack.engine.submit(stack.request((1,), 50))
        seen: list[object] = []

        async def read() -> None:
            async for outputs in other:
                seen.extend(outputs)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await trio.sleep(0.02)
            other.close()
            other.close()
            num_seen = len(seen)
        assert len(seen) == num_seen > 0


async def test_a_cancelled_reader_that_leaves_its_with_block_aborts(
    autojump_clock: MockClock,
) -> None:
    """A deadline on reading is enough to stop the request."""
    async with sim_stack() as stack:
        with (
            trio.move_on_after(0.02) as limit,
            stack.engine.submit(stack.request((1,), 200)) as handle,
        ):
            async for _ in handle:
                pass
        assert limit.cancelled_caught
        await stack.engine.wait_idle()
        assert stack.is_empty
        assert stack.records.requests[0].reason is FinishReason.ABORT


async def test_a_cancelled_wait_loses_no_output(autojump_clock: MockClock) -> None:
    """A reader may give up waiting and come back, as one that sends heartbeats does."""
    async with sim_stack() as stack:
        handle = stack.engine.submit(stack.request((1,), 10))
        indices: list[int] = []
        num_timeouts = 0
        while len(indices) < 10:
            with trio.move_on_after(0.002) as limit:
                outputs = await anext(handle)
                indices += [each.index for each in outputs if isinstance(each, TokenOut)]
            num_timeouts += limit.cancelled_caught
        assert indices == list(range(10))
        assert num_timeouts > 10
