"""The log: one JSON object a line, written as bytes, in a versioned envelope.

``Log.emit`` takes an event of the catalogue and nothing else, so there is no way to log a string.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import structlog
from attrs import define, field, frozen

from kvtrio.obs.events import SCHEMA, LibraryNote
from kvtrio.obs.schema import Level, level_of, name_of, plain
from kvtrio.obs.words import Library

Entry = MutableMapping[str, Any]


@frozen(kw_only=True)
class Clock:
    """Where the time in the envelope comes from."""

    monotonic_ns: Callable[[], int]
    wall_s: Callable[[], float]
    """Seconds since 1970, UTC."""


@define(eq=False)
class Log:
    """Writes events at ``level`` and above to ``file``; safe from any thread."""

    file: BinaryIO
    clock: Clock
    level: Level = Level.INFO
    num_lost: int = field(init=False, default=0)
    """Lines that could not be written: a full disk, a closed pipe or a closed file neither ends the
    server nor makes whoever logs fail."""
    _seq: "count[int]" = field(init=False, factory=lambda: count(1))
    _logger: Any = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._logger = structlog.wrap_logger(
            structlog.BytesLogger(self.file),
            processors=[self._enveloped, _rendered],
            wrapper_class=structlog.BoundLogger,
            cache_logger_on_first_use=True,
        )

    def emit(self, line: object) -> None:
        """Write ``line``, an instance of a class of the catalogue, unless it is too quiet."""
        level = level_of(line)
        if not self.wants(level):
            return
        try:
            getattr(self._logger, level.value)(name_of(line), **plain(line))
        except (OSError, ValueError):  # ValueError: the file was closed
            self.num_lost += 1

    def wants(self, level: Level) -> bool:
        return level.rank >= self.level.rank

    def _enveloped(self, _: Any, level: str, entry: Entry) -> Entry:
        stamp = datetime.fromtimestamp(self.clock.wall_s(), UTC)
        envelope = {
            "schema": SCHEMA,
            "seq": next(self._seq),
            "timestamp": stamp.isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "ts_mono_ns": self.clock.monotonic_ns(),
            "level": level,
            "event": entry.pop("event"),
        }
        return {**envelope, **entry}


_encode = msgspec.json.Encoder().encode


def _rendered(_: Any, __: str, entry: Entry) -> bytes:
    return _encode(dict(entry))


def open_log_file(path: Path) -> BinaryIO:
    """Open ``path`` to append, for its owner's eyes only if it is new.

    Raises ``OSError``.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    return os.fdopen(descriptor, "ab", buffering=0)


SEVERITIES: Mapping[int, Level] = {
    logging.DEBUG: Level.DEBUG,
    logging.INFO: Level.INFO,
    logging.WARNING: Level.WARNING,
    logging.ERROR: Level.ERROR,
    logging.CRITICAL: Level.ERROR,
}


class LibraryBridge(logging.Handler):
    """Turns records of the standard library's logging into ``library.note`` lines.

    The record is never formatted: message, arguments and exception text stay where they are.
    """

    def __init__(self, log: Log, level: int) -> None:
        super().__init__(level)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.emit(
            LibraryNote(
                library=_library_of(record.name),
                severity=_severity_of(record.levelno),
                line=record.lineno or 0,
                error=record.exc_info[0] if record.exc_info else None,
            )
        )


@contextmanager
def library_bridge(log: Log, level: int = logging.WARNING) -> Iterator[None]:
    """Make the bridge the only way out of the standard library's logging, warnings included.

    Everything is as before when the block ends.
    """
    root = logging.getLogger()
    handlers, old_level = list(root.handlers), root.level
    root.handlers[:] = [LibraryBridge(log, level)]
    root.setLevel(level)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.handlers[:] = handlers
        root.setLevel(old_level)


def _library_of(logger_name: str) -> Library:
    top = logger_name.partition(".")[0]
    known = {library.value: library for library in Library}
    return known.get(top, Library.OTHER)


def _severity_of(number: int) -> Level:
    return SEVERITIES[
        max((known for known in SEVERITIES if known <= number), default=logging.DEBUG)
    ]
