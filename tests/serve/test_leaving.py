"""A client that leaves is forgotten within one step, whatever its request does, by any policy."""

from collections.abc import Callable
from typing import Any

import pytest
import trio
from attrs import evolve

from harness.serving import Serving, serving
from harness.virtual import SimSettings
from kvtrio.core.policy import Policy
from kvtrio.core.types import FinishReason
from kvtrio.schedulers.fair import Fair
from kvtrio.schedulers.fcfs import FCFS
from kvtrio.schedulers.priority import Priority
from kvtrio.schedulers.stall_free import StallFree

NATIVE, CHAT = "/completion", "/v1/chat/completions"
STEP_S = 0.1
SIM = SimSettings(num_places=2, max_batch_tokens=16, cost=lambda batch: STEP_S)


@pytest.fixture(params=[FCFS, StallFree, Fair, Priority], ids=lambda policy: policy.__name__)
def policy(request: pytest.FixtureRequest) -> Policy:
    make: Callable[[], Policy] = request.param
    return make()


def ask(**more: Any) -> dict[str, Any]:
    return {
        "prompt": "hi",
        "max_tokens": 100,
        "messages": [{"role": "user", "content": "x"}],
    } | more


async def leave(server: Serving, path: str, after_s: float, **more: Any) -> None:
    """Send a request, hang up, and see that one step later nothing of it is left."""
    before = len(server.stack.records.requests)
    num_present = len(server.stack.core.requests)
    await server.post(path, ask(**more), hang_up_after_s=after_s)
    await trio.sleep(STEP_S * 1.01)
    assert len(server.stack.core.requests) == num_present
    reasons = [record.reason for record in server.stack.records.requests[before:]]
    assert reasons == [FinishReason.ABORT] * more.get("n", 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_while_the_prompt_is_read(
    autojump_clock: Any, policy: Policy, stream: bool
) -> None:
    """No chunk is computed after the one under way."""
    async with serving(sim=evolve(SIM, policy=policy)) as server:
        await leave(server, NATIVE, 0.25, prompt="x" * 200, stream=stream)
        assert server.stack.is_empty
        (record,) = server.stack.records.requests
        assert record.num_computed_tokens <= 3 * SIM.max_batch_tokens
        assert record.num_generated_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_while_the_answer_is_written(
    autojump_clock: Any, policy: Policy, stream: bool
) -> None:
    """No token is made after the step under way."""
    async with serving(sim=evolve(SIM, policy=policy)) as server:
        await leave(server, NATIVE, 1.05, stream=stream)
        assert server.stack.is_empty
        assert server.stack.records.requests[0].num_generated_tokens <= 11


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_the_queue(autojump_clock: Any, policy: Policy, stream: bool) -> None:
    """Nothing of it is computed, and who waited behind it moves up."""
    async with serving(sim=evolve(SIM, policy=policy)) as server, trio.open_nursery() as nursery:
        for number in range(2):
            nursery.start_soon(server.post, NATIVE, ask(prompt=f"{number}", max_tokens=20))
        await trio.sleep(0.05)
        await leave(server, NATIVE, 0.5, prompt="y", stream=stream)
        assert server.stack.engine.statistics().num_waiting == 0
        assert server.stack.records.requests[0].num_computed_tokens == 0
        last = await server.post(NATIVE, ask(prompt="z", max_tokens=1))
        assert last.status == 200
    assert server.stack.is_empty


@pytest.mark.parametrize("after_s", [0.15, 1.55], ids=["reading", "writing"])
@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_with_several_answers(
    autojump_clock: Any, policy: Policy, stream: bool, after_s: float
) -> None:
    """One hang-up, as many aborts; those that wait are gone with those that run."""
    async with serving(sim=evolve(SIM, policy=policy)) as server:
        for _ in range(2):
            await leave(server, CHAT, after_s, n=2, stream=stream)
        batch = ["a", "b", "c", "d", "e"]
        await server.post("/v1/completions", ask(prompt=batch), hang_up_after_s=after_s)
        await trio.sleep(STEP_S * 1.01)
        assert server.stack.is_empty


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_after_losing_the_place(autojump_clock: Any, stream: bool) -> None:
    """A preempted request waits like any other, and is forgotten like any other."""
    sim = evolve(SIM, policy=Priority(), num_places=1)
    async with serving(sim=sim) as server, trio.open_nursery() as nursery:

        async def high() -> None:
            await trio.sleep(0.55)
            await server.post(NATIVE, ask(max_tokens=30, kvtrio={"priority": 1}))

        nursery.start_soon(high)
        await server.post(NATIVE, ask(prompt="low", stream=stream), hang_up_after_s=1.05)
        await trio.testing.wait_all_tasks_blocked()
        (record,) = server.stack.records.requests
        assert (record.reason, record.num_preemptions) == (FinishReason.ABORT, 1)
        assert server.stack.engine.statistics().num_waiting == 0
    assert server.stack.is_empty


async def test_bytes_behind_the_body_do_not_hide_a_deadline(autojump_clock: Any) -> None:
    """The server does not see such a client leave while nothing is written to it: the deadline
    ends what nobody waits for any more."""
    sim = evolve(SIM, policy=StallFree(), num_places=1)
    async with serving(sim=sim) as server, trio.open_nursery() as nursery:
        nursery.start_soon(server.post, NATIVE, ask(max_tokens=200))
        await trio.sleep(0.05)
        raw = b'{"prompt":"y","n_predict":5,"kvtrio":{"deadline_ms":3000}}'
        head = b"POST /completion HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(raw)
        stream = server.http.connect()
        await stream.send_all(head + raw + b"\r\nGET / HTTP/1.1\r\n")
        await trio.sleep(0.1)
        await stream.aclose()
        await trio.sleep(3.0)
        (record,) = server.stack.records.requests
        assert record.reason is FinishReason.DEADLINE
