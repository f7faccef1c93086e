"""Records of steps and requests: numbers that add up."""

import pytest
import trio
from trio.testing import MockClock

from harness.virtual import SimSettings, answer_of, read_all, sim_stack
from kvtrio.core.batch import Batch
from kvtrio.core.events import Finished, OtherPrompt, Progress, TokenOut
from kvtrio.core.types import FinishReason, GapCause, RejectReason, Tier
from kvtrio.engine import Refused
from kvtrio.engine.records import BreachReason, Gaps, breach_of
from kvtrio.schedulers.priority import Priority


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


async def test_the_longest_gap_has_a_cause(autojump_clock: MockClock) -> None:
    """Somebody else's prompt, with its size; or nothing but the step."""
    settings = SimSettings(max_batch_tokens=128, cost=lambda batch: 0.001 * batch.num_tokens)
    async with sim_stack(settings) as stack, trio.open_nursery() as nursery:
        nursery.start_soon(answer_of, stack.engine.submit(stack.request((1,), 101)))
        await trio.sleep(0.0205)
        nursery.start_soon(answer_of, stack.engine.submit(stack.request(tuple(range(100)), 5)))
    joined, stream = stack.records.requests
    assert joined.longest_gap is not None
    assert (joined.longest_gap.cause, joined.longest_gap.num_prefill_tokens) == (GapCause.STEP, 0)
    assert stream.longest_gap is not None
    assert stream.longest_gap.seconds == pytest.approx(0.101)
    assert stream.longest_gap.cause is GapCause.PREFILL
    assert stream.longest_gap.num_prefill_tokens == 100
    assert stream.longest_gap.prompt == OtherPrompt(joined.request_id, 100, 0)
    assert (joined.longest_gap.prompt, stream.longest_gap.at) == (None, 22)
    assert stack.engine.statistics().num_stalls == {GapCause.PREFILL: 1}


async def test_usage_is_told_now_and_then(autojump_clock: MockClock) -> None:
    """Every 250 steps, with what running requests hold."""
    async with sim_stack(SimSettings(max_context=512)) as stack:
        await answer_of(stack.engine.submit(stack.request((1,), 251)))
    (usage,) = stack.records.usages
    assert (usage.num_running, usage.num_used_blocks[Tier.DEVICE]) == (1, 63)


async def test_a_reader_that_does_not_read_is_a_cause(autojump_clock: MockClock) -> None:
    """Tokens that lay ready for longer than any took to make: the gap is the reader's own."""
    async with sim_stack() as stack:
        handle = stack.engine.submit(stack.request((1,), 50))
        await anext(handle)
        await trio.sleep(0.2)
        await answer_of(handle)
        (record,) = stack.records.requests
        assert record.longest_gap is not None
        assert record.longest_gap.cause is GapCause.READER
        assert record.longest_gap.seconds == pytest.approx(0.2, abs=0.01)
        assert record.gap_max_s == pytest.approx(0.0057)
        assert stack.engine.statistics().num_stalls == {}


async def test_a_preempted_stream_reports_no_progress_again(autojump_clock: MockClock) -> None:
    """Whatever is read a second time, a reader that never reads holds a bounded outbox."""
    settings = SimSettings(num_places=1, policy=Priority(), num_host_blocks=0)
    async with sim_stack(settings) as stack:
        low = stack.engine.submit(stack.request(tuple(range(60)), 30))
        for _ in range(3):
            await trio.sleep(0.04)
            await answer_of(stack.engine.submit(stack.request((5, 6, 7), 3, priority=1)))
        outputs = await read_all(low)
        tokens = [each.index for each in outputs if isinstance(each, TokenOut)]
        assert tokens == list(range(30))
        first = next(i for i, each in enumerate(outputs) if isinstance(each, TokenOut))
        assert not any(isinstance(each, Progress) for each in outputs[first:])
        account = outputs[-1]
        assert isinstance(account, Finished)
        assert account.num_preemptions == 3


@pytest.mark.parametrize(
    ("predicted_s", "num_prefill_tokens", "reason"),
    [
        (0.09, 300, BreachReason.MISPREDICTED),
        (0.2, 16, BreachReason.ONE_BLOCK),
        (0.2, 17, BreachReason.POLICY),
        (0.2, 0, BreachReason.ROWS),
    ],
)
def test_a_breach_has_a_reason(
    predicted_s: float, num_prefill_tokens: int, reason: BreachReason
) -> None:
    """Nobody foresaw it, or somebody had to, or somebody did not care."""
    batch = Batch(0, (), predicted_s=predicted_s, limit_s=0.1)
    assert breach_of(batch, num_prefill_tokens, 16, 0.101) is reason
    assert breach_of(batch, num_prefill_tokens, 16, 0.1) is None


async def test_what_steps_cost_is_reported_now_and_then(autojump_clock: MockClock) -> None:
    """Every thousand steps and at the end; the model has learned the machine by then."""
    async with sim_stack(SimSettings(max_context=2500)) as stack:
        await answer_of(stack.engine.submit(stack.request((1,), 2400)))
        assert [cost.num_observed for cost in stack.records.costs] == [1000, 2000]
    assert stack.records.costs[-1].num_observed == 2400
    assert stack.records.costs[-1].margin < 1.1


async def test_refusals_are_reported(autojump_clock: MockClock) -> None:
    """Observers hear of those that were not admitted."""
    async with sim_stack() as stack:
        with pytest.raises(Refused):
            stack.engine.submit(stack.request(()))
        assert [each.reason for each in stack.records.rejections] == [RejectReason.EMPTY]


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
    assert steps[0].predicted_s > steps[0].duration_s  # the first guess is a slow machine
    assert {step.limit_s for step in steps} == {0.1, 0.25}
    assert all(step.breach is None for step in steps)
    (cost,) = stack.records.costs
    assert cost.num_observed == len(steps)
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
