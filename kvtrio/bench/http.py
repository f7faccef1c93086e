"""An HTTP/1.1 client that costs little, since it shares the machine with the servers it measures.

One connection per request, closed by the server. Bodies are handed on as they arrive; no headers
are kept. A general client takes twice the processor time for each piece of a stream.
"""

import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import trio
from attrs import define, frozen

from kvtrio.bench.errors import BenchError

MAX_RECEIVE = 1 << 16
END_OF_HEAD = b"\r\n\r\n"
MAX_HEAD = 1 << 16
OK = 200

Connect = Callable[[], Awaitable[trio.abc.Stream]]
Take = Callable[[int, bytes], None]
"""Gets the status and a piece of the body."""


@frozen
class Reply:
    """A whole answer."""

    status: int
    body: bytes

    def json(self) -> Any:
        """Raises ``BenchError`` if the body is no JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            raise BenchError("a server's answer is no JSON") from None


@frozen
class Client:
    """Talks to one server. ``connect`` opens a connection; it may raise ``OSError``."""

    name: str
    """For messages and the Host header: host:port."""
    connect: Connect
    more_head: str = ""
    """Header lines for every request, each with its line end."""

    async def get(self, path: str) -> Reply:
        """Raises ``OSError`` if there is no server, ``BenchError`` if it makes no sense."""
        return await self._whole(self._head("GET", path, b""))

    async def post(self, path: str, body: Any) -> Reply:
        """As ``get``; ``body`` is sent as JSON."""
        data = json.dumps(body).encode()
        return await self._whole(self._head("POST", path, data) + data)

    async def stream(self, path: str, body: Any, take: Take) -> None:
        """POST; ``take`` gets each piece of the answer as it arrives, and may raise."""
        data = json.dumps(body).encode()
        async with await self.connect() as stream:
            await stream.send_all(self._head("POST", path, data) + data)
            await _read(stream, self.name, take)

    async def _whole(self, request: bytes) -> Reply:
        pieces: list[bytes] = []
        statuses: list[int] = []

        def take(status: int, piece: bytes) -> None:
            statuses.append(status)
            pieces.append(piece)

        async with await self.connect() as stream:
            await stream.send_all(request)
            await _read(stream, self.name, take)
        return Reply(statuses[0], b"".join(pieces))

    def _head(self, method: str, path: str, body: bytes) -> bytes:
        return (
            f"{method} {path} HTTP/1.1\r\nHost: {self.name}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            f"{self.more_head}\r\n"
        ).encode()


def client_for(host: str, port: int) -> Client:
    """A client over TCP."""

    async def connect() -> trio.abc.Stream:
        return await trio.open_tcp_stream(host, port)

    return Client(f"{host}:{port}", connect)


def client_for_url(url: str) -> Client:
    """Raises ``BenchError`` if ``url`` is not http://host:port."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or 80
    except ValueError:
        host, port = None, 0
    if host is None or parts.scheme != "http" or parts.path not in ("", "/"):
        raise BenchError(f"{url!r} does not look like http://127.0.0.1:8080")
    return client_for(host, port)


async def _read(stream: trio.abc.ReceiveStream, name: str, take: Take) -> None:
    """Hand on the body's pieces; at least one, which may be empty."""
    head, rest = await _read_head(stream, name)
    status, body = _status(head, name), _body(head)
    take(status, body.feed(rest))
    while not body.is_complete:
        data = await _receive(stream, name)
        if not data:
            if body.ends_at_close:
                return
            raise BenchError(f"{name} closed the connection in the middle of an answer")
        take(status, body.feed(data))


async def _read_head(stream: trio.abc.ReceiveStream, name: str) -> tuple[bytes, bytes]:
    data = b""
    while END_OF_HEAD not in data:
        more = await _receive(stream, name)
        if not more or len(data) > MAX_HEAD:
            raise BenchError(f"{name} does not answer in HTTP")
        data += more
    head, _, rest = data.partition(END_OF_HEAD)
    return head, rest


async def _receive(stream: trio.abc.ReceiveStream, name: str) -> bytes:
    try:
        return bytes(await stream.receive_some(MAX_RECEIVE))
    except trio.BrokenResourceError:
        raise BenchError(f"the connection to {name} broke") from None


def _status(head: bytes, name: str) -> int:
    words = head.split(b"\r\n", 1)[0].split()
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        raise BenchError(f"{name} does not answer in HTTP")
    return int(words[1])


def _body(head: bytes) -> "_Body":
    fields = dict(line.lower().partition(b":")[::2] for line in head.split(b"\r\n")[1:])
    if b"chunked" in fields.get(b"transfer-encoding", b""):
        return _Body(is_chunked=True, num_missing=None)
    length = fields.get(b"content-length", b"").strip()
    return _Body(is_chunked=False, num_missing=int(length) if length.isdigit() else None)


@define
class _Body:
    """Takes a body out of its frame, as far as it has come."""

    is_chunked: bool
    num_missing: int | None
    """Bytes that are still to come, where that is known; None: all until the connection closes."""
    is_complete: bool = False
    _tail: bytes = b""

    def __attrs_post_init__(self) -> None:
        self.is_complete = self.num_missing == 0

    @property
    def ends_at_close(self) -> bool:
        return self.num_missing is None and not self.is_chunked

    def feed(self, data: bytes) -> bytes:
        """Return what ``data`` holds of the body."""
        if self.is_chunked:
            return b"".join(self._chunks(data))
        if self.num_missing is not None:
            data = data[: self.num_missing]
            self.num_missing -= len(data)
            self.is_complete = self.num_missing == 0
        return data

    def _chunks(self, data: bytes) -> Iterator[bytes]:
        """Whole chunks; the start of one is kept for later. What follows the last is no matter."""
        data = self._tail + data
        start = 0
        while (line_end := data.find(b"\r\n", start)) >= 0:
            size = _chunk_size(data[start:line_end])
            self.is_complete = size == 0
            first, end = line_end + 2, line_end + 2 + size
            if self.is_complete or len(data) < end + 2:
                break
            yield data[first:end]
            start = end + 2
        self._tail = data[start:]


def _chunk_size(line: bytes) -> int:
    try:
        return int(line.partition(b";")[0], 16)
    except ValueError:
        raise BenchError("a server's chunked answer makes no sense") from None
