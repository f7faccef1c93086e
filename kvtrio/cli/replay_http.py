"""The client that a replay uses: bench's, over TCP or TLS, with a key and a path in front."""

from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import trio
from attrs import frozen

from kvtrio.bench.errors import BenchError
from kvtrio.bench.http import Client, Reply
from kvtrio.replay.target import ReplayError

PORTS = {"http": 80, "https": 443}


@frozen
class WholeReply:
    """Implements ``replay.target.Reply``."""

    reply: Reply

    @property
    def status(self) -> int:
        return self.reply.status

    def json(self) -> Any:
        try:
            return self.reply.json()
        except BenchError as error:
            raise ReplayError(str(error)) from None


@frozen
class ReplayClient:
    """Implements ``replay.target.Http``."""

    client: Client
    prefix: str = ""
    """In front of every path."""

    async def get(self, path: str) -> WholeReply:
        try:
            return WholeReply(await self.client.get(self.prefix + path))
        except BenchError as error:
            raise ReplayError(str(error)) from None

    async def post(self, path: str, body: Any) -> WholeReply:
        try:
            return WholeReply(await self.client.post(self.prefix + path, body))
        except BenchError as error:
            raise ReplayError(str(error)) from None

    async def stream(self, path: str, body: Any, take: Callable[[int, bytes], None]) -> None:
        try:
            await self.client.stream(self.prefix + path, body, take)
        except BenchError as error:
            raise ReplayError(str(error)) from None
        except trio.BrokenResourceError:
            raise ReplayError("the connection broke") from None


def client_for(url: str, api_key: str | None) -> ReplayClient:
    """Raises ``ReplayError`` if ``url`` is no http or https address, or the key cannot be sent."""
    parts = urlsplit("")
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname or "", parts.port or PORTS.get(parts.scheme, 0)
    except ValueError:
        host, port = "", 0
    if not host or not port or parts.scheme not in PORTS:
        raise ReplayError("the URL does not look like http://127.0.0.1:8080")
    head = key_line(api_key)

    async def connect() -> trio.abc.Stream:
        if parts.scheme == "https":
            return await trio.open_ssl_over_tcp_stream(host, port, https_compatible=True)
        return await trio.open_tcp_stream(host, port)

    name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return ReplayClient(Client(name, connect, head), parts.path.rstrip("/").removesuffix("/v1"))


def key_line(api_key: str | None) -> str:
    """The header that sends a key; raises ``ReplayError`` if it cannot be sent."""
    if not api_key:
        return ""
    if not (api_key.isascii() and api_key.isprintable()):
        raise ReplayError("--api-key holds signs that cannot be sent")
    return f"Authorization: Bearer {api_key}\r\n"
