"""Sockets, hypercorn's settings, and the way out."""

import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from hypercorn.config import Config
from quart_trio import QuartTrio

from harness.real_http import Running, flood_app, read_for, request
from harness.serving import Serving, serving
from harness.virtual import SimSettings
from kvtrio.serve.run import BindError, HttpSettings, hypercorn_config, open_sockets, serve_http


@pytest.mark.parametrize(
    ("host", "family"),
    [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6), ("[::1]", socket.AF_INET6)],
)
def test_sockets_are_bound(host: str, family: socket.AddressFamily) -> None:
    """IPv4 and IPv6, with or without brackets; port 0 takes a free one."""
    (sock,) = open_sockets(host, 0)
    with sock:
        assert sock.family == family
        assert sock.getsockname()[1] > 0


def test_a_name_is_bound_on_all_its_addresses() -> None:
    """All on the same port, also if it was chosen by the system."""
    sockets = open_sockets("localhost", 0)
    assert len({sock.getsockname()[1] for sock in sockets}) == 1
    for sock in sockets:
        sock.close()


def test_a_port_in_use_is_one_clear_error() -> None:
    """It names address and port; nothing stays open."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BindError, match=f"127.0.0.1, port {port}: .*in use"):
            open_sockets("127.0.0.1", port)


def test_an_unknown_host_is_one_clear_error() -> None:
    """So is a name that does not resolve."""
    with pytest.raises(BindError, match=r"no\.such\.host\.invalid"):
        open_sockets("no.such.host.invalid", 0)


def test_hypercorn_gets_what_we_mean() -> None:
    """Every setting that we care for, one by one; its own mapping swallows misspelt names."""
    http = HttpSettings(grace_s=4.0, keep_alive_s=9.0, backlog=33)
    sockets = open_sockets("127.0.0.1", 0)
    number = sockets[0].fileno()
    config = hypercorn_config(http, sockets)
    assert config.bind == [f"fd://{number}"]
    assert config.graceful_timeout == 4.0
    assert config.keep_alive_timeout == 9.0
    assert config.backlog == 33
    assert config.alpn_protocols == ["http/1.1"]
    assert config.accesslog is None
    assert config.include_server_header is False
    os.close(number)


def test_setting_one_by_one_is_still_needed() -> None:
    """hypercorn ignores unknown names, and speaks HTTP/2 unless told not to."""
    assert Config.from_mapping({"keep_alive_timeuot": 1}).keep_alive_timeout == 5
    assert Config().alpn_protocols == ["h2", "http/1.1"]


# --- the way out ---

ENDLESS = b'{"prompt":"x","n_predict":-1,"stream":true}'
SHORT = b'{"prompt":"x","n_predict":40,"stream":true}'


async def ask(http: Running, body: bytes) -> trio.SocketStream:
    client = await http.connect()
    await client.send_all(request("/completion", "connection: close", method="POST", body=body))
    return client


@asynccontextmanager
async def served(
    app: QuartTrio | None = None, **settings: Any
) -> AsyncIterator[tuple[Running, Serving]]:
    """The whole way of ``kvtrio serve`` but the model: ``serve_http`` over the sim stack."""
    http, running = HttpSettings(port=0, **settings), Running()
    sim = SimSettings(max_context=2000, cost=lambda batch: 0.01)
    async with serving(sim=sim) as server, trio.open_nursery() as nursery:

        async def run(task_status: trio.TaskStatus[list[str]]) -> None:
            await serve_http(app or server.app, http, server.stack.engine, task_status=task_status)
            running.returned.set()

        urls = await nursery.start(run)
        running.port = int(urls[0].rsplit(":", 1)[1])
        yield running, server
        await running.close_clients()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains(ticking_clock: Any, number: signal.Signals) -> None:
    """What runs finishes with its terminator, what comes late gets 503, then the server returns."""
    async with served() as (http, server):
        early = await ask(http, SHORT)
        await trio.sleep(0.1)
        os.kill(os.getpid(), number)
        await trio.sleep(0.1)
        late = await ask(http, SHORT)
        refused, _ = await read_for(late, 2)
        data, is_closed = await read_for(early, 5)
        assert refused.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 5" in refused.lower()
        assert data.endswith(b"0\r\n\r\n")
        assert is_closed
        with trio.fail_after(3):
            await http.returned.wait()
        assert server.stack.is_empty


PLAIN = b'{"prompt":"x","n_predict":-1}'
STOPPED = b'"kvtrio":{"code":"stopped"}'


async def admitted(server: Serving, number: int) -> None:
    """Wait until so many requests wait or run; the machine may be busy."""
    with trio.fail_after(5):
        while True:
            statistics = server.stack.engine.statistics()
            if statistics.num_running + statistics.num_waiting >= number:
                return
            await trio.sleep(0.01)


async def ends_by_an_error(stream: trio.SocketStream, plain: trio.SocketStream) -> None:
    """A stream has an event that says so and a proper end; a plain request gets 503."""
    data, is_closed = await read_for(stream, 2)
    assert is_closed
    assert data.endswith(b"\r\n0\r\n\r\n")
    *_, last = data.removesuffix(b"0\r\n\r\n").strip().split(b"data: ")
    assert STOPPED in last
    data, is_closed = await read_for(plain, 2)
    assert is_closed
    assert data.startswith(b"HTTP/1.1 503")
    assert STOPPED in data


@pytest.mark.slow
async def test_a_second_signal_cuts_the_drain_short(ticking_clock: Any) -> None:
    """Whoever runs or waits then is told, and the server returns."""
    async with served() as (http, server):
        stream, plain = await ask(http, ENDLESS), await ask(http, PLAIN)
        waiting = [await ask(http, PLAIN) for _ in range(4)]
        await admitted(server, 6)
        os.kill(os.getpid(), signal.SIGTERM)
        await trio.sleep(0.2)
        assert not http.returned.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        await ends_by_an_error(stream, plain)
        for each in waiting:
            data, _ = await read_for(each, 2)
            assert STOPPED in data
        with trio.fail_after(2):
            await http.returned.wait()
            await server.stack.engine.wait_idle()  # a step may be under way
        assert server.stack.is_empty


@pytest.mark.slow
async def test_the_drain_has_a_limit(ticking_clock: Any) -> None:
    """An endless answer does not keep the server up, and is told why it ended."""
    async with served(drain_s=0.3) as (http, server):
        stream, plain = await ask(http, ENDLESS), await ask(http, PLAIN)
        await admitted(server, 2)
        os.kill(os.getpid(), signal.SIGTERM)
        await ends_by_an_error(stream, plain)
        with trio.fail_after(3):
            await http.returned.wait()


async def test_answers_that_are_cut_off_say_so(autojump_clock: Any) -> None:
    """At once, though a step is under way; the engine is empty when that has ended."""
    sim = SimSettings(max_context=2000, cost=lambda batch: 10.0)
    answers: list[Any] = []
    async with serving(sim=sim) as server:

        async def post(body: bytes) -> None:
            answers.append(await server.post("/v1/completions", body))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(post, ENDLESS)
            await trio.sleep(0.5)
            nursery.start_soon(post, PLAIN)
            await trio.sleep(35)
            server.stack.engine.abort_all()
        streamed, plain = sorted(answers, key=lambda answer: answer.status)
        assert trio.current_time() < 36
        assert streamed.raw.is_complete
        assert streamed.events[-1]["error"]["kvtrio"]["code"] == "stopped"
        assert plain.status == 503
        assert plain.error["kvtrio"]["code"] == "stopped"
        await trio.sleep(20)
        assert server.stack.is_empty


@pytest.mark.slow
async def test_a_stalled_client_does_not_outlast_the_grace(ticking_clock: Any) -> None:
    """Writes that wait when the drain is over get the grace period, not their whole patience."""
    ended = trio.Event()
    async with served(flood_app(ended), grace_s=0.3, stall_s=60.0) as (http, _server):
        client = await http.connect()
        await client.send_all(request("/"))
        await trio.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)
        with trio.fail_after(4):
            await http.returned.wait()
        assert ended.is_set()
