"""hypercorn's trio connection with two faults repaired.

1. hypercorn does its book-keeping (idle timer, close) inside the application's last ``send``, and
   first emits ``http.disconnect``, at which quart-trio cancels that very task. The next step of the
   book-keeping meets the cancel and is lost: sockets stay open. Here it runs under a shield.
2. hypercorn writes under a shield without a limit, so a client that stops reading blocks
   cancellation and shutdown for ever. Here every piece has ``stall_s``; then the client is dropped.

Both rest on names inside hypercorn 0.18, which is why it is pinned; the tests fail when they move.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import hypercorn.trio.run
import trio
from hypercorn.events import Closed, Event, RawData
from hypercorn.trio.tcp_server import TCPServer

log = logging.getLogger(__name__)

PIECE_BYTES = 65536
"""The limit is for a piece, not a body: a slow but steady reader is not a stalled one."""


class BoundedTCPServer(TCPServer):  # type: ignore[misc]  # hypercorn is untyped for us
    """One connection. Book-keeping survives a cancel; no write waits longer than ``stall_s``."""

    stall_s = 30.0

    async def protocol_send(self, event: Event) -> None:
        """Called by hypercorn for every event that leaves."""
        if not isinstance(event, RawData):
            with trio.move_on_after(self.stall_s, shield=True):
                await super().protocol_send(event)
        elif not await self._write(event.data):
            await trio.aclose_forcefully(self.stream)
            await self.protocol.handle(Closed())

    async def _write(self, data: bytes) -> bool:
        """Return True if the peer took all of it, every piece within ``stall_s``."""
        # The lock stays outside the shield: for a generator that only yields it is the one
        # checkpoint at which its client's leaving can reach it.
        async with self.send_lock:
            for start in range(0, len(data), PIECE_BYTES):
                if not await self._write_piece(data[start : start + PIECE_BYTES]):
                    return False
        return True

    async def _write_piece(self, piece: bytes) -> bool:
        try:
            with trio.move_on_after(self.stall_s, shield=True) as limit:
                await self.stream.send_all(piece)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return False
        if limit.cancelled_caught:
            log.warning("dropped a client that did not read for %.1f s", self.stall_s)
        return not limit.cancelled_caught


@contextmanager
def bounded_connections(stall_s: float) -> Iterator[None]:
    """Make hypercorn build ``BoundedTCPServer`` for the connections it accepts inside the block."""
    original = hypercorn.trio.run.TCPServer
    assert issubclass(BoundedTCPServer, original), "hypercorn builds its connections elsewhere"
    bounded = type("BoundedTCPServer", (BoundedTCPServer,), {"stall_s": stall_s})
    hypercorn.trio.run.TCPServer = bounded
    try:
        yield
    finally:
        hypercorn.trio.run.TCPServer = original
