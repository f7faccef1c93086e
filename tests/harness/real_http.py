"""An ASGI application on a real socket, the way the server runs it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import Any

import trio
from attrs import define, field
from hypercorn.trio import serve
from quart_trio import QuartTrio

from kvtrio.serve.bounded import bounded_connections
from kvtrio.serve.run import HttpSettings, hypercorn_config, open_sockets


@define(eq=False)
class Running:
    """A server; ``stop`` begins its shutdown, ``returned`` tells that it is over."""

    port: int = 0
    stop: trio.Event = field(factory=trio.Event)
    returned: trio.Event = field(factory=trio.Event)
    clients: list[trio.SocketStream] = field(factory=list)

    async def connect(self) -> trio.SocketStream:
        """Return a fresh connection; those that are still open are closed at the end."""
        self.clients.append(await trio.open_tcp_stream("127.0.0.1", self.port))
        return self.clients[-1]

    async def close_clients(self) -> None:
        for client in self.clients:
            await trio.aclose_forcefully(client)


@asynccontextmanager
async def running(app: Any, *, is_bounded: bool = True, **settings: Any) -> AsyncIterator[Running]:
    """Serve ``app``; leaving the block stops the server. ``is_bounded=False``: plain hypercorn."""
    http = HttpSettings(port=0, **{"grace_s": 1.0, "keep_alive_s": 5.0, "stall_s": 1.0, **settings})
    server = Running()

    async def run(task_status: trio.TaskStatus[list[str]]) -> None:
        config = hypercorn_config(http, open_sockets(http.host, 0))
        with bounded_connections(http.stall_s) if is_bounded else nullcontext():
            await serve(app, config, shutdown_trigger=server.stop.wait, task_status=task_status)
        server.returned.set()

    async with trio.open_nursery() as nursery:
        binds = await nursery.start(partial(run))
        server.port = int(binds[0].rsplit(":", 1)[1])
        yield server
        await server.close_clients()
        server.stop.set()


async def read_for(stream: trio.SocketStream, seconds: float) -> tuple[bytes, bool]:
    """Return the bytes received within ``seconds`` and whether the peer closed."""
    data = b""
    with trio.move_on_after(seconds):
        while chunk := await stream.receive_some(65536):
            data += bytes(chunk)
        return data, True
    return data, False


def request(target: str, *headers: str, method: str = "GET", body: bytes = b"") -> bytes:
    head = [f"{method} {target} HTTP/1.1", "host: a", *headers]
    if body:
        head.append(f"content-length: {len(body)}")
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def flood_app(
    ended: trio.Event, chunk: bytes = b"x" * 65536, count: int | None = None
) -> QuartTrio:
    """An application without manners: GET / streams ``chunk`` without ever waiting, and sets
    ``ended``."""
    from quart import Response

    app = QuartTrio(__name__)
    app.config["RESPONSE_TIMEOUT"] = None

    @app.route("/")
    async def flood() -> Response:
        async def chunks() -> AsyncIterator[bytes]:
            sent = 0
            try:
                while count is None or sent < count:
                    yield chunk
                    sent += 1
            finally:
                ended.set()

        return Response(chunks())

    return app
