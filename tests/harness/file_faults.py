"""Files whose n-th operation fails, or is the last that the process does."""

import errno
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

from attrs import define, field

from kvtrio.store.files import Files

LOOKING = ("names", "open", "read", "status", "size")


class Stopped(BaseException):
    """The process is gone: nothing that it would still do happens."""


class Fault(Enum):
    """What becomes of the operation, and how the caller learns of it."""

    FAILS = "fails"
    FAILS_HALF_DONE = "fails half done"
    FAILS_DONE = "fails done"
    FAILS_ON = "fails, and the next three with it"
    STOPS = "stops"
    STOPS_HALF_DONE = "stops half done"

    @property
    def stops(self) -> bool:
        return self in (Fault.STOPS, Fault.STOPS_HALF_DONE)

    @property
    def is_half(self) -> bool:
        return self in (Fault.FAILS_HALF_DONE, Fault.STOPS_HALF_DONE)


@define(eq=False)
class Trouble:
    """Strikes at operation number ``at``; None: never."""

    at: int | None = None
    fault: Fault = Fault.FAILS
    operations: list[str] = field(factory=list)
    """Their names, as far as they were begun."""
    is_stopped: bool = False

    @property
    def num_strikes(self) -> int:
        return 4 if self.fault is Fault.FAILS_ON else 1

    def strike(self, after: int, fault: Fault) -> None:
        """At the operation after the next ``after`` ones."""
        self.at, self.fault = len(self.operations) + after, fault

    def around(self, do: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if self.is_stopped:
            raise Stopped
        self.operations.append(do.__name__)
        if self.at is None or not 0 <= len(self.operations) - 1 - self.at < self.num_strikes:
            return do(*args, **options)
        self._do_some(do, *args, **options)
        if do.__name__ == "leave":
            return None
        if self.fault.stops:
            self.is_stopped = True
            raise Stopped
        raise OSError(errno.ENOSPC if self.at % 2 else errno.EIO, "injected")

    def _do_some(self, do: Callable[..., Any], *args: Any, **options: Any) -> None:
        """What reports an error when it closes has closed all the same; a lock has not locked."""
        is_done = self.fault is Fault.FAILS_DONE and do.__name__ != "lock"
        if self.fault.is_half and do.__name__ == "write":
            fd, data = args
            do(fd, data[: len(data) // 2])
        elif is_done or do.__name__ in ("close", "leave"):
            do(*args, **options)


def cases(use: Callable[["BrittleFiles"], object], files: Files) -> list[tuple[int, Fault]]:
    """Every operation of ``use`` with each fault that it can have."""
    trial = BrittleFiles(files)
    use(trial)
    return [
        (at, fault)
        for at, name in enumerate(trial.trouble.operations)
        for fault in Fault
        if not (fault.is_half and name != "write")
        and not (fault is Fault.FAILS_ON and name in LOOKING)
    ]


@define(eq=False)
class BrittleFiles:
    """``Files`` around others."""

    files: Files
    trouble: Trouble = field(factory=Trouble)

    def __getattr__(self, name: str) -> Any:
        return partial(self.trouble.around, getattr(self.files, name))

    def subfolder(self, name: str) -> "BrittleFiles":
        return BrittleFiles(self.trouble.around(self.files.subfolder, name), self.trouble)
