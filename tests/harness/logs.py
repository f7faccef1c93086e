"""Logs as a server writes them, from events of the catalogue at chosen times."""

from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import Any

import attrs

from kvtrio.core.explain import CachePath, MissReason, TurnClass
from kvtrio.core.types import FinishReason, RequestId, Retain
from kvtrio.obs.events import RequestDone
from kvtrio.obs.logging import Clock, Log
from kvtrio.obs.schema import Level

START_S = 1_800_000_000.0
"""2027-01-15T08:00:00Z."""
DONE = RequestDone(
    request_id=RequestId(1),
    reason=FinishReason.STOP,
    stopped_by_text=False,
    place=0,
    num_prompt_tokens=100,
    num_cached_tokens=0,
    num_computed_tokens=100,
    num_generated_tokens=20,
    queue_s=0.0,
    prefill_s=0.5,
    decode_s=1.0,
    gap_p50_s=0.05,
    gap_p99_s=0.06,
    gap_max_s=0.06,
    session=None,
    tenant=None,
    purpose=None,
    retain=Retain.NORMAL,
    num_adapters=0,
    adapters=None,
    path=CachePath.NONE,
    miss_reason=MissReason.FIRST_TURN,
    turn=TurnClass.FIRST,
    num_device_tokens=0,
    num_host_tokens=0,
    num_matched_tokens=0,
    num_other_tokens=0,
    divergence_at=None,
    evicted_age_s=None,
    num_recalled_tokens=0,
    is_copy=False,
    num_recomputed_tokens=0,
    num_preemptions=0,
    longest_gap_s=0.06,
    longest_gap_cause=None,
    longest_gap_prefill_tokens=None,
    longest_gap_at=None,
    longest_gap_request_id=None,
    longest_gap_prompt_tokens=None,
    longest_gap_prompt_at=None,
)


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
    is_host = path is CachePath.RAM
    return done(
        turn=turn,
        miss_reason=reason,
        path=path,
        num_cached_tokens=num_cached,
        num_matched_tokens=num_cached,
        num_host_tokens=num_cached if is_host else 0,
        num_device_tokens=0 if is_host else num_cached,
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
