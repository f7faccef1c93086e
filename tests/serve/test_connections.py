"""Connections: when they end, what they may cost, and which protocol they speak."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio

from harness.real_http import read_for, request, running
from harness.serving import serving

CLOSE_WAIT = "08"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"


def num_sockets(port: int, state: str) -> int:
    """Sockets of ours on that port in a state of the kernel's table."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].endswith(f":{port:04X}") and row[3] == state for row in rows)


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def settled(count: Any) -> bool:
    """Whether ``count()`` becomes 0 within moments."""
    with trio.move_on_after(2):
        while count() > 0:  # noqa: ASYNC110 - the kernel has no event for it
            await trio.sleep(0.01)
    return bool(count() <= 0)


# --- the end of a connection ---


@pytest.mark.slow
@pytest.mark.parametrize(
    "data",
    [
        b"",
        request("/health"),
        request("/health")[:20],
        request("/tokenize", method="POST", body=b"{}"),
        request("/tokenize", method="POST", body=b"{"),
    ],
)
@pytest.mark.parametrize("is_answer_read", [True, False])
async def test_no_socket_outlives_its_client(
    ticking_clock: Any, data: bytes, is_answer_read: bool
) -> None:
    """Twenty clients come and go; their sockets and descriptors do not stay for the idle limit."""
    async with serving() as server, running(server.app, keep_alive_s=60.0) as http:
        before = num_descriptors()
        for _ in range(20):
            async with await trio.open_tcp_stream("127.0.0.1", http.port) as client:
                await client.send_all(data)
                if is_answer_read and data.endswith((b"\r\n\r\n", b"}", b"{")):
                    await client.receive_some(65536)
        assert await settled(lambda: num_sockets(http.port, CLOSE_WAIT))
        assert await settled(lambda: num_descriptors() - before)


@pytest.mark.slow
async def test_ending_with_the_client_is_still_needed(ticking_clock: Any) -> None:
    """Plain hypercorn keeps the sockets of clients that came and went."""
    async with serving() as server, running(server.app, is_bounded=False) as http:
        for _ in range(5):
            await (await trio.open_tcp_stream("127.0.0.1", http.port)).aclose()
        await trio.sleep(0.3)
        assert num_sockets(http.port, CLOSE_WAIT) == 5


@pytest.mark.parametrize("data", [b"", b"GET /health HTTP/1.1\r\nHos", request("/health")])
async def test_the_server_closes_when_the_client_has(autojump_clock: Any, data: bytes) -> None:
    """At once: no idle limit has to pass, neither before a request nor after its answer."""
    async with serving() as server:
        stream, began_s = server.http.connect(), trio.current_time()
        if data:
            await stream.send_all(data)
        if data.endswith(b"\r\n\r\n"):
            await stream.receive_some(65536)
        await stream.send_eof()
        while await stream.receive_some(65536):
            pass
        assert trio.current_time() - began_s < 1


async def test_a_head_has_a_limit_of_its_own(autojump_clock: Any) -> None:
    """A byte now and then does not hold a connection; the limit counts from the first."""
    async with serving() as server:
        stream, began_s = server.http.connect(), trio.current_time()
        await trio.sleep(1.0)
        with suppress(trio.BrokenResourceError):
            for byte in request("/health", *["x: y"] * 50):
                await stream.send_all(bytes([byte]))
                await trio.sleep(2)
        assert 30 <= trio.current_time() - began_s <= 34


async def test_a_body_may_take_longer_than_a_head(autojump_clock: Any) -> None:
    """The head's limit ends with the head."""
    async with serving() as server:
        stream, body = server.http.connect(), b'{"content":"abc"}'
        call = request("/tokenize", method="POST", body=body)
        await stream.send_all(call[: -len(body)])
        for byte in body:
            await trio.sleep(2.5)
            await stream.send_all(bytes([byte]))
        assert bytes(await stream.receive_some(65536)).startswith(b"HTTP/1.1 200")


@pytest.mark.slow
@pytest.mark.parametrize("headers", [(), ("connection: close",)])
async def test_a_refusal_reaches_a_client_that_is_still_sending(
    ticking_clock: Any, headers: tuple[str, ...]
) -> None:
    """A body far above the limit can be written to its end, and the 413 is there to read."""
    body = b"x" * (8 << 20)
    async with (
        serving(max_body_bytes=2000) as server,
        running(server.app, keep_alive_s=60.0) as http,
    ):
        client = await http.connect()
        await client.send_all(request("/completion", *headers, method="POST", body=body))
        data, is_closed = await read_for(client, 3)
        assert data.startswith(b"HTTP/1.1 413")
        assert is_closed
        assert data.endswith(b"}")
        await client.aclose()
        assert await settled(lambda: num_sockets(http.port, CLOSE_WAIT))


@pytest.mark.slow
async def test_a_client_that_never_stops_sending_is_cut_off(ticking_clock: Any) -> None:
    """What follows a refusal is thrown away for a short time only."""
    async with serving(max_body_bytes=2000) as server, running(server.app) as http:
        client = await http.connect()
        head = request("/completion", "content-length: 99999999999", method="POST")
        with trio.fail_after(6), suppress(trio.BrokenResourceError):
            await client.send_all(head)
            while True:
                await client.send_all(b"x" * 65536)
                await trio.sleep(0.01)


# --- the protocol ---


@pytest.mark.parametrize("num_together", [1, 1000])
async def test_the_preface_of_http2_is_refused(autojump_clock: Any, num_together: int) -> None:
    """505 in HTTP/1.1 and the end of the connection, whether it comes at once or in pieces."""
    async with serving() as server:
        stream, data = server.http.connect(), b""
        with suppress(trio.BrokenResourceError):  # it may be refused before its end
            for start in range(0, len(PREFACE), num_together):
                await stream.send_all(PREFACE[start : start + num_together])
        while chunk := await stream.receive_some(65536):
            data += bytes(chunk)
        assert data.startswith(b"HTTP/1.1 505")


@pytest.mark.parametrize("version", ["2.0", "3.0", "0.9"])
async def test_other_versions_are_refused(autojump_clock: Any, version: str) -> None:
    """A request that calls itself HTTP/2 without being it is no HTTP/1 request either."""
    async with serving() as server:
        stream, data = server.http.connect(), b""
        await stream.send_all(f"GET /health HTTP/{version}\r\nhost: a\r\n\r\n".encode())
        while chunk := await stream.receive_some(65536):
            data += bytes(chunk)
        assert data.startswith((b"HTTP/1.1 505", b"HTTP/1.1 400"))


async def test_an_upgrade_to_http2_is_ignored(autojump_clock: Any) -> None:
    """The request is answered as the HTTP/1.1 that it is."""
    async with serving() as server:
        stream = server.http.connect()
        await stream.send_all(
            request(
                "/health",
                "connection: Upgrade, HTTP2-Settings",
                "upgrade: h2c",
                "http2-settings: AAMAAABkAARAAAAAAAIAAAAA",
            )
        )
        assert bytes(await stream.receive_some(65536)).startswith(b"HTTP/1.1 200")
