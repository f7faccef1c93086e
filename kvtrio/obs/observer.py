"""The engine's records as log lines, and several observers as one."""

from typing import Any

import attrs
from attrs import define, field, frozen

from kvtrio.core.events import Cached, Rejected
from kvtrio.core.state import CoreStatistics
from kvtrio.core.storage import TierMoves
from kvtrio.core.stored import StoreFault
from kvtrio.core.types import Retain, Tier
from kvtrio.engine.records import CostRecord, Observer, RequestRecord, StepRecord
from kvtrio.obs.events import (
    CacheDiscard,
    CacheEvict,
    CacheMatch,
    CacheRestore,
    RequestDone,
    RequestRejected,
    SchedCost,
    SchedStep,
    TierUsage,
)
from kvtrio.obs.identity import adapter_set
from kvtrio.obs.logging import Log
from kvtrio.obs.schema import Digest, Level
from kvtrio.obs.words import DiscardReason

PLAIN = (
    "request_id",
    "reason",
    "stopped_by_text",
    "place",
    "num_prompt_tokens",
    "num_cached_tokens",
    "num_computed_tokens",
    "num_generated_tokens",
    "queue_s",
    "prefill_s",
    "decode_s",
    "gap_p50_s",
    "gap_p99_s",
    "gap_max_s",
    "purpose",
    "retain",
    "num_recalled_tokens",
    "is_copy",
    "num_recomputed_tokens",
    "num_preemptions",
)
"""Fields of a request's record that its line has under the same name."""


@frozen(kw_only=True)
class StepSampling:
    """Which steps are written at level info; at level debug all are."""

    every: int = field(default=100, validator=attrs.validators.ge(1))
    slow_s: float = 1.0
    """A step that took this long is always written."""


@define(eq=False)
class JsonObserver:
    """Implements the engine's ``Observer``: one line per request, some per step, one per move."""

    log: Log
    sampling: StepSampling = StepSampling()
    key: bytes = field(kw_only=True, repr=False)
    """For digests."""
    num_requests: int = field(init=False, default=0)
    num_steps: int = field(init=False, default=0)

    def wants_step(self, step: int, duration_s: float) -> bool:
        """Whether a step that kept its limit has a line."""
        is_slow, is_sample = duration_s >= self.sampling.slow_s, step % self.sampling.every == 0
        return is_slow or is_sample or self.log.wants(Level.DEBUG)

    def step(self, record: StepRecord) -> None:
        self.num_steps += 1
        is_slow = record.duration_s >= self.sampling.slow_s
        is_breach = record.breach is not None
        if is_breach or self.wants_step(record.step, record.duration_s):
            numbers = attrs.asdict(record, recurse=False)
            self.log.emit(SchedStep(is_slow=is_slow, is_breach=is_breach, **numbers))

    def request(self, record: RequestRecord) -> None:
        self.num_requests += 1
        self.log.emit(_done(record, self.key))
        if record.retain is Retain.AUXILIARY:
            num_tokens = record.num_computed_tokens + max(record.num_generated_tokens - 1, 0)
            self.log.emit(
                CacheDiscard(
                    request_id=record.request_id,
                    why=DiscardReason.AUXILIARY,
                    num_tokens=num_tokens,
                )
            )

    def cached(self, record: Cached) -> None:
        report, found = record.report, record.found
        self.log.emit(
            CacheMatch(
                request_id=record.request_id,
                num_tokens=found.num_tokens,
                num_host_tokens=found.num_host,
                num_disk_tokens=found.num_disk,
                path=report.path,
                miss_reason=report.reason,
                turn=report.turn,
                num_matched_tokens=report.num_matched_tokens,
                num_other_tokens=report.num_other_tokens,
            )
        )

    def lost(self, fault: StoreFault) -> None:
        why = DiscardReason(fault.value)
        self.log.emit(CacheDiscard(request_id=None, why=why, num_tokens=None))

    def rejected(self, record: Rejected) -> None:
        self.log.emit(RequestRejected(**attrs.asdict(record, recurse=False)))

    def cost(self, record: CostRecord) -> None:
        self.log.emit(SchedCost(**attrs.asdict(record, recurse=False)))

    def usage(self, record: CoreStatistics) -> None:
        blocks, states = record.num_used_blocks, record.num_used_slots
        self.log.emit(
            TierUsage(
                num_device_blocks=blocks.get(Tier.DEVICE, 0),
                num_host_blocks=blocks.get(Tier.HOST, 0),
                num_device_states=states.get(Tier.DEVICE, 0),
                num_host_states=states.get(Tier.HOST, 0),
                num_disk_bytes=record.num_disk_bytes,
                num_running=record.num_running,
                num_waiting=record.num_waiting,
                num_waiting_tokens=record.num_waiting_tokens,
            )
        )

    def moved(self, record: TierMoves) -> None:
        if record.num_promoted or record.num_from_disk:
            self.log.emit(
                CacheRestore(num_blocks=record.num_promoted, num_disk_blocks=record.num_from_disk)
            )
        if record.num_demoted or record.num_dropped:
            self.log.emit(
                CacheEvict(
                    num_demoted_blocks=record.num_demoted,
                    num_dropped_blocks=record.num_dropped,
                    num_dropped_tokens=record.num_dropped_tokens,
                    longest_idle_s=record.longest_idle_s,
                )
            )


def _done(record: RequestRecord, key: bytes) -> RequestDone:
    report = record.cache
    plain: dict[str, Any] = {name: getattr(record, name) for name in PLAIN}
    session, gap = record.session, record.longest_gap
    prompt = gap.prompt if gap else None
    return RequestDone(
        **plain,
        session=None if session is None else Digest(int.from_bytes(session)),
        tenant=Digest.of_bytes(record.tenant, key) if record.tenant else None,
        num_adapters=len(record.adapters),
        adapters=adapter_set(record.adapters, key),
        path=report.path,
        miss_reason=report.reason,
        turn=report.turn,
        num_device_tokens=report.num_device_tokens,
        num_host_tokens=report.num_host_tokens,
        num_disk_tokens=report.num_disk_tokens,
        num_matched_tokens=report.num_matched_tokens,
        num_other_tokens=report.num_other_tokens,
        divergence_at=report.num_matched_tokens if report.is_divergence else None,
        evicted_age_s=report.evicted_age_s,
        longest_gap_s=gap.seconds if gap else None,
        longest_gap_cause=gap.cause if gap else None,
        longest_gap_prefill_tokens=gap.num_prefill_tokens if gap else None,
        longest_gap_at=gap.at if gap else None,
        longest_gap_request_id=prompt.request_id if prompt else None,
        longest_gap_prompt_tokens=prompt.num_prompt_tokens if prompt else None,
        longest_gap_prompt_at=prompt.start if prompt else None,
    )


@frozen
class FanOut:
    """Several observers as one; told in order."""

    observers: tuple[Observer, ...]

    def step(self, record: StepRecord) -> None:
        for observer in self.observers:
            observer.step(record)

    def request(self, record: RequestRecord) -> None:
        for observer in self.observers:
            observer.request(record)

    def cached(self, record: Cached) -> None:
        for observer in self.observers:
            observer.cached(record)

    def moved(self, record: TierMoves) -> None:
        for observer in self.observers:
            observer.moved(record)

    def lost(self, fault: StoreFault) -> None:
        for observer in self.observers:
            observer.lost(fault)

    def rejected(self, record: Rejected) -> None:
        for observer in self.observers:
            observer.rejected(record)

    def cost(self, record: CostRecord) -> None:
        for observer in self.observers:
            observer.cost(record)

    def usage(self, record: CoreStatistics) -> None:
        for observer in self.observers:
            observer.usage(record)
