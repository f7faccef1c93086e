"""hypercorn's trio connection with its faults repaired.

1. hypercorn does its book-keeping (idle timer, close) inside the application's last ``send``, and
   first emits ``http.disconnect``, at which quart-trio cancels that very task. The next step of the
   book-keeping meets the cancel and is lost: sockets stay open. Here it runs under a shield.
2. hypercorn writes under a shield without a limit, so a client that stops reading blocks
   cancellation and shutdown for ever. Here every piece has a limit; then the client is dropped.
3. hypercorn's idle timer outlives the client: a socket whose other end has closed stays until the
   timer fires. Here the connection is over when nothing more can be read.
4. hypercorn closes a socket at once when it answered before the body had come (413), and the
   system then resets it: the client, still writing, never reads the answer. Here what arrives is
   thrown away for a while first.
5. hypercorn lets a client send a request's head for as long as the idle limit lasts. Here a head
   has a limit of its own, from its first byte.

HTTP/1 only: see ``one_protocol``. All of it rests on names inside hypercorn 0.18, which is why it
is pinned; the tests fail when they move.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import hypercorn.trio.run
import trio
from attrs import define, field
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.trio.tcp_server import MAX_RECV, TCPServer

from kvtrio.engine.executor import checkpoint, checkpoint_if_cancelled
from kvtrio.serve.line import Line
from kvtrio.serve.one_protocol import one_protocol, wants_rest

log = logging.getLogger(__name__)

CLASS_NAME = "TCPServer"
"""Under which ``hypercorn.trio.run`` looks up what to build for a connection."""
PIECE_BYTES = 65536
"""The limit is for a piece, not a body: a slow but steady reader is not a stalled one."""
SMALL_BYTES, TURN_EVERY = 4096, 16
"""A connection holds the loop for so many small writes in a row, if its application never waits."""


@define(eq=False)
class Patience:
    """How long a client may take; shared by all connections of a server. Times in seconds."""

    stall_s: float
    """For a write to be read."""
    head_s: float = 30.0
    """For a request's head, from its first byte."""
    linger_s: float = 2.0
    """For the rest of a body that nobody wants; see the module's fourth point."""
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
    """One connection. Book-keeping survives a cancel; nothing waits for a client for ever."""

    patience = Patience(30.0)
    _has_ended = False
    """Nothing more is read."""
    _num_writes = 0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._reading = trio.CancelScope()
        self._idle = trio.CancelScope()

    async def protocol_send(self, event: Event) -> None:
        """Called by hypercorn for every event that leaves."""
        if isinstance(event, RawData):
            if not await self._write(event.data):
                await trio.aclose_forcefully(self.stream)
                await self.protocol.handle(Closed())
            return
        with self.patience.limit():
            if isinstance(event, Closed) and wants_rest(self.protocol):
                await self._send_eof()
                self._reading.cancel()
            elif isinstance(event, Updated) and self._has_ended:
                await self.idle_task.stop()
            else:
                await super().protocol_send(event)

    # --- reading ---

    async def _read_data(self) -> None:
        one_protocol(self.protocol, self._line())
        with self._reading:
            await self._read_requests()
        if self._reading.cancelled_caught:
            await self._discard()
        self._has_ended = True
        with self.patience.limit():
            await self.protocol.handle(Closed())
            await self.idle_task.stop()

    def _line(self) -> Line | None:
        async def send(data: bytes) -> None:
            await self.protocol_send(RawData(data))

        if not isinstance(self.stream, trio.SocketStream):
            return None
        return Line(self.stream.socket.fileno, send)

    async def _read_requests(self) -> None:
        """Read until the client has nothing more to say, or until nobody listens to it."""
        data = b"more"
        while data:
            try:
                data = bytes(await self.stream.receive_some(MAX_RECV))
            except (trio.ClosedResourceError, trio.BrokenResourceError):
                return
            # Only while the timer runs, which is between requests, does this do anything.
            head_deadline = trio.current_time() + self.patience.head_s
            self._idle.deadline = min(self._idle.deadline, head_deadline)
            await self.protocol.handle(RawData(data))

    async def _discard(self) -> None:
        with (
            trio.move_on_after(self.patience.linger_s),
            suppress(trio.ClosedResourceError, trio.BrokenResourceError),
        ):
            while await self.stream.receive_some(MAX_RECV):
                pass

    async def _send_eof(self) -> None:
        with suppress(trio.ClosedResourceError, trio.BrokenResourceError, trio.BusyResourceError):
            await self.stream.send_eof()

    async def _idle_timeout(self) -> None:
        self._idle = trio.CancelScope(deadline=trio.current_time() + self.config.keep_alive_timeout)
        with self._idle:
            await self.context.terminated.wait()
        with self.patience.limit():
            await self._initiate_server_close()

    # --- writing ---

    async def _write(self, data: bytes) -> bool:
        """Return True if the peer took all of it, every piece in time."""
        # Outside the shield: for a generator that only yields it is the one checkpoint at which
        # its client's leaving can reach it.
        await self._give_turn(len(data))
        try:
            self.send_lock.acquire_nowait()
        except trio.WouldBlock:
            await self.send_lock.acquire()
        try:
            return await self._write_all(data)
        finally:
            self.send_lock.release()

    async def _give_turn(self, num_bytes: int) -> None:
        """Let other tasks run, but not for each token of a stream, which waits for the next."""
        self._num_writes += 1
        if num_bytes > SMALL_BYTES or self._num_writes % TURN_EVERY == 0:
            await checkpoint()
        else:
            await checkpoint_if_cancelled()

    async def _write_all(self, data: bytes) -> bool:
        start = self._write_now(data)
        while start < len(data):
            if not await self._write_piece(data[start : start + PIECE_BYTES]):
                return False
            start += PIECE_BYTES
        return True

    def _write_now(self, data: bytes) -> int:
        """Write what the system takes at once, mostly all: no shield, no limit and no turn is
        needed for that. Returns how much it was."""
        if not isinstance(self.stream, trio.SocketStream):
            return 0
        try:
            return os.write(self.stream.socket.fileno(), data[:PIECE_BYTES])
        except OSError:  # the reader is behind, or has gone: the long way finds out
            return 0

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
