"""hypercorn's trio connection with two faults repaired.

1. hypercorn does its book-keeping (idle timer, close) inside the application's last ``send``, and
   first emits ``http.disconnect``, at which quart-trio cancels that very task. The next step of the
   book-keeping meets the cancel and is lost: sockets stay open. Here it runs under a shield.
2. hypercorn writes under a shield without a limit, so a client that stops reading blocks
   cancellation and shutdown for ever. Here every piece has a limit; then the client is dropped.

Both rest on names inside hypercorn 0.18, which is why it is pinned; the tests fail when they move.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import hypercorn.trio.run
import trio
from attrs import define, field
from hypercorn.events import Closed, Event, RawData
from hypercorn.trio.tcp_server import TCPServer

log = logging.getLogger(__name__)

CLASS_NAME = "TCPServer"
"""Under which ``hypercorn.trio.run`` looks up what to build for a connection."""
PIECE_BYTES = 65536
"""The limit is for a piece, not a body: a slow but steady reader is not a stalled one."""


@define(eq=False)
class Patience:
    """How long a write may wait for its reader; shared by all connections of a server."""

    stall_s: float
    _waiting: set[trio.CancelScope] = field(init=False, factory=set)

    @contextmanager
    def limit(self) -> Iterator[trio.CancelScope]:
        """Shield the block from cancellation, but for ``stall_s`` seconds only."""
        with trio.move_on_after(self.stall_s, shield=True) as scope:
            self._waiting.add(scope)
            try:
                yield scope
            finally:
                self._waiting.discard(scope)

    def shorten(self, stall_s: float) -> None:
        """Give writes, those under way too, at most ``stall_s`` from now on."""
        self.stall_s = min(self.stall_s, stall_s)
        deadline = trio.current_time() + self.stall_s
        for scope in self._waiting:
            scope.deadline = min(scope.deadline, deadline)


class BoundedTCPServer(TCPServer):
    """One connection. Book-keeping survives a cancel; no write waits for ever."""

    patience = Patience(30.0)

    async def protocol_send(self, event: Event) -> None:
        """Called by hypercorn for every event that leaves."""
        if not isinstance(event, RawData):
            with self.patience.limit():
                await super().protocol_send(event)
        elif not await self._write(event.data):
            await trio.aclose_forcefully(self.stream)
            await self.protocol.handle(Closed())

    async def _write(self, data: bytes) -> bool:
        """Return True if the peer took all of it, every piece in time."""
        # The lock stays outside the shield: for a generator that only yields it is the one
        # checkpoint at which its client's leaving can reach it.
        async with self.send_lock:
            for start in range(0, len(data), PIECE_BYTES):
                if not await self._write_piece(data[start : start + PIECE_BYTES]):
                    return False
        return True

    async def _write_piece(self, piece: bytes) -> bool:
        try:
            with self.patience.limit() as scope:
                await self.stream.send_all(piece)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return False
        if scope.cancelled_caught:
            log.warning("dropped a client that did not read")
        return not scope.cancelled_caught


@contextmanager
def bounded_connections(stall_s: float) -> Iterator[Patience]:
    """Make hypercorn build ``BoundedTCPServer`` for the connections it accepts inside the block."""
    original = getattr(hypercorn.trio.run, CLASS_NAME)
    assert issubclass(BoundedTCPServer, original), "hypercorn builds its connections elsewhere"
    patience = Patience(stall_s)
    bounded = type("Bounded", (BoundedTCPServer,), {"patience": patience})
    setattr(hypercorn.trio.run, CLASS_NAME, bounded)
    try:
        yield patience
    finally:
        setattr(hypercorn.trio.run, CLASS_NAME, original)
