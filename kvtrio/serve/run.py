"""Sockets, hypercorn, and the way out: signal, drain, stop."""

import logging
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import trio
from attrs import frozen
from hypercorn.config import Config
from hypercorn.trio import serve
from quart_trio import QuartTrio

from kvtrio.engine import Engine
from kvtrio.serve.bounded import Patience, bounded_connections

SIGNALS = (signal.SIGINT, signal.SIGTERM)
HURRY_S = 0.5
"""What open connections get when the drain was cut short: enough to tell them so. Those that have
been told close, and are not waited for."""


class BindError(OSError):
    """The address cannot be listened on; one clear line says why."""


@frozen(kw_only=True)
class HttpSettings:
    """Where to listen and how long to wait. Times in seconds."""

    host: str = "127.0.0.1"
    port: int = 8080
    """0 takes a free one."""
    drain_s: float = 30.0
    """After the first signal, running answers get this long."""
    grace_s: float = 3.0
    """After the drain, open connections get this long to take what was written for them."""
    stall_s: float = 30.0
    """A client that takes no 64 KiB in this time is dropped."""
    keep_alive_s: float = 65.0
    """Idle connections are closed after it; longer than clients keep theirs, so that they do not
    meet a closing socket."""
    backlog: int = 256


# --- sockets ---


def open_sockets(host: str, port: int) -> list[socket.socket]:
    """Bind a TCP socket for every address of ``host`` (a name, IPv4, or IPv6 with or without
    brackets), all on one port; raises ``BindError``. They do not listen yet."""
    sockets: list[socket.socket] = []
    try:
        for family, address in _addresses(host, port):
            sockets.append(_bind(family, address, port))
            port = port or sockets[0].getsockname()[1]
    except OSError as error:
        for sock in sockets:
            sock.close()
        # A resolver's error has no strerror of the kind that errno's have, but always a text.
        raise BindError(f"cannot listen on {host}, port {port}: {error.strerror}") from error
    return sockets


def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    found = socket.getaddrinfo(
        host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    return list(dict.fromkeys((family, str(address[0])) for family, *_, address in found))


def _bind(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


# --- hypercorn ---


def hypercorn_config(http: HttpSettings, sockets: Sequence[socket.socket]) -> Config:
    """Return hypercorn's settings; it takes over the sockets' descriptors.

    Attribute by attribute, since ``Config.from_mapping`` swallows misspelt names.
    """
    config = Config()
    config.bind = [f"fd://{sock.detach()}" for sock in sockets]
    config.backlog = http.backlog
    config.graceful_timeout = http.grace_s
    config.keep_alive_timeout = http.keep_alive_s
    # HTTP/2 is a reverse proxy's job, and hypercorn's has known faults under trio.
    config.alpn_protocols = ["http/1.1"]
    config.accesslog = None
    config.errorlog = logging.getLogger("hypercorn.error")
    config.errorlog.setLevel(logging.WARNING)
    config.include_server_header = False
    return config


async def serve_http(
    app: QuartTrio,
    http: HttpSettings,
    engine: Engine,
    sockets: Sequence[socket.socket] | None = None,
    *,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until a signal came and the drain is over, then return.

    ``sockets`` are those of ``open_sockets``, made here if they were not made before. Reports the
    URLs it listens on. Raises ``BindError``.
    """
    config = hypercorn_config(http, sockets or open_sockets(http.host, http.port))
    # Open before hypercorn says that it listens: whoever was told may send a signal at once.
    with (
        trio.open_signal_receiver(*SIGNALS) as signals,
        bounded_connections(http.stall_s) as patience,
    ):
        trigger = drain_on_signal(engine, http, config, patience, signals)
        await serve(app, config, shutdown_trigger=trigger, task_status=task_status)


# --- the way out ---


def drain_on_signal(
    engine: Engine,
    http: HttpSettings,
    config: Config,
    patience: Patience,
    signals: AsyncIterator[int],
) -> Callable[[], Awaitable[None]]:
    """Return hypercorn's shutdown trigger; when it returns, hypercorn stops accepting, waits
    ``config.graceful_timeout`` for open connections and cancels the rest."""

    async def trigger() -> None:
        await anext(signals)
        engine.drain()
        if not await _drained(engine, signals, http.drain_s):
            # hypercorn would cancel the answers, and say nothing: here they end by an error.
            engine.abort_all()
            config.graceful_timeout = min(HURRY_S, http.grace_s)
        patience.shorten(config.graceful_timeout)

    return trigger


async def _drained(engine: Engine, signals: AsyncIterator[int], drain_s: float) -> bool:
    """Wait until nothing runs; False if the limit or a second signal came first."""
    is_idle = False

    async def cut_short() -> None:
        await anext(signals)
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(cut_short, name="second signal")
        with trio.move_on_after(drain_s):
            await engine.wait_idle()
            is_idle = True
        nursery.cancel_scope.cancel()
    return is_idle
