"""``kvtrio serve --record``: the file, the limits, and the line that says so."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import trio
from attrs import field, frozen

from kvtrio.config import ConfigError, RecordSettings
from kvtrio.engine.tap import Tap
from kvtrio.obs.logging import Log
from kvtrio.replay.recording import RecordLimits, RecordPlan, open_recording, read_limits
from kvtrio.replay.scenario import SCHEMA, Header, Origin

RECORDING = (
    "kvtrio: recording to {path}, for {seconds:g} s or {mib:g} MiB at most: times, lengths and"
    " which tokens are equal; no text and no token"
)
MIB = 1 << 20


@frozen(kw_only=True)
class Recorded:
    """The server that is recorded."""

    max_context: int
    num_places: int
    purposes: tuple[str, ...]
    log_key: bytes = field(repr=False)


def check_record(settings: RecordSettings) -> RecordLimits | None:
    """Raises ``ConfigError`` early, before a model is loaded; None: nothing is to be recorded."""
    try:
        limits = read_limits(settings.record_limit)
    except ValueError as error:
        raise ConfigError(f"--record-limit {settings.record_limit}: {error}") from None
    if settings.record is None:
        return None
    if not settings.record.parent.is_dir():
        raise ConfigError(f"--record {settings.record}: no such folder")
    if settings.record.exists() and settings.record.stat().st_size:
        raise _taken(settings.record)
    return limits


@contextmanager
def recording(settings: RecordSettings, recorded: Recorded, log: Log) -> Iterator[Tap | None]:
    """Record while the body runs, if that is wanted. For a task of the engine's trio run."""
    limits = check_record(settings)
    if limits is None or settings.record is None:
        yield None
        return
    header = Header(
        schema=SCHEMA,
        origin=Origin.RECORDED,
        max_context=recorded.max_context,
        purposes=recorded.purposes,
        num_places=recorded.num_places,
        started_s=round(time.time(), 3),
    )
    plan = RecordPlan(
        file=_new_file(settings.record),
        header=header,
        limits=limits,
        started_s=trio.current_time(),
        log_key=recorded.log_key,
        emit=log.emit,
    )
    with open_recording(plan) as tap:
        mib = limits.max_bytes / MIB
        line = RECORDING.format(path=settings.record, seconds=limits.max_s, mib=mib)
        print(line, file=sys.stderr, flush=True)
        yield tap


def _new_file(path: Path) -> BinaryIO:
    """For its owner alone; an empty one that is there, from a start that failed, will do."""
    # Without blocking: nobody may ever read a named pipe.
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, 0o600)
        file = os.fdopen(descriptor, "wb", buffering=0)
        if os.fstat(descriptor).st_size:
            file.close()
            raise _taken(path)
        os.fchmod(descriptor, 0o600)
    except OSError as error:
        raise ConfigError(f"--record {path}: {os.strerror(error.errno or 5)}") from None
    return file


def _taken(path: Path) -> ConfigError:
    return ConfigError(f"--record {path}: there is a file already, and it is not overwritten")
