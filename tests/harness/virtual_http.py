"""The HTTP stack over memory streams: hypercorn's connection, an h11 client, no sockets.

``VirtualServer(app, nursery)``, then ``await server.post("/v1/completions", body)``. Cancel the
nursery at the end: connections that are kept alive stay until their idle limit.
"""

import socket
from collections.abc import Callable, Mapping
from typing import Any

import h11
import trio
import trio.testing
from attrs import define, field, frozen
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.trio.worker_context import WorkerContext


class StubSocket:
    """All that hypercorn asks of a connection's socket."""

    family = socket.AF_INET

    def getsockname(self) -> tuple[str, int]:
        return ("127.0.0.1", 8080)

    def getpeername(self) -> tuple[str, int]:
        return ("127.0.0.1", 50000)


@frozen(kw_only=True)
class Call:
    """One HTTP request."""

    target: str
    method: str = "GET"
    body: bytes = b""
    headers: Mapping[str, str] = field(factory=dict)
    hang_up_after: int | None = None
    """Close the connection after so many pieces of body; 0: right after sending."""
    hang_up_after_s: float | None = None
    """Close the connection so many seconds after sending."""

    def wire(self) -> list[h11.Event]:
        """The events that send it."""
        headers = {"host": "localhost:8080", "content-length": str(len(self.body)), **self.headers}
        if self.body:
            headers = {"content-type": "application/json", **headers}
        head = h11.Request(method=self.method, target=self.target, headers=list(headers.items()))
        return [head, h11.Data(data=self.body), h11.EndOfMessage()]


@frozen(kw_only=True)
class Answer:
    """What came back; times in virtual seconds since the request was sent."""

    status: int | None
    """None: hung up before the status line."""
    headers: dict[str, str]
    """Names in lower case."""
    chunks: tuple[bytes, ...]
    """The body in the pieces in which it was read."""
    chunk_times_s: tuple[float, ...]
    is_complete: bool
    """The body reached its end."""
    total_s: float

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    @property
    def first_s(self) -> float | None:
        return self.chunk_times_s[0] if self.chunk_times_s else None


class VirtualServer:
    """Hypercorn's connection class over memory streams: one connection for each request."""

    def __init__(
        self, app: Any, nursery: trio.Nursery, *, connection: type[Any] | None = None
    ) -> None:
        """``app``: any ASGI application. ``connection``: kvtrio's bounded one, if None."""
        config = Config()
        config.accesslog = config.errorlog = None
        config.keep_alive_timeout = 65.0  # as ``HttpSettings`` has it
        self._app = ASGIWrapper(app)
        self._config, self._context = config, WorkerContext(None)
        self._nursery, self._connection = nursery, connection or _bounded()

    def connect(
        self,
        make_pair: Callable[
            [], tuple[trio.abc.HalfCloseableStream, trio.abc.HalfCloseableStream]
        ] = trio.testing.memory_stream_pair,
    ) -> trio.abc.HalfCloseableStream:
        """Client end of a fresh connection; ``lockstep_stream_pair`` makes a stalled client."""
        client, server = make_pair()
        server.socket = StubSocket()  # type: ignore[attr-defined]
        tcp = self._connection(self._app, self._config, self._context, {}, server)
        self._nursery.start_soon(tcp.run, name="virtual connection")
        return client

    async def call(self, call: Call) -> Answer:
        """Send one request and read its answer, or hang up where the call says."""
        reader = _Reader(trio.current_time())
        async with self.connect() as stream:
            wire = h11.Connection(h11.CLIENT)
            await stream.send_all(b"".join(wire.send(event) or b"" for event in call.wire()))
            patience = float("inf") if call.hang_up_after_s is None else call.hang_up_after_s
            with trio.move_on_after(patience):
                await reader.read(wire, stream, call.hang_up_after)
        return reader.answer()

    async def get(self, target: str, headers: Mapping[str, str] | None = None) -> Answer:
        return await self.call(Call(target=target, headers=headers or {}))

    async def post(
        self, target: str, body: bytes = b"{}", headers: Mapping[str, str] | None = None
    ) -> Answer:
        return await self.call(Call(target=target, method="POST", body=body, headers=headers or {}))


def _bounded() -> type[Any]:
    from kvtrio.serve.bounded import BoundedTCPServer  # only HTTP tests need it

    return BoundedTCPServer


@define
class _Reader:
    """Collects an answer as it arrives."""

    start_s: float
    status: int | None = None
    headers: dict[str, str] = field(factory=dict)
    chunks: list[bytes] = field(factory=list)
    times_s: list[float] = field(factory=list)
    is_complete: bool = False

    async def read(
        self, wire: h11.Connection, stream: trio.abc.ReceiveStream, max_chunks: int | None
    ) -> None:
        """Read to the end of the body, or until ``max_chunks`` pieces of it have come."""
        while max_chunks is None or len(self.chunks) < max_chunks:
            match wire.next_event():
                case h11.NEED_DATA:
                    wire.receive_data(bytes(await stream.receive_some(65536)))
                case h11.Response() as response:
                    self.status = response.status_code
                    self.headers = {k.decode(): v.decode() for k, v in response.headers}
                case h11.Data() as data:
                    self.chunks.append(bytes(data.data))
                    self.times_s.append(trio.current_time() - self.start_s)
                case h11.EndOfMessage():
                    self.is_complete = True
                    return
                case h11.InformationalResponse():
                    pass
                case other:
                    raise AssertionError(f"the connection ended within the answer: {other!r}")

    def answer(self) -> Answer:
        return Answer(
            status=self.status,
            headers=self.headers,
            chunks=tuple(self.chunks),
            chunk_times_s=tuple(self.times_s),
            is_complete=self.is_complete,
            total_s=trio.current_time() - self.start_s,
        )
