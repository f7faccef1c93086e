"""The traps of hypercorn, quart and quart-trio: each remedy works, and is needed.

A test whose name ends in ``is_still_needed`` uses the libraries bare. It fails on the day an
upgrade makes the remedy superfluous.
"""

import ast
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import evolve
from quart_trio import QuartTrio

import kvtrio.serve
from harness.real_http import flood_app, read_for, request, running
from harness.serving import HEARTBEAT_S, Serving, serving
from harness.virtual import SimSettings
from harness.virtual_http import VirtualServer
from kvtrio.serve.app import create_app

STREAM = b'{"prompt":"x","n_predict":5,"stream":true}'
PLAIN = b'{"prompt":"x","n_predict":1}'


def completion(body: bytes, *headers: str) -> bytes:
    return request("/completion", *headers, method="POST", body=body)


# --- sockets are closed ---


@pytest.mark.slow
@pytest.mark.parametrize(
    "call", [request("/health", "connection: close"), completion(STREAM, "connection: close")]
)
async def test_a_socket_closes_after_connection_close(ticking_clock: Any, call: bytes) -> None:
    """The server closes when it was asked to, after a plain answer and after a stream."""
    async with serving() as server, running(server.app) as http:
        client = await http.connect()
        await client.send_all(call)
        data, is_closed = await read_for(client, 3)
        assert data.startswith(b"HTTP/1.1 200")
        assert is_closed


@pytest.mark.slow
@pytest.mark.parametrize("num_requests", [0, 1, 2])
@pytest.mark.parametrize("call", [request("/health"), completion(STREAM)])
async def test_an_idle_socket_closes(ticking_clock: Any, call: bytes, num_requests: int) -> None:
    """The idle limit holds before the first request and after any other."""
    async with serving() as server, running(server.app, keep_alive_s=0.3) as http:
        client = await http.connect()
        for _ in range(num_requests):
            await client.send_all(call)
            await read_for(client, 0.15)
        _, is_closed = await read_for(client, 3)
        assert is_closed


@pytest.mark.slow
async def test_closing_sockets_is_still_needed(ticking_clock: Any) -> None:
    """Plain hypercorn with quart-trio keeps the socket open."""
    async with serving() as server, running(server.app, is_bounded=False) as http:
        client = await http.connect()
        await client.send_all(request("/health", "connection: close"))
        _, is_closed = await read_for(client, 1)
        assert not is_closed
        await client.aclose()


@pytest.mark.slow
async def test_an_idle_connection_does_not_hold_up_the_stop(ticking_clock: Any) -> None:
    """Shutdown closes idle connections at once instead of waiting out the grace period."""
    async with serving() as server, running(server.app, grace_s=30.0) as http:
        client = await http.connect()
        await client.send_all(request("/health"))
        await read_for(client, 0.1)
        http.stop.set()
        with trio.fail_after(3):
            await http.returned.wait()


# --- writes are bounded ---


@pytest.mark.slow
async def test_a_stalled_client_does_not_hold_up_the_stop() -> None:
    """A client that stopped reading is dropped when its time is up, and the server ends."""
    ended = trio.Event()
    async with running(flood_app(ended), stall_s=0.5, grace_s=0.2) as http:
        client = await http.connect()
        await client.send_all(request("/"))
        await trio.sleep(0.2)
        http.stop.set()
        with trio.fail_after(3):
            await http.returned.wait()
        assert ended.is_set()


@pytest.mark.slow
async def test_bounding_writes_is_still_needed() -> None:
    """Plain hypercorn waits for the client for ever."""
    async with running(flood_app(trio.Event()), is_bounded=False, grace_s=0.2) as http:
        client = await http.connect()
        await client.send_all(request("/"))
        await trio.sleep(0.2)
        http.stop.set()
        with trio.move_on_after(1.5) as waiting:
            await http.returned.wait()
        assert waiting.cancelled_caught
        await client.aclose()


@pytest.mark.slow
async def test_a_generator_that_only_yields_still_ends() -> None:
    """The one checkpoint it meets is the send lock, which must stay outside the shield."""
    ended = trio.Event()
    async with running(flood_app(ended, b"x")) as http:
        client = await http.connect()
        await client.send_all(request("/"))
        await read_for(client, 0.1)
        await client.aclose()
        with trio.fail_after(3):
            await ended.wait()


@pytest.mark.slow
async def test_a_slow_reader_is_not_a_stalled_one() -> None:
    """A megabyte in one body, read in more than twice the limit, arrives whole."""
    async with running(flood_app(trio.Event(), b"x" * 2**20, count=1), stall_s=0.5) as http:
        client = await http.connect()
        client.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, 16384)
        await client.send_all(request("/"))
        num_bytes = 0
        while num_bytes < 2**20 and (data := await client.receive_some(30_000)):
            num_bytes += len(data)
            await trio.sleep(0.03)
        assert num_bytes >= 2**20
        await client.aclose()


# --- limits of quart's own ---


async def test_our_limits_are_set(autojump_clock: Any) -> None:
    """No time limit on answers; the others are ours."""
    async with serving(max_body_bytes=1234, body_timeout_s=7.0) as server:
        config = server.app.config
        assert config["RESPONSE_TIMEOUT"] is None
        assert config["MAX_CONTENT_LENGTH"] == 1234
        assert config["BODY_TIMEOUT"] == 7.0


async def test_an_answer_may_take_longer_than_a_minute(autojump_clock: Any) -> None:
    """A stream of two minutes arrives whole."""
    sim = SimSettings(cost=lambda batch: 20.0)
    async with serving(sim=sim) as server:
        body = {"prompt": "x", "n_predict": 6, "stream": True}
        answer = await server.post("/completion", body)
        assert answer.raw.total_s == pytest.approx(120)
        assert answer.events[-1]["stop"] is True


def test_setting_limits_is_still_needed() -> None:
    """quart's defaults would cut streams at 60 s."""
    config = QuartTrio(__name__).config
    assert config["RESPONSE_TIMEOUT"] == config["BODY_TIMEOUT"] == 60
    assert config["MAX_CONTENT_LENGTH"] == 16 * 1024 * 1024


@pytest.mark.parametrize(
    "call",
    [
        request("/completion", "content-length: 9000", method="POST"),
        request("/completion", "transfer-encoding: chunked", method="POST")
        + 3 * (b"3e8\r\n" + b"x" * 1000 + b"\r\n"),
    ],
)
async def test_a_large_body_is_refused_early(autojump_clock: Any, call: bytes) -> None:
    """413 before the body is read if its length is told, and while it is read otherwise."""
    async with serving(max_body_bytes=2000) as server:
        data = await exchange(server, call)
        assert data.startswith(b"HTTP/1.1 413")
        assert b'"body_too_large"' in data


async def exchange(server: Serving, data: bytes) -> bytes:
    """Send bytes and read until the server is quiet for a while."""
    stream, answer = server.http.connect(), b""
    await stream.send_all(data)
    with trio.move_on_after(1):
        while chunk := await stream.receive_some(65536):
            answer += bytes(chunk)
    await stream.aclose()
    return answer


# --- bodies, headers, versions of HTTP ---


@pytest.mark.parametrize("kind", ["", "content-type: text/plain", "content-type: x/y; z"])
async def test_the_content_type_does_not_matter(autojump_clock: Any, kind: str) -> None:
    """A body is JSON whatever its header says, or if there is none."""
    async with serving() as server:
        headers = [kind] if kind else []
        assert (await exchange(server, completion(PLAIN, *headers))).startswith(b"HTTP/1.1 200")


async def test_members_keep_their_order(autojump_clock: Any) -> None:
    """Our encoder, not quart's sorting one."""
    async with serving() as server:
        answer = await server.get("/v1/models")
        assert list(answer.json) == ["models", "object", "data"]


async def test_old_and_careful_clients(autojump_clock: Any) -> None:
    """HTTP/1.0 gets an unchunked answer and a close; Expect: 100-continue gets its 100."""
    async with serving() as server:
        old = completion(PLAIN).replace(b"HTTP/1.1", b"HTTP/1.0")
        data = (await exchange(server, old)).lower()
        assert b"connection: close" in data
        assert b"chunked" not in data
        careful = completion(PLAIN, "expect: 100-continue")
        assert (await exchange(server, careful)).startswith(b"HTTP/1.1 100")


async def test_a_header_block_without_end_is_refused(autojump_clock: Any) -> None:
    """More than 16 KB of it: an answer and a close, not memory."""
    async with serving() as server:
        data = b"GET /health HTTP/1.1\r\nhost: a\r\nx: " + b"a" * 20_000
        assert (await exchange(server, data)).startswith(b"HTTP/1.1 431")


async def test_websockets_and_upgrades_get_nothing(autojump_clock: Any) -> None:
    """We have none: the answer is no HTML page and the server goes on."""
    async with serving() as server:
        upgrade = request(
            "/v1/chat/completions",
            "connection: upgrade",
            "upgrade: websocket",
            "sec-websocket-version: 13",
            "sec-websocket-key: eHh4eHh4eHh4eHh4eHh4eA==",
        )
        assert b"<!doctype" not in await exchange(server, upgrade)
        assert (await server.get("/health")).status == 200


# --- how the code is written ---

SOURCES = sorted(Path(kvtrio.serve.__file__).parent.glob("*.py"))


def test_handlers_open_no_nursery_and_no_task() -> None:
    """A group from a handler would be answered by whichever member came first. Only the drain in
    the shutdown trigger has a nursery."""
    users = {
        path.name
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr in ("open_nursery", "add_background_task", "start_soon")
    }
    assert users == {"run.py"}


def test_generators_clean_up_without_waiting() -> None:
    """No await in a ``finally``: it may run under a cancellation, or at GeneratorExit."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Try):
                assert not [
                    each
                    for statement in node.finalbody
                    for each in ast.walk(statement)
                    if isinstance(each, ast.Await | ast.AsyncWith | ast.AsyncFor)
                ]


def test_no_cancel_scope_is_held_over_a_yield() -> None:
    """trio does not promise what happens then; context managers of ours are synchronous."""
    for path in SOURCES:
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.AsyncFunctionDef):
                for node in ast.walk(function):
                    if isinstance(node, ast.With | ast.AsyncWith):
                        assert not any(isinstance(each, ast.Yield) for each in ast.walk(node))


async def test_nothing_starts_with_the_application(autojump_clock: Any) -> None:
    """hypercorn goes on when a lifespan breaks; so nothing of ours is in it."""
    async with serving() as server:
        app = create_app(server.services)
        assert not app.before_serving_funcs
        assert not app.while_serving_gens
        assert not app.after_serving_funcs


def test_the_remedies_were_made_for_these_versions() -> None:
    """The bounded connection leans on names inside hypercorn; quart's later ones need a newer
    Python."""
    assert version("hypercorn").startswith("0.18.")
    assert version("quart").startswith("0.22.")
    assert version("quart-trio").startswith("0.12.")


def test_the_heartbeat_is_shorter_than_proxies_wait() -> None:
    """They give up after 60 s and more."""
    assert HEARTBEAT_S < 30


class Recorder:
    """Counts what is run beside the event loop."""

    def __init__(self) -> None:
        self.names: list[str] = []

    async def run(self, fn: Any, *args: Any, num_bytes: int = 0) -> Any:
        self.names.append(fn.__name__)
        return fn(*args)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/chat/completions", "chat"),
        ("/v1/completions", "text"),
        ("/completion", "native"),
        ("/tokenize", "tokenize"),
        ("/detokenize", "detokenize"),
        ("/apply-template", "apply_template"),
        ("/lora-adapters", "parse_whole"),
        ("/v1/load_lora_adapter", "parse_whole"),
    ],
)
async def test_bodies_are_read_beside_the_event_loop(
    autojump_clock: Any, path: str, name: str
) -> None:
    """Parsing, templates, tokenising and large answers go through the offload port."""
    recorder = Recorder()
    async with serving() as server:
        services = evolve(server.services, offload=recorder)
        http = VirtualServer(create_app(services), server.nursery)
        await http.post(path, b'{"prompt":"x","messages":[{"role":"user"}],"n_predict":1}')
        assert recorder.names in ([name], [name, "conclude", "_body"])
