"""The short way of a stream's bytes: past HTTP's layers, and never out of order."""

import json
import socket
from typing import Any

import pytest
import trio

from harness.real_http import read_for, request, running
from harness.serving import Serving, serving
from kvtrio.serve.line import Line, line_of
from kvtrio.serve.native_answer import NativeDialect

BODY = {"prompt": "hi", "stream": True, "n_predict": 40}


async def answer(server: Serving, path: str, head: str = "", **more: Any) -> bytes:
    """A stream's whole answer over a real socket."""
    body = json.dumps({**BODY, "messages": [{"role": "user", "content": "hi"}], **more}).encode()
    async with running(server.app) as http:
        client = await http.connect()
        await client.send_all(request(path, "connection: close", method="POST", body=body))
        data, is_closed = await read_for(client, 5)
    assert is_closed
    return data


def texts(events: bytes) -> list[str]:
    """Of a native stream's events."""
    lines = [line for line in events.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(line.removeprefix(b"data: "))["content"] for line in lines]


def unchunked(data: bytes) -> bytes:
    """An answer's body; every chunk has the length that it says."""
    body, rest = b"", data.partition(b"\r\n\r\n")[2]
    while rest != b"0\r\n\r\n":
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        assert rest[length : length + 2] == b"\r\n"
        body, rest = body + rest[:length], rest[length + 2 :]
    return body


@pytest.mark.slow
async def test_a_stream_over_the_line_is_what_it_is_without(ticking_clock: Any) -> None:
    """Over a socket, where tokens go past HTTP's layers, the events are those that the same request
    gets over a stream in memory, where they cannot."""
    async with serving() as server:
        data = await answer(server, "/completion")
    assert texts(unchunked(data)) == ["a"] * 40 + [""]


@pytest.mark.slow
async def test_a_fault_in_a_token_ends_its_stream_alone(
    ticking_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the stream's last event, as anywhere on the way, and the engine goes on."""
    tell = NativeDialect._tokens

    def fails(self: NativeDialect, choice: Any, delta: Any) -> Any:
        if choice.num_generated_tokens == 5:
            raise ArithmeticError
        return tell(self, choice, delta)

    monkeypatch.setattr(NativeDialect, "_tokens", fails)
    async with serving() as server:
        data = await answer(server, "/completion")
        assert b'"code":500' in unchunked(data)
        monkeypatch.undo()
        assert len(texts(unchunked(await answer(server, "/completion")))) == 41


async def test_what_the_system_does_not_take_goes_out_first() -> None:
    """A full socket takes a part; the rest is sent before anything else is written."""
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        sent: list[bytes] = []

        async def send(data: bytes) -> None:
            sent.append(data)

        line = Line(here.fileno, send)
        line.open()
        written = b""
        while line.is_free():
            line.write(b"x" * 10_000, 1.0)
            written += b"2710\r\n" + b"x" * 10_000 + b"\r\n"
        await line.clear()
        assert line.is_free()
        there.setblocking(False)
        received = b""
        while len(received) < len(written) - len(sent[0]):
            received += there.recv(1 << 20)
        assert received + sent[0] == written
        line.close()


async def test_a_line_writes_to_its_own_connection_or_to_nobody() -> None:
    """Whoever gets the number of a socket that was closed gets no bytes of its stream."""
    here, there = socket.socketpair()
    there.close()
    line = Line(here.fileno, trio.sleep)
    line.open()
    number = here.fileno()
    here.close()
    other, reader = socket.socketpair()
    with other, reader:
        assert other.fileno() == number
        line.write(b"secret", 1.0)
        reader.setblocking(False)
        with pytest.raises(BlockingIOError):
            reader.recv(100)
        assert not line.is_free()
        line.close()
        line.close()


def test_a_connection_that_has_gone_takes_nothing() -> None:
    """Opening its line is no error; what is written is left for the long way, which finds out."""
    line = Line(lambda: -1, trio.sleep)
    line.open()
    line.write(b"x", 1.0)
    assert not line.is_free()
    line.close()


def test_only_bodies_in_chunks_have_a_line() -> None:
    """HTTP/1.0 has none, and so has a connection that is no socket."""
    line = Line(lambda: 0, trio.sleep)
    state = {"kvtrio.line": line}
    assert line_of({"http_version": "1.1", "state": state}) is line
    assert line_of({"http_version": "1.0", "state": state}) is None
    assert line_of({"http_version": "1.1"}) is None
