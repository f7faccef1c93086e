"""Logs as a server writes them, from events of the catalogue at chosen times."""

from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

import attrs

from kvtrio.core.explain import CachePath, MissReason, TurnClass
from kvtrio.core.types import FinishReason, RequestId, Retain
from kvtrio.obs.events import RequestDone
from kvtrio.obs.logging import Clock, Log
from kvtrio.obs.schema import Level

Event = TypeVar("Event")
START_S = 1_800_000_000.0
"""2027-01-15T08:00:00Z."""
TOLD: dict[str, Any] = {
    "request_id": RequestId(1),
    "reason": FinishReason.STOP,
    "place": 0,
    "num_prompt_tokens": 100,
    "num_computed_tokens": 100,
    "num_generated_tokens": 20,
    "prefill_s": 0.5,
    "decode_s": 1.0,
    "gap_p50_s": 0.05,
    "gap_p99_s": 0.06,
    "gap_max_s": 0.06,
    "retain": Retain.NORMAL,
    "path": CachePath.NONE,
    "miss_reason": MissReason.FIRST_TURN,
    "turn": TurnClass.FIRST,
    "longest_gap_s": 0.06,
}


def made(kind: type[Event], **told: Any) -> Event:
    """An event with nothing in the fields that are not named: None, 0 or False."""
    fields = attrs.fields(cast("type[attrs.AttrsInstance]", kind))
    return kind(**{field.name: _nothing(field.type) for field in fields} | told)


def _nothing(kind: Any) -> object:
    if type(None) in get_args(kind):
        return None
    return False if kind is bool else 0


DONE = made(RequestDone, **TOLD)


def done(**changes: Any) -> RequestDone:
    """A request's line: a first turn of 100 tokens and an answer of 20, but for the ``changes``."""
    return attrs.evolve(DONE, **changes)


def hit(
    turn: TurnClass,
    reason: MissReason,
    num_cached: int,
    path: CachePath = CachePath.RESIDENT,
    **changes: Any,
) -> RequestDone:
    """A later turn of 100 tokens, of which ``num_cached`` were reused."""
    return done(
        turn=turn,
        miss_reason=reason,
        path=path,
        num_cached_tokens=num_cached,
        num_matched_tokens=num_cached,
        num_host_tokens=num_cached if path is CachePath.RAM else 0,
        num_device_tokens=num_cached if path is CachePath.RESIDENT else 0,
        num_computed_tokens=100 - num_cached,
        **changes,
    )


def log_bytes(events: Iterable[tuple[float, object]]) -> bytes:
    """The log of ``events``, each with the second after ``START_S`` at which it was written."""
    now = START_S
    out = BytesIO()
    clock = Clock(monotonic_ns=lambda: int((now - START_S) * 1e9), wall_s=lambda: now)
    log = Log(out, clock, Level.DEBUG)
    for second, event in events:
        now = START_S + second
        log.emit(event)
    return out.getvalue()


def write_log(path: Path, events: Iterable[tuple[float, object]]) -> Path:
    path.write_bytes(log_bytes(events))
    return path
