"""The interpreter's own pauses: its collector of garbage, and whose turn its lock is.

Measured on two cores with torch and a 270M model loaded (CPython 3.11):

1. A full collection takes 130 ms at start and 20 ms more for every 75,000 objects of a filled
   cache, and it comes when it likes: in a step. So what is there at start is taken out of its
   sight, and the rest is looked through while nobody is served.
2. A thread that wants the lock waits for 5 ms before it gets it from one that computes in Python.
   A step of 300 small torch calls (20 ms) beside a text that is tokenised took up to 350 ms; with
   0.2 ms it took 40 to 47 ms. Smaller values gained nothing.
3. That still halves the speed of steps while a text is tokenised in Python: tokens of a stream that
   came every 42 ms came every 96 ms (longest gap 217 ms) while texts of 30,000 tokens arrived. So
   a long text is worked on for a quarter of the time only: then every 65 ms (longest 87 ms).
"""

import gc
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import trio
from attrs import define, field

from kvtrio.cli.collector import no_full_collections

SWITCH_S = 0.0002
LOOK_EVERY_S = 10.0
MAX_PUT_OFF_S = 1800.0
"""On a server that is never idle, garbage in cycles is collected so often all the same."""


REST = 3.0
"""Rest per work on a long text."""
NEW_WORK_S = 0.1
"""Whoever asks for a pause after so long a time has just begun."""


@define(eq=False)
class Pacer:
    """Called every few milliseconds by a thread that computes in Python: makes it rest, so that
    others get the interpreter. Knows threads apart."""

    clock: Callable[[], float]
    """Seconds that this thread has computed: what it waited for others is no work."""
    sleep: Callable[[float], None]
    _last: threading.local = field(init=False, factory=threading.local)

    def __call__(self) -> None:
        worked_s = self.clock() - getattr(self._last, "time_s", -NEW_WORK_S)
        if worked_s < NEW_WORK_S:
            self.sleep(REST * worked_s)
        self._last.time_s = self.clock()


@contextmanager
def tuned() -> Iterator[None]:
    """Settings for serving, from here on; on exit the old ones. Enter it when all is loaded, and
    what that left behind is collected."""
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        with no_full_collections():
            yield
    finally:
        sys.setswitchinterval(switch_s)


async def collect_in_thread() -> None:
    """Everybody waits for it there, too; but no task is to blame."""
    await trio.to_thread.run_sync(gc.collect)


async def collect_garbage(
    is_idle: Callable[[], bool], collect: Callable[[], Awaitable[None]] = collect_in_thread
) -> None:
    """Collect fully when nobody is served and there is something to look at; ends by cancellation
    only."""
    last_s = trio.current_time()
    while True:
        await trio.sleep(LOOK_EVERY_S)
        is_due = trio.current_time() - last_s >= MAX_PUT_OFF_S
        if has_grown() and (is_idle() or is_due):
            await collect()
            last_s = trio.current_time()


def has_grown() -> bool:
    """Objects have grown old since the last full collection."""
    return gc.get_count()[2] > 0
