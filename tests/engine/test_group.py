"""Several requests read as one."""

from typing import Any

import pytest
import trio

from harness.virtual import SimSettings, sim_stack
from kvtrio.core.events import Finished, TokenOut
from kvtrio.engine import Refused


async def test_a_group_yields_what_each_handle_would(autojump_clock: Any) -> None:
    """Every request of a group ends, with its own tokens in order."""
    async with sim_stack() as stack:
        requests = [stack.request((1, 2, number)) for number in range(3)]
        group = stack.engine.submit_all(requests)
        outputs = [output async for ready in group for output in ready]
        for request in requests:
            mine = [each for each in outputs if each.request_id == request.request_id]
            assert [o.index for o in mine if isinstance(o, TokenOut)] == list(range(8))
            assert isinstance(mine[-1], Finished)
        with pytest.raises(StopAsyncIteration):
            await anext(group)


async def test_a_group_is_admitted_whole_or_not_at_all(autojump_clock: Any) -> None:
    """If one request of a group is refused, none of the others stays behind."""
    async with sim_stack(SimSettings(num_places=2, max_waiting=1)) as stack:
        with pytest.raises(Refused):
            stack.engine.submit_all([stack.request((1,)) for _ in range(4)])
        assert stack.is_empty


async def test_a_cancelled_read_takes_nothing(autojump_clock: Any) -> None:
    """A reader that gives up waiting finds all outputs at its next try."""
    async with sim_stack() as stack:
        group = stack.engine.submit_all([stack.request((1,)), stack.request((2,))])
        await stack.engine.wait_idle()
        with trio.CancelScope() as scope:
            scope.cancel()
            await anext(group)
        outputs = [output async for ready in group for output in ready]
        assert sum(isinstance(each, TokenOut) for each in outputs) == 16


async def test_closing_a_group_aborts_what_runs(autojump_clock: Any) -> None:
    """Closing frees the places of all its requests."""
    async with sim_stack() as stack:
        group = stack.engine.submit_all([stack.request((1,), 200), stack.request((2,), 200)])
        await anext(group)
        group.close()
        await stack.engine.wait_idle()
        assert stack.is_empty
