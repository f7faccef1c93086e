"""The interpreter's own pauses: its collector of garbage, and whose turn its lock is.

Measured on two cores with torch and a 270M model loaded (CPython 3.11):

1. A full collection takes 130 ms at start and 20 ms more for every 75,000 objects of a filled
   cache, and it comes when it likes: in a step. So what is there at start is taken out of its
   sight, and the rest is looked through while nobody is served.
2. A thread that wants the lock waits for 5 ms before it gets it from one that computes in Python.
   A step of 300 small torch calls (20 ms) beside a text that is tokenised took up to 350 ms; with
   0.2 ms it took 40 to 47 ms. Smaller values gained nothing.
"""

import gc
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import trio

SWITCH_S = 0.0002
NEVER = 1_000_000_000
"""Younger generations between two full collections."""
LOOK_EVERY_S = 10.0
MAX_PUT_OFF_S = 1800.0
"""On a server that is never idle, garbage in cycles is collected so often all the same."""


@contextmanager
def tuned() -> Iterator[None]:
    """Settings for serving, from here on; on exit the old ones. Enter it when all is loaded."""
    switch_s, thresholds = sys.getswitchinterval(), gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*thresholds[:2], NEVER)
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(switch_s)
        gc.set_threshold(*thresholds)
        gc.unfreeze()


async def in_thread() -> None:
    """Everybody waits for it there, too; but no task is to blame."""
    await trio.to_thread.run_sync(gc.collect)


async def collect_garbage(
    is_idle: Callable[[], bool], collect: Callable[[], Awaitable[None]] = in_thread
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
