"""A recording server's file: written in a thread of its own, limited in size and time.

1. The engine's loop only queues; comparing prompts and writing is the thread's, so recording delays
   nobody. A queue that grows beyond a limit ends the recording.
2. Nothing that goes wrong here reaches the engine: a full disk ends the recording, not the server.
3. The file never exceeds its limit, and is a valid scenario after every line and at the end.
"""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import BinaryIO

from attrs import define, field, frozen

from kvtrio.core.events import Finished, Submit, TokenOut
from kvtrio.obs.events import RecordEnd, RecordStart
from kvtrio.obs.words import RecordingEnd
from kvtrio.replay.recorder import Recorder
from kvtrio.replay.scenario import Header, Line, Request
from kvtrio.replay.scenario_file import encode_line

MAX_BACKLOG = 200_000
"""Requests, tokens and ends that were not looked at yet."""
MIB = 1 << 20
UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}
LIMIT = re.compile(r"(?P<number>[0-9]{1,9}(\.[0-9]{1,3})?)(?P<unit>MiB|s|m|h)")


@frozen(kw_only=True)
class RecordLimits:
    """Where a recording ends."""

    max_bytes: int = 256 * MIB
    max_s: float = 3600.0


def read_limits(text: str) -> RecordLimits:
    """``256MiB,1h``, or either; raises ``ValueError``."""
    max_bytes, max_s = RecordLimits().max_bytes, RecordLimits().max_s
    for part in text.split(","):
        found = LIMIT.fullmatch(part.strip())
        if found is None or float(found["number"]) == 0:
            raise ValueError("not like 256MiB, 30m or 256MiB,1h")
        if found["unit"] == "MiB":
            max_bytes = int(float(found["number"]) * MIB)
        else:
            max_s = float(found["number"]) * UNITS_S[found["unit"]]
    return RecordLimits(max_bytes=max_bytes, max_s=max_s)


@frozen(kw_only=True)
class RecordPlan:
    """What to record, and where to."""

    file: BinaryIO
    """Unbuffered; closed when the recording ends."""
    header: Header
    limits: RecordLimits
    started_s: float
    """On the engine's clock."""
    log_key: bytes = field(repr=False)
    emit: Callable[[object], None]
    """Writes a log line; safe from any thread."""


Item = tuple[Submit | TokenOut | Finished | None, float]


@define(eq=False)
class Recording:
    """An engine's ``Tap``; made by ``open_recording``."""

    _plan: RecordPlan
    _queue: "SimpleQueue[Item]" = field(init=False, factory=SimpleQueue)
    _why: RecordingEnd | None = field(init=False, default=None)
    """Set once, by whoever ends it: nothing more is queued, or written."""
    _is_late: bool = field(init=False, default=False)
    """The time is over: requests that were admitted are recorded to their ends, no others."""
    _writer: "_Writer" = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._writer = _Writer(self._plan)

    def admitted(self, submit: Submit, now: float) -> None:
        if now - self._plan.started_s > self._plan.limits.max_s:
            self._is_late = True
        if self._queue.qsize() > MAX_BACKLOG:
            self._end(RecordingEnd.BEHIND)
        if self._why is None and not self._is_late:
            self._queue.put((submit, now))

    def said(self, output: TokenOut | Finished, now: float) -> None:
        if self._why is None:
            self._queue.put((output, now))

    def stop(self) -> None:
        """Nothing more will come."""
        self._queue.put((None, 0.0))

    def work(self) -> None:
        """The thread: until ``stop``, or the end for another reason."""
        error: type[Exception] | None = None
        with self._plan.file:
            try:
                self._writer.write(self._plan.header)
                while self._why is None:
                    self._take(*self._queue.get())
            except OSError as failed:
                error = type(failed)
                self._end(RecordingEnd.FILE)
            except Exception as fault:  # a bug of ours ends the recording, never the server
                error = type(fault)
                self._end(RecordingEnd.FAULT)
            self._writer.cut()
        self._plan.emit(self._writer.ending(self._why or RecordingEnd.STOPPED, error))

    def _take(self, event: Submit | TokenOut | Finished | None, now: float) -> None:
        recorder = self._writer.recorder
        if event is None:
            self._end(RecordingEnd.TIME if self._is_late else RecordingEnd.STOPPED)
        elif isinstance(event, Submit):
            recorder.admitted(event, now)
        else:
            recorder.said(event, now)
        if self._writer.is_full:
            self._end(RecordingEnd.SIZE)
        elif self._is_late and not recorder.num_open and self._queue.empty():
            self._end(RecordingEnd.TIME)

    def _end(self, why: RecordingEnd) -> None:
        self._why = self._why or why


@define(eq=False)
class _Writer:
    """Writes lines as long as there is room. Used by the thread alone."""

    _plan: RecordPlan
    num_bytes: int = 0
    num_requests: int = 0
    is_full: bool = False
    recorder: Recorder = field(init=False)

    def __attrs_post_init__(self) -> None:
        plan = self._plan
        self.recorder = Recorder(self.write, plan.started_s, plan.log_key)

    def write(self, line: Line) -> None:
        """Unless there is no room. Raises ``OSError``."""
        data = encode_line(line)
        self.is_full = self.is_full or self.num_bytes + len(data) > self._plan.limits.max_bytes
        if self.is_full:
            return
        view = memoryview(data)
        while view:
            view = view[self._plan.file.write(view) :]
        self.num_bytes += len(data)
        self.num_requests += isinstance(line, Request)

    def cut(self) -> None:
        """Take away what a full disk left of a line."""
        with suppress(OSError):
            self._plan.file.truncate(self.num_bytes)

    def ending(self, why: RecordingEnd, error: type[Exception] | None) -> RecordEnd:
        return RecordEnd(
            why=why,
            num_requests=self.num_requests,
            num_lost=self.recorder.num_requests - self.num_requests,
            num_bytes=self.num_bytes,
            error=error,
        )


@contextmanager
def open_recording(plan: RecordPlan) -> Iterator[Recording]:
    """Record while the body runs. What has not ended by then is not in the file."""
    recording = Recording(plan)
    limits = plan.limits
    plan.emit(RecordStart(max_bytes=limits.max_bytes, max_s=limits.max_s))
    thread = threading.Thread(target=recording.work, name="recording")
    thread.start()
    try:
        yield recording
    finally:
        recording.stop()
        thread.join()
