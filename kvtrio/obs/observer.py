"""The engine's records as log lines."""

from typing import Any

import attrs
from attrs import define, field, frozen

from kvtrio.engine.records import RequestRecord, StepRecord
from kvtrio.obs.events import RequestDone, SchedStep
from kvtrio.obs.logging import Log
from kvtrio.obs.schema import Level


@frozen(kw_only=True)
class StepSampling:
    """Which steps are written at level info; at level debug all are."""

    every: int = field(default=100, validator=attrs.validators.ge(1))
    slow_s: float = 1.0
    """A step that took this long is always written."""


@define(eq=False)
class JsonObserver:
    """Implements the engine's ``Observer``: one line per request, some per step."""

    log: Log
    sampling: StepSampling = StepSampling()
    num_requests: int = field(init=False, default=0)
    num_steps: int = field(init=False, default=0)

    def step(self, record: StepRecord) -> None:
        self.num_steps += 1
        is_slow = record.duration_s >= self.sampling.slow_s
        is_sample = record.step % self.sampling.every == 0
        if is_slow or is_sample or self.log.wants(Level.DEBUG):
            self.log.emit(SchedStep(is_slow=is_slow, **_numbers(record)))

    def request(self, record: RequestRecord) -> None:
        self.num_requests += 1
        self.log.emit(RequestDone(**_numbers(record)))


def _numbers(record: StepRecord | RequestRecord) -> dict[str, Any]:
    return attrs.asdict(record, recurse=False)
