"""The interpreter's collector of garbage, where much is kept for long and next to none is garbage.

A full collection looks through all that is kept: every block of a filled cache, every request of a
scenario. What is no part of a cycle goes without one.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEVER = 1_000_000_000
"""Younger generations between two full collections."""


@contextmanager
def no_full_collections() -> Iterator[None]:
    """None comes by itself, and one that is asked for does not look at what is there now; on exit
    all is as before."""
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*thresholds[:2], NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
