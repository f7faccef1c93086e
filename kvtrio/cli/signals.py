"""What SIGINT and SIGTERM do while there is no server yet that could drain."""

import atexit
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from attrs import define

from kvtrio.cli import exits

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop(Enum):
    """How a signal ends the process."""

    LEAVE = "leave"
    """At once, with exit code 0: there is nothing to clean up. Imports and the loading of weights
    cannot be interrupted, and an exception would hit trio where it expects none."""
    UNWIND = "unwind"
    """By ``KeyboardInterrupt``: downloads end and are removed."""
    IGNORE = "ignore"
    """Not at all: the server drains on signals itself, or the end is near."""


@define(eq=False)
class StopSignals:
    """The handler; set ``way`` for what comes next."""

    way: Stop

    def __call__(self, _number: int, _frame: object) -> None:
        if self.way is Stop.LEAVE:
            os._exit(exits.OK)
        if self.way is Stop.UNWIND:
            self.way = Stop.IGNORE  # a second signal would spoil the cleaning up
            raise KeyboardInterrupt


@contextmanager
def stop_signals(way: Stop) -> Iterator[StopSignals]:
    """Inside, signals are handled; afterwards as before, but ignored once the interpreter ends."""
    handler = StopSignals(way)
    if threading.current_thread() is not threading.main_thread():
        yield handler
        return
    before = [(number, signal.signal(number, handler)) for number in SIGNALS]
    atexit.register(_ignore)
    try:
        yield handler
    finally:
        for number, old in before:
            signal.signal(number, old)


def _ignore() -> None:
    """The interpreter takes its time to end; the exit code is settled."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
