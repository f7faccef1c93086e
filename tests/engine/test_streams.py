"""Requests through the engine in virtual time: streams, joining, leaving, draining."""

import random

import pytest
import trio
from attrs import define, field, frozen
from trio.testing import MockClock

from harness.core_fakes import NumberMatcher
from harness.virtual import (
    Records,
    SimSettings,
    SimStack,
    answer_of,
    read_all,
    run_virtual,
    script,
    sim_stack,
)
from kvtrio.backends.sim import SimBackend
from kvtrio.core.batch import Batch, StepResult
from kvtrio.core.events import Progress, Started, TokenOut
from kvtrio.core.sampling import SamplingParams
from kvtrio.core.types import FinishReason, RejectReason
from kvtrio.engine import Handle, Refused, open_engine
from kvtrio.engine.executor import VirtualExecutor


async def test_a_stream_starts_progresses_and_ends_with_its_account(
    autojump_clock: MockClock,
) -> None:
    """A reader sees Started, its prompt's progress, each token once and one Finished, in order."""
    async with sim_stack() as stack:
        outputs = await read_all(stack.engine.submit(stack.request(tuple(range(70)), 5)))
        assert isinstance(outputs[0], Started)
        computed = [each.num_computed_tokens for each in outputs if isinstance(each, Progress)]
        assert computed == [32, 64, 70]
        tokens = [each for each in outputs if isinstance(each, TokenOut)]
        assert [each.index for each in tokens] == [0, 1, 2, 3, 4]
        assert outputs[-5:-1] == tokens[1:]
        (record,) = stack.records.requests
        assert (record.reason, record.num_prompt_tokens) == (FinishReason.LENGTH, 70)
        assert record.num_cached_tokens + record.num_computed_tokens == 70
        assert stack.is_empty


async def test_what_became_ready_together_is_read_together(autojump_clock: MockClock) -> None:
    """The last token and Finished come in one tuple."""
    async with sim_stack() as stack:
        handle = stack.engine.submit(stack.request((1, 2, 3), 3))
        sizes = [len(outputs) async for outputs in handle]
        assert sizes == [3, 1, 2]


async def test_a_stop_string_ends_the_stream(autojump_clock: MockClock) -> None:
    """The engine knows no tokenizer: the request's matcher says when to stop."""
    async with sim_stack(SimSettings(token_function=script((7, 8, 9), then=1))) as stack:
        matcher = NumberMatcher(stops=frozenset({9}))
        tokens, finished = await answer_of(
            stack.engine.submit(stack.request((1,), 50, matcher=matcher))
        )
        assert tokens == (7, 8, 9)
        assert finished.reason is FinishReason.STOP
        assert finished.stopped_by_text


@define
class Guest:
    """A request of the crowd and what it got."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams
    handle: Handle | None = None
    tokens: list[int] = field(factory=list)
    left: bool = False


def random_guest(rng: random.Random) -> Guest:
    shared = tuple(range(rng.choice((0, 3, 20))))  # some prompts begin alike
    prompt = (*shared, *(rng.randrange(1000) for _ in range(rng.randint(1, 60))))
    temperature = rng.choice((0.0, 1.0))
    sampling = SamplingParams(temperature=temperature, seed=rng.randrange(1 << 64))
    return Guest(prompt, rng.randint(1, 30), sampling)


async def serve_guest(stack: SimStack, guest: Guest) -> None:
    request = stack.request(guest.prompt, guest.max_new_tokens, sampling=guest.sampling)
    guest.handle = stack.engine.submit(request)
    async for outputs in guest.handle:
        guest.tokens += [each.sampled.token_id for each in outputs if isinstance(each, TokenOut)]


async def crowd(stack: SimStack, rng: random.Random, num_steps: int) -> list[Guest]:
    """Guests come and go at random until ``num_steps`` steps have run."""
    guests: list[Guest] = []
    async with trio.open_nursery() as nursery:
        while len(stack.records.steps) < num_steps:
            if rng.random() < 0.7:
                guests.append(random_guest(rng))
                nursery.start_soon(serve_guest, stack, guests[-1])
            elif guests:
                guest = rng.choice(guests)
                if guest.handle:
                    guest.left = True
                    guest.handle.close()
            await trio.sleep(rng.expovariate(1 / 0.02))
    return guests


@pytest.mark.slow
async def test_joining_and_leaving_at_random_changes_nobodys_tokens(
    autojump_clock: MockClock,
) -> None:
    """For 200 steps guests join and leave; each gets the tokens it would get alone."""
    async with sim_stack() as stack:
        guests = await crowd(stack, random.Random(1), num_steps=200)
        assert stack.is_empty
        assert max(step.num_decode_rows for step in stack.records.steps) == 4
        assert any(step.num_decode_rows and step.num_prefill_tokens for step in stack.records.steps)
    assert sum(guest.left for guest in guests) > 10
    async with sim_stack() as alone:
        for guest in guests:
            again = Guest(guest.prompt, guest.max_new_tokens, guest.sampling)
            await serve_guest(alone, again)
            num_expected = len(guest.tokens) if guest.left else len(again.tokens)
            assert guest.tokens == again.tokens[:num_expected]


@define
class Log:
    """Backend that notes each batch and when it was launched."""

    inner: SimBackend
    batches: list[tuple[float, Batch]] = field(factory=list)

    def step(self, batch: Batch) -> StepResult:
        self.batches.append((trio.current_time(), batch))
        return self.inner.step(batch)


@frozen
class Arrival:
    when: float
    prompt: tuple[int, ...]


async def decisions(arrivals: list[Arrival]) -> list[tuple[float, Batch]]:
    settings = SimSettings(max_batch_tokens=16)
    log = Log(settings.backend())
    core, executor = settings.core(), VirtualExecutor(log, settings.cost)
    async with open_engine(core, executor, Records()) as engine, trio.open_nursery() as readers:
        stack = SimStack(engine, core, settings.backend(), Records(), settings)
        for arrival in arrivals:
            await trio.sleep_until(arrival.when)
            readers.start_soon(read_all, engine.submit(stack.request(arrival.prompt)))
    return log.batches


def test_the_same_arrivals_give_the_same_decisions() -> None:
    """Trio wakes tasks in random order; the batches and their times do not depend on it."""
    rng = random.Random(3)
    times = sorted(rng.choice((0.0, 0.1, 0.105, 0.2)) for _ in range(12))
    arrivals = [Arrival(when, tuple(rng.choices(range(99), k=20))) for when in times]

    async def main() -> list[tuple[float, Batch]]:
        return await decisions(arrivals)

    logs = [run_virtual(main) for _ in range(5)]
    assert len(logs[0]) > 20
    assert all(log == logs[0] for log in logs)


async def test_other_tasks_run_between_steps_that_take_no_time(autojump_clock: MockClock) -> None:
    """However short the steps, every one gives the other tasks a turn."""
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    async with sim_stack(SimSettings(cost=lambda batch: 0.0)) as stack, trio.open_nursery() as n:
        n.start_soon(other)
        await answer_of(stack.engine.submit(stack.request((1,), 50)))
        n.cancel_scope.cancel()
    assert turns >= len(stack.records.steps) == 50


async def test_a_reader_that_never_reads_costs_nobody_anything(autojump_clock: MockClock) -> None:
    """Its outbox keeps the newest progress and every token, and the others stream on."""
    async with sim_stack() as stack:
        deaf = stack.engine.submit(stack.request(tuple(range(100)), 40))
        tokens, _ = await answer_of(stack.engine.submit(stack.request((1, 2), 60)))
        assert len(tokens) == 60
        assert deaf.num_unread == 40 + 3
        (outputs,) = [outputs async for outputs in deaf]
        assert isinstance(outputs[0], Started)
        assert isinstance(outputs[1], Progress)
        assert outputs[1].num_computed_tokens == 100
        assert [each.index for each in outputs if isinstance(each, TokenOut)] == list(range(40))


async def test_an_answer_without_a_limit_ends_where_the_context_does(
    autojump_clock: MockClock,
) -> None:
    """With no max_new_tokens the context bounds answer and outbox."""
    async with sim_stack(SimSettings(max_context=32)) as stack:
        handle = stack.engine.submit(stack.request(tuple(range(20)), None))
        assert handle.max_new_tokens == 12
        tokens, finished = await answer_of(handle)
        assert len(tokens) == 12
        assert finished.reason is FinishReason.LENGTH


async def test_draining_finishes_what_was_admitted_and_refuses_the_rest(
    autojump_clock: MockClock,
) -> None:
    """Waiting and running requests end as they would have; new ones hear DRAINING."""
    async with sim_stack(SimSettings(num_places=1)) as stack, trio.open_nursery() as nursery:
        handles = [stack.engine.submit(stack.request((number,), 5)) for number in range(3)]
        await trio.sleep(0.01)
        stack.engine.drain()
        with pytest.raises(Refused) as refusal:
            stack.engine.submit(stack.request((1,)))
        assert refusal.value.rejected.reason is RejectReason.DRAINING
        for handle in handles:
            nursery.start_soon(read_all, handle)
        await stack.engine.wait_idle()
        assert stack.is_empty
        assert stack.engine.statistics().is_draining
        reasons = [record.reason for record in stack.records.requests]
        assert reasons == [FinishReason.LENGTH] * 3


async def test_a_refusal_changes_nothing(autojump_clock: MockClock) -> None:
    """Too long, empty, or one too many: an exception with the reason, and no trace."""
    async with sim_stack(SimSettings(num_places=1, max_waiting=0, max_context=16)) as stack:
        running = stack.engine.submit(stack.request((1,), 2))
        refused = {
            RejectReason.TOO_LONG: stack.request(tuple(range(16))),
            RejectReason.EMPTY: stack.request(()),
            RejectReason.QUEUE_FULL: stack.request((1,)),
        }
        for reason, request in refused.items():
            with pytest.raises(Refused) as refusal:
                stack.engine.submit(request)
            assert refusal.value.rejected.reason is reason
        await read_all(running)
        assert len(stack.records.requests) == 1
        assert stack.is_empty


async def test_wait_idle_wakes_every_waiter_when_the_last_request_ends(
    autojump_clock: MockClock,
) -> None:
    """Two tasks wait for the same end; nobody waits where nothing runs."""
    async with sim_stack() as stack:
        await stack.engine.wait_idle()
        handle = stack.engine.submit(stack.request((1,), 4))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stack.engine.wait_idle)
            await trio.sleep(0.001)
            stack.engine.submit(stack.request((1,), 8))
            nursery.start_soon(stack.engine.wait_idle)
        assert len(stack.records.requests) == 2
        assert stack.is_empty
        assert handle.num_unread > 0
        waiting = stack.engine.submit(stack.request((1,), 4))
        waiting.close()
        await stack.engine.wait_idle()
        assert stack.is_empty
