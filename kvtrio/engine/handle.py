"""The caller's end of a request.

The outbox is a list rather than a memory channel: what became ready together leaves together, an
unread ``Progress`` is replaced by its successor, and a reader that went away is a flag instead of
an exception in the engine.

1. The engine never waits for a reader: ``push`` is synchronous and cannot fail.
2. An outbox is bounded by construction: at most every token that may be generated, and three more.
3. Nobody waits in ``readers`` while ``__anext__`` has something to tell.
4. An outlet is there only while the reader waits, so nobody else writes where it does. It is
   offered a token under the engine's lock, and only when all before it has been read.
"""

import threading
from collections.abc import Callable
from types import TracebackType

from attrs import define, field, frozen

from kvtrio.core.events import Finished, Output, Progress, Rejected, TokenOut
from kvtrio.core.types import RequestId
from kvtrio.engine.executor import ParkingLot, checkpoint

NUM_OTHER_OUTPUTS = 3
"""One each of Started, Progress and Finished."""


class EngineStopped(Exception):
    """The engine ended before the request did, or before it could be taken in."""


@frozen
class Refused(Exception):
    """A request was not admitted; ``rejected`` says why."""

    rejected: Rejected


Outlet = Callable[[TokenOut, float], bool]
"""Takes a token, and the time when it came, in the place of a reader, which so need not wake; or
returns False. Called on any thread, must not block."""


@define(eq=False)
class Handle:
    """Asynchronous iterator over tuples of outputs that were ready together.

    Yields Started, Progress, TokenOut and, last, Finished; ends after it, or after ``close``. For
    one reader. Leaving a ``with`` block closes it.
    """

    request_id: RequestId
    max_new_tokens: int
    """How many tokens the request may get; bounds the outbox."""
    _abort: Callable[[RequestId], None]
    _clock: Callable[[], float]
    _lock: threading.Lock
    """The engine's."""
    longest_unread_s: float = field(init=False, default=0.0)
    """Longest time for which tokens lay ready."""
    _ready_s: float | None = field(init=False, default=None)
    """Since when tokens do."""
    _ready: list[Output] = field(init=False, factory=list)
    _outlet: Outlet | None = field(init=False, default=None)
    _num_queued: int = field(init=False, default=0)
    """Outputs that the outlet did not take; counted where steps are booked."""
    _num_pushed: int = field(init=False, default=0)
    """Of these, how many came through ``push``; counted on the loop."""
    readers: ParkingLot = field(init=False, factory=ParkingLot)
    """Woken when there is something to tell; whoever reads several handles gives them one lot."""
    _is_finished: bool = field(init=False, default=False)
    _is_closed: bool = field(init=False, default=False)
    _is_stopped: bool = field(init=False, default=False)

    # --- the reader's side ---

    def __aiter__(self) -> "Handle":
        return self

    async def __anext__(self) -> tuple[Output, ...]:
        """Wait for outputs; raises ``EngineStopped`` if none can come any more."""
        if self._ready or self._has_ended:
            await checkpoint()
        while not (self._ready or self._has_ended):
            await self.readers.park()
        if outputs := self.take_nowait():
            return outputs
        raise StopAsyncIteration

    def take_nowait(self) -> tuple[Output, ...]:
        """What is unread; raises ``EngineStopped`` if the rest can never come."""
        if outputs := tuple(self._ready):
            self._ready.clear()
            self.note_unread()
            self._ready_s = None
        elif self._is_stopped and not (self._is_finished or self._is_closed):
            raise EngineStopped
        return outputs

    def close(self) -> None:
        """Forget what is unread, and abort the request if it still runs. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._ready.clear()
        self.note_unread()
        self._ready_s = None
        self.readers.unpark_all()
        if not (self._is_finished or self._is_stopped):
            self._abort(self.request_id)

    def __enter__(self) -> "Handle":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def give(self, outlet: Outlet | None) -> None:
        """Who takes tokens until further notice. On return the one before takes none any more."""
        with self._lock:
            self._outlet = outlet

    # --- the engine's side ---

    def offer(self, output: Output, now: float) -> bool:
        """To the outlet; False: it goes through ``push``. Under the lock, in any thread."""
        outlet, is_next = self._outlet, self._num_queued == self._num_pushed and not self._ready
        is_taken = (
            outlet is not None and is_next and isinstance(output, TokenOut) and outlet(output, now)
        )
        self._num_queued += not is_taken
        return is_taken

    @property
    def num_unread(self) -> int:
        return len(self._ready)

    @property
    def has_news(self) -> bool:
        """``take_nowait`` has something to return or to raise."""
        return bool(self._ready) or (self._is_stopped and not self.is_over)

    @property
    def is_over(self) -> bool:
        """Nothing is unread and nothing will come."""
        return not self._ready and (self._is_finished or self._is_closed)

    @property
    def _has_ended(self) -> bool:
        return self._is_finished or self._is_closed or self._is_stopped

    def push(self, output: Output) -> None:
        """Hand out one output; dropped if the reader has gone."""
        assert not self._is_finished, "nothing follows Finished"
        self._is_finished = isinstance(output, Finished)
        if self._is_closed:
            return
        if isinstance(output, Progress) and self._ready and isinstance(self._ready[-1], Progress):
            self._ready.pop()
        self._ready.append(output)
        if self._ready_s is None and isinstance(output, TokenOut):
            self._ready_s = self._clock()
        assert len(self._ready) <= self.max_new_tokens + NUM_OTHER_OUTPUTS
        self._num_pushed += 1
        self.readers.unpark_all()

    def note_unread(self) -> None:
        """Count the time for which tokens have been lying ready until now."""
        if self._ready_s is not None:
            self.longest_unread_s = max(self.longest_unread_s, self._clock() - self._ready_s)

    def stop(self) -> None:
        """The engine has ended; the reader gets what is left, then ``EngineStopped``."""
        self._is_stopped = True
        self.readers.unpark_all()
