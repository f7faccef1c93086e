"""The harness itself: a small application on the engine, over memory streams, in virtual time."""

from collections.abc import AsyncIterator

import pytest
import trio
from quart import Response, request
from quart_trio import QuartTrio
from trio.testing import MockClock, lockstep_stream_pair, wait_all_tasks_blocked

from harness.virtual import Call, SimSettings, SimStack, VirtualServer, sim_stack
from kvtrio.core.events import TokenOut
from kvtrio.core.types import FinishReason
from kvtrio.engine import Handle, Refused

STEP_S = 0.1
SETTINGS = SimSettings(num_places=2, max_waiting=1, cost=lambda batch: STEP_S)


def make_app(stack: SimStack) -> QuartTrio:
    """POST /count: as many tokens as the body says, one line each."""
    app = QuartTrio(__name__)
    app.config["RESPONSE_TIMEOUT"] = None

    async def lines(handle: Handle) -> AsyncIterator[bytes]:
        with handle:
            async for outputs in handle:
                for output in outputs:
                    if isinstance(output, TokenOut):
                        yield f"{output.text}\n".encode()

    @app.post("/count")
    async def count() -> Response:
        number = int(await request.get_data())
        try:
            handle = stack.engine.submit(stack.request((1, 2, 3), number))
        except Refused:
            return Response("full", status=429)
        return Response(lines(handle), content_type="text/plain")

    return app


async def test_a_stream_arrives_piece_by_piece_in_virtual_time(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    """Status, headers, each piece with its time, and the end."""
    async with sim_stack(SETTINGS) as stack:
        answer = await VirtualServer(make_app(stack), nursery).post("/count", b"5")
        nursery.cancel_scope.cancel()
    assert (answer.status, answer.is_complete) == (200, True)
    assert answer.headers["content-type"] == "text/plain"
    assert len(answer.body.split()) == len(answer.chunks) == 5
    assert answer.chunk_times_s == pytest.approx([STEP_S * number for number in range(1, 6)])
    assert answer.total_s == pytest.approx(answer.chunk_times_s[-1])


@pytest.mark.parametrize(
    "call",
    [
        Call(target="/count", method="POST", body=b"50", hang_up_after=3),
        Call(target="/count", method="POST", body=b"50", hang_up_after_s=3.5 * STEP_S),
    ],
)
async def test_a_client_that_hangs_up_frees_its_blocks_within_one_step(
    autojump_clock: MockClock, nursery: trio.Nursery, call: Call
) -> None:
    """The disconnect reaches the engine in the same virtual instant."""
    async with sim_stack(SETTINGS) as stack:
        answer = await VirtualServer(make_app(stack), nursery).call(call)
        num_steps, left_s = len(stack.records.steps), trio.current_time()
        await stack.engine.wait_idle()
        assert stack.is_empty
        assert trio.current_time() - left_s <= STEP_S
        assert len(stack.records.steps) <= num_steps + 1
        nursery.cancel_scope.cancel()
    assert (answer.status, answer.is_complete, len(answer.chunks)) == (200, False, 3)
    assert stack.records.requests[0].reason is FinishReason.ABORT


async def test_a_full_engine_answers_at_once(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    """Two places and one in the queue: of six at once, three are refused."""
    statuses: list[int | None] = []
    async with sim_stack(SETTINGS) as stack:
        server = VirtualServer(make_app(stack), nursery)

        async def one() -> None:
            statuses.append((await server.post("/count", b"2")).status)

        async with trio.open_nursery() as clients:
            for _ in range(6):
                clients.start_soon(one)
        nursery.cancel_scope.cancel()
    assert statuses == [429, 429, 429, 200, 200, 200]


async def test_a_client_that_stops_reading_delays_nobody(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    """The other stream gets its token with every step, and the engine is done with both."""
    async with sim_stack(SETTINGS) as stack:
        server = VirtualServer(make_app(stack), nursery)
        stuck = server.connect(lockstep_stream_pair)
        await stuck.send_all(b"POST /count HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\n\r\n200")
        await wait_all_tasks_blocked()
        answer = await server.post("/count", b"9")
        num_running_steps = 1 + 9  # it joins after the step under way
        assert answer.total_s == pytest.approx(num_running_steps * STEP_S)
        await stack.engine.wait_idle()
        assert stack.is_empty
        assert [each.num_generated_tokens for each in stack.records.requests] == [9, 200]
        nursery.cancel_scope.cancel()
