"""What happens to a stream: silence, leaving clients, errors on the way, stalled readers."""

import json
from typing import Any

import pytest
import trio
import trio.testing

from harness.real_http import request
from harness.serving import HEARTBEAT_S, Reply, Serving, serving
from harness.virtual import SimSettings
from harness.virtual_http import Call
from kvtrio.core.batch import Batch
from kvtrio.core.types import FinishReason
from kvtrio.serve.bounded import BoundedTCPServer

CHAT, NATIVE = "/v1/chat/completions", "/completion"
HI = {"messages": [{"role": "user", "content": "hi"}]}


def slow(batch: Batch) -> float:
    """Twelve seconds for a step that reads, one hundredth for one that only writes."""
    return 12.0 if any(len(chunk.token_ids) > 1 for chunk in batch.chunks) else 0.01


def stream_call(path: str = NATIVE, **more: Any) -> Call:
    body = HI if path == CHAT else {"prompt": "hi"}
    raw = json.dumps({**body, "stream": True, "n_predict": 20, **more}).encode()
    return Call(target=path, method="POST", body=raw, **{})


def wire(call: Call) -> bytes:
    """The call's bytes, for clients that misbehave."""
    return request(call.target, method=call.method, body=call.body)


async def until_empty(server: Serving) -> float:
    """Wait until the engine has nothing left; return the virtual time."""
    await server.stack.engine.wait_idle()
    assert server.stack.is_empty
    return trio.current_time()


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", NATIVE])
async def test_a_silent_stream_gets_comments(autojump_clock: Any, path: str) -> None:
    """While a request is read, a comment goes out every few seconds; the headers at once."""
    async with serving(sim=SimSettings(cost=slow)) as server:
        answer = await server.call(stream_call(path, prompt="hi"))
        times = answer.raw.chunk_times_s
        num_steps = 2 if path == CHAT else 1
        assert [frame for frame in answer.frames if frame == b":"] == [b":"] * (
            2 if num_steps == 1 else 4
        )
        assert times[:2] == pytest.approx([HEARTBEAT_S, 2 * HEARTBEAT_S])
        assert answer.frames[0] == b":"


async def test_a_queued_stream_gets_comments(autojump_clock: Any) -> None:
    """The same while it waits for a place, and again only when the wire was silent for so long."""
    sim = SimSettings(num_places=1, cost=lambda batch: 1.0)
    async with serving(sim=sim) as server, trio.open_nursery() as nursery:
        nursery.start_soon(server.call, stream_call())
        await trio.sleep(0.5)
        answer = await server.call(stream_call())
        assert answer.frames.count(b":") == 4
        assert answer.frames[-1].startswith(b"data: ")


async def test_the_caller_may_choose_the_interval(autojump_clock: Any) -> None:
    """sse_ping_interval in seconds, as in llama-server; it cannot be switched off."""
    async with serving(sim=SimSettings(cost=slow)) as server:
        for interval, number in ((7, 1), (0, 2), (-1, 2), (60, 0)):
            fields = {"sse_ping_interval": interval, "cache_prompt": False}
            answer = await server.call(stream_call(**fields))
            assert answer.frames.count(b":") == number


async def test_progress_resets_no_silence(autojump_clock: Any) -> None:
    """Steps that put nothing on the wire do not count as life."""
    sim = SimSettings(cost=lambda batch: 3.0)
    async with serving(sim=sim) as server:
        answer = await server.call(stream_call(prompt="x" * 200))
        assert answer.frames[:4] == [b":"] * 4
        assert answer.raw.chunk_times_s[:4] == pytest.approx([5.0, 10.0, 15.0, 20.0])


@pytest.mark.parametrize("path", [CHAT, NATIVE])
async def test_plain_answers_have_no_comments(autojump_clock: Any, path: str) -> None:
    """Only streams are kept alive: a plain body is JSON and nothing else."""
    async with serving(sim=SimSettings(cost=slow)) as server:
        answer = await server.call(stream_call(path, stream=False))
        assert answer.status == 200
        assert isinstance(answer.json, dict)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", [CHAT, NATIVE])
async def test_a_client_that_leaves_frees_everything(
    autojump_clock: Any, path: str, stream: bool
) -> None:
    """Hanging up ends the request within the running step, streamed or plain."""
    async with serving() as server:
        await server.call(evolved(stream_call(path, stream=stream, n_predict=-1), 0.1))
        left_s = trio.current_time()
        assert await until_empty(server) - left_s <= 0.02
        assert len(server.stack.records.requests) == 1
        assert server.stack.records.requests[0].reason is FinishReason.ABORT


def evolved(call: Call, hang_up_after_s: float) -> Call:
    return Call(
        target=call.target, method=call.method, body=call.body, hang_up_after_s=hang_up_after_s
    )


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_during_prefill_stops_it(autojump_clock: Any, stream: bool) -> None:
    """At most the chunk under way is computed."""
    sim = SimSettings(cost=lambda batch: 1.0)
    async with serving(sim=sim) as server:
        await server.call(evolved(stream_call(prompt="x" * 200, stream=stream), 1.5))
        await until_empty(server)
        assert server.stack.core.next_step == 2


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_the_queue_computes_nothing(autojump_clock: Any, stream: bool) -> None:
    """A request whose client left while it waited is never run."""
    sim = SimSettings(num_places=1, cost=lambda batch: 1.0)
    async with serving(sim=sim) as server, trio.open_nursery() as nursery:
        nursery.start_soon(server.call, stream_call(n_predict=3))
        await trio.sleep(0.5)
        await server.call(evolved(stream_call(stream=stream), 1.0))
        await trio.testing.wait_all_tasks_blocked()
        assert server.stack.engine.statistics().num_waiting == 0
        await until_empty(server)
        assert sum(record.num_computed_tokens for record in server.stack.records.requests) == 3


async def test_leaving_with_several_answers_frees_all(autojump_clock: Any) -> None:
    """n = 3: one hang-up, three aborts."""
    async with serving() as server:
        await server.call(evolved(stream_call(CHAT, n=3, n_predict=-1), 0.1))
        await until_empty(server)
        reasons = [record.reason for record in server.stack.records.requests]
        assert reasons == [FinishReason.ABORT] * 3


@pytest.mark.parametrize("chunks", [0, 1, 2, 3])
async def test_leaving_at_any_moment(autojump_clock: Any, chunks: int) -> None:
    """Right after sending, or after so many pieces of the answer: nothing is left behind, and the
    server goes on."""
    async with serving() as server:
        for _ in range(20):
            call = stream_call(CHAT)
            await server.call(
                Call(target=call.target, method="POST", body=call.body, hang_up_after=chunks)
            )
        await until_empty(server)
        assert (await server.call(stream_call(CHAT))).status == 200


async def test_leaving_before_the_stream_was_started(autojump_clock: Any) -> None:
    """A generator that was never begun cleans up nothing; the connection does."""
    async with serving() as server:
        stuck = server.http.connect(trio.testing.lockstep_stream_pair)
        await stuck.send_all(wire(stream_call(n_predict=-1)))
        await trio.sleep(0.05)  # the headers wait for a reader
        assert server.stack.engine.statistics().num_running == 1
        await stuck.aclose()
        left_s = trio.current_time()
        assert await until_empty(server) - left_s <= 0.02
        assert server.stack.records.requests[0].reason is FinishReason.ABORT


async def test_extra_bytes_hide_leaving_only_until_the_next_write(autojump_clock: Any) -> None:
    """hypercorn stops reading at bytes behind the body; the heartbeat finds out."""
    sim = SimSettings(cost=lambda batch: 1000.0)
    async with serving(sim=sim) as server:
        call, stream = stream_call(), server.http.connect()
        await stream.send_all(wire(call) + b"\r\nGET / HTTP/1.1\r\n")
        await trio.sleep(0.1)
        await stream.aclose()
        await trio.sleep(2 * HEARTBEAT_S)
        assert server.stack.core.requests[next(iter(server.stack.core.requests))].is_aborted


async def test_half_closing_is_leaving(autojump_clock: Any) -> None:
    """A client that ends its side before the answer has ended is taken for gone (documented)."""
    async with serving() as server:
        call, stream = stream_call(n_predict=-1), server.http.connect()
        await stream.send_all(wire(call))
        await trio.sleep(0.05)
        await stream.send_eof()
        await until_empty(server)
        assert server.stack.records.requests[0].reason is FinishReason.ABORT


async def test_a_stalled_client_is_dropped_after_the_limit(autojump_clock: Any) -> None:
    """A reader that takes nothing blocks nobody, and its request ends when patience does."""
    async with serving() as server:
        call = stream_call(n_predict=10)
        stuck = server.http.connect(trio.testing.lockstep_stream_pair)
        start = trio.current_time()
        await stuck.send_all(wire(call))
        await server.stack.engine.wait_idle()
        assert trio.current_time() - start < 0.2  # the engine waited for nobody
        await trio.sleep(BoundedTCPServer.patience.stall_s + 1)
        with pytest.raises(trio.BrokenResourceError):
            await stuck.send_all(b"x")
        assert (await server.get("/health")).status == 200


async def test_tokens_that_were_ready_together_share_an_event(autojump_clock: Any) -> None:
    """A client that fell behind gets fewer, larger events, and all of the text."""
    async with serving() as server:
        call = stream_call(CHAT, n_predict=100)
        stuck = server.http.connect(trio.testing.lockstep_stream_pair)
        await stuck.send_all(wire(call))
        await trio.sleep(2)  # the whole answer is ready by now
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            data += bytes(await stuck.receive_some(65536))
        contents = [
            json.loads(line[6:])["choices"][0]["delta"].get("content")
            for line in data.split(b"\n")
            if line.startswith(b'data: {"choices":[{')
        ]
        assert "".join(each or "" for each in contents) == "a" * 100
        assert len(contents) < 12


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", NATIVE])
async def test_an_error_on_the_way_is_an_event(
    autojump_clock: Any,
    path: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A fault of ours in mid-stream: an error event, a normal end, no [DONE], a line in the log."""
    calls = []

    def fail(choice: Any) -> str:
        calls.append(choice)
        raise KeyError("some private words")

    for module in ("chat_answer", "text_answer"):
        monkeypatch.setattr(f"kvtrio.serve.{module}.finish_reason", fail)
    monkeypatch.setattr("kvtrio.serve.native_answer.stop_type", fail)
    async with serving() as server:
        answer = await server.call(stream_call(path, prompt="hi"))
        assert calls
        assert answer.raw.is_complete
        assert answer.events[-1]["error"]["type"] == "server_error"
        assert b"private" not in answer.raw.body
        assert b"[DONE]" not in answer.raw.body
        assert any(record.levelname == "ERROR" for record in caplog.records)
        assert server.stack.is_empty


@pytest.mark.parametrize("stream", [True, False])
async def test_an_engine_that_gives_up_is_a_503(autojump_clock: Any, stream: bool) -> None:
    """If the engine ends before a request does, the client hears that its answer is incomplete."""
    answers: list[Reply] = []
    async with serving() as server:

        async def ask() -> None:
            answers.append(await server.call(stream_call(stream=stream, n_predict=-1)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.sleep(0.05)
            server.stack.engine._hub.stop()
        error = answers[0].events[-1]["error"] if stream else answers[0].error
        assert error["type"] == "unavailable_error"
        assert answers[0].status == (200 if stream else 503)
        later = await server.call(stream_call(stream=stream))
        assert later.status == 503


async def test_health_answers_while_the_model_is_busy(autojump_clock: Any) -> None:
    """Whatever the engine does, and however many wait, health takes no time."""
    sim = SimSettings(num_places=1, max_waiting=1, cost=lambda batch: 100.0)
    async with serving(sim=sim) as server, trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(server.call, stream_call(n_predict=1))
        await trio.sleep(1)
        for path in ("/health", "/v1/health", "/v1/models", "/props", "/slots"):
            answer = await server.get(path)
            assert (answer.status, answer.raw.total_s) == (200, 0)
        assert (await server.get("/health")).json == {"status": "ok"}


@pytest.mark.slow
async def test_mixed_arrivals_and_departures(autojump_clock: Any) -> None:
    """Many clients, every third of which leaves: all others finish and nothing is left."""
    async with serving(sim=SimSettings(max_waiting=200)) as server:
        complete = []

        async def client(number: int) -> None:
            await trio.sleep(number * 0.013)
            call = stream_call(CHAT if number % 2 else NATIVE)
            if number % 3 == 0:
                await server.call(evolved(call, 0.01 * (number % 7)))
            else:
                complete.append((await server.call(call)).raw.is_complete)

        async with trio.open_nursery() as nursery:
            for number in range(60):
                nursery.start_soon(client, number)
        await until_empty(server)
        assert complete == [True] * 40
