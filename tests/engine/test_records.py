"""Records of steps and requests: numbers that add up."""

import pytest
import trio
from trio.testing import MockClock

from harness.virtual import SimSettings, answer_of, sim_stack
from kvtrio.core.types import FinishReason
from kvtrio.engine.records import Gaps


def test_percentiles_are_gaps_that_happened() -> None:
    """Nearest rank: never an average of two gaps."""
    gaps = Gaps()
    assert gaps.percentiles(0.5, 1.0) == (None, None)
    gaps.add(1.0)
    assert gaps.percentiles(0.5) == (None,)
    for now in (2.0, 4.0, 8.0, 16.0):
        gaps.add(now)
    assert gaps.percentiles(0.25, 0.5, 0.51, 0.99, 1.0) == (1.0, 2.0, 4.0, 8.0, 8.0)


async def test_a_pause_between_tokens_is_the_requests_longest_gap(
    autojump_clock: MockClock,
) -> None:
    """A prompt that joins makes one step longer; the stream's record says by how much."""
    cost = 0.001
    settings = SimSettings(max_batch_tokens=128, cost=lambda batch: cost * batch.num_tokens)
    async with sim_stack(settings) as stack, trio.open_nursery() as nursery:
        nursery.start_soon(answer_of, stack.engine.submit(stack.request((1,), 101)))
        await trio.sleep(0.0205)
        nursery.start_soon(answer_of, stack.engine.submit(stack.request(tuple(range(100)), 1)))
    joined, stream = stack.records.requests
    assert joined.gap_max_s is None
    assert stream.gap_p50_s == pytest.approx(cost)
    assert stream.gap_p99_s == pytest.approx(cost)
    assert stream.gap_max_s == pytest.approx(101 * cost)
    assert stream.num_generated_tokens == 101


async def test_step_records_add_up_to_the_requests(autojump_clock: MockClock) -> None:
    """Prefill tokens are the prompts', decode rows the tokens after each first one."""
    async with sim_stack() as stack, trio.open_nursery() as nursery:
        for number in range(1, 7):
            request = stack.request(tuple(range(10 * number)), number)
            nursery.start_soon(answer_of, stack.engine.submit(request))
    steps, requests = stack.records.steps, stack.records.requests
    assert [step.step for step in steps] == list(range(len(steps)))
    computed = sum(request.num_computed_tokens for request in requests)
    assert sum(step.num_prefill_tokens for step in steps) == computed
    assert sum(step.num_decode_rows for step in steps) == sum(range(6))
    assert steps[0].num_waiting == 5  # the others begin alike: they wait for its first blocks
    assert (steps[-1].num_running, steps[-1].num_waiting) == (0, 0)
    assert sum(step.duration_s for step in steps) == pytest.approx(trio.current_time())
    assert all(step.predicted_s is None for step in steps)
    assert {record.reason for record in requests} == {FinishReason.LENGTH}
    for record in requests:
        assert record.num_computed_tokens + record.num_cached_tokens == record.num_prompt_tokens


async def test_request_times_add_up(autojump_clock: MockClock) -> None:
    """Queue, prefill and decode times of a request make up its stay."""
    async with sim_stack(SimSettings(num_places=1)) as stack:
        await trio.sleep(0.5)
        first = stack.engine.submit(stack.request(tuple(range(40)), 5))
        second = stack.engine.submit(stack.request(tuple(range(40)), 5))
        await answer_of(first)
        _, finished = await answer_of(second)
        stay_s = finished.queue_s + finished.prefill_s + finished.decode_s
        assert stay_s == pytest.approx(trio.current_time() - 0.5)
        one, two = stack.records.requests
        assert one.queue_s == 0
        assert two.queue_s == pytest.approx(one.prefill_s + one.decode_s)
