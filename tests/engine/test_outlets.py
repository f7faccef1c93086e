"""Tokens that are taken where their step is booked, in the place of a reader that waits."""

import itertools

from trio.testing import MockClock

from harness.virtual import sim_stack
from kvtrio.core.events import Finished, Output, TokenOut


async def test_an_outlet_takes_the_tokens_that_come_while_its_reader_waits(
    autojump_clock: MockClock,
) -> None:
    """The reader is woken by the beginning and by the end; every token is told once, in order, and
    counts for the request's record like any other."""
    async with sim_stack() as stack:
        taken: list[tuple[TokenOut, float]] = []
        group = stack.engine.submit_all([stack.request((1, 2, 3))])
        group.outlet = lambda output, now: not taken.append((output, now))
        ready = [outputs async for outputs in group]
        read = [each for each in itertools.chain(*ready) if isinstance(each, TokenOut)]
        tokens = [*read, *(output for output, _ in taken)]
        assert [each.index for each in tokens] == list(range(8))
        assert len(ready) == 2
        assert isinstance(ready[-1][-1], Finished)
        times = [now for _, now in taken]
        assert times == sorted(set(times))
        (record,) = stack.records.requests
        assert len(record.gaps_s) == record.num_generated_tokens - 1 == 7


async def test_what_an_outlet_refuses_is_read(autojump_clock: MockClock) -> None:
    """And what comes behind it, until the reader waits again: nothing overtakes."""
    async with sim_stack() as stack:
        told: list[Output] = []

        def take(output: TokenOut, now: float) -> bool:
            is_odd = output.index % 2 == 1
            if is_odd:
                told.append(output)
            return is_odd

        group = stack.engine.submit_all([stack.request((1, 2)), stack.request((3, 4))])
        group.outlet = take
        async for outputs in group:
            told.extend(outputs)
        for handle in group.handles:
            mine = [each for each in told if each.request_id == handle.request_id]
            assert [o.index for o in mine if isinstance(o, TokenOut)] == list(range(8))
            assert isinstance(mine[-1], Finished)


async def test_a_reader_that_left_has_no_outlet(autojump_clock: MockClock) -> None:
    """Closing a group takes its outlet away, too."""
    async with sim_stack() as stack:
        taken: list[TokenOut] = []
        group = stack.engine.submit_all([stack.request((1,), 200)])
        group.outlet = lambda output, now: not taken.append(output)
        await anext(group)
        group.close()
        num_taken = len(taken)
        await stack.engine.wait_idle()
        assert len(taken) == num_taken
        assert stack.is_empty
