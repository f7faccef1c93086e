"""The short way of a stream's bytes: from where a step is booked straight to the socket.

Between a streamed answer's head and its end nothing but chunks goes out, and h11 keeps no count of
them. So a chunk may be written without HTTP's layers, without waking the task that answers, and in
whatever thread has something to say: for a token at a time all that is most of its price.

1. Only while the answering task waits for tokens: then nobody else writes.
2. What the system does not take at once is kept, nothing is written behind it, and the task sends
   it the long way, with its limits, before it goes on.
3. The socket is this line's own copy, so it never is somebody else's by the time it is written to.
"""

import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from attrs import define, field

NAME = "kvtrio.line"
"""Under which a request's scope has it, in ``state``."""
CLOSED = -1


@define(eq=False)
class Line:
    """Of one connection; used by one answer at a time."""

    _fileno: Callable[[], int]
    """The connection's socket, which does not block."""
    _send: Callable[[bytes], Awaitable[None]]
    """Writes all of it, or drops the client."""
    written_s: float = field(init=False, default=0.0)
    """When something was last written."""
    _own: int = field(init=False, default=CLOSED)
    _rest: bytes = field(init=False, default=b"")

    def open(self) -> None:
        """For one answer."""
        with suppress(OSError):  # the connection has gone: nothing will be written, either
            self._own = os.dup(self._fileno())

    def close(self) -> None:
        """Nothing is written any more. Idempotent."""
        if self._own != CLOSED:
            os.close(self._own)
            self._own, self._rest = CLOSED, b""

    def is_free(self) -> bool:
        """All that was written has gone out."""
        return not self._rest

    def write(self, data: bytes, now: float) -> None:
        """One chunk, not empty. Only while the line is free; in any thread."""
        chunk = b"%x\r\n%b\r\n" % (len(data), data)
        self.written_s = now
        try:
            count = os.write(self._own, chunk)
        except OSError:  # the reader is behind, or has gone: the long way finds out
            count = 0
        if count < len(chunk):
            self._rest = chunk[count:]

    async def clear(self) -> None:
        """Send what is left."""
        if self._rest:
            rest, self._rest = self._rest, b""
            await self._send(rest)


def line_of(scope: Mapping[str, Any]) -> Line | None:
    """Of the connection that a request came over; None where its body will not be in chunks."""
    line: Line | None = scope.get("state", {}).get(NAME)
    return line if scope.get("http_version") == "1.1" else None
