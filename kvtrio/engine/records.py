"""What the engine tells observers: numbers, enums and ids; no text and no token."""

from typing import Protocol

from attrs import define, field, frozen

from kvtrio.core.events import Cached
from kvtrio.core.explain import CacheReport
from kvtrio.core.identity import AdapterUse
from kvtrio.core.storage import TierMoves
from kvtrio.core.types import FinishReason, RequestId, Retain


@frozen(kw_only=True)
class StepRecord:
    """One finished step. Times in seconds of the run's clock."""

    step: int
    num_chunks: int
    num_prefill_tokens: int
    num_decode_rows: int
    num_waiting: int
    """After the step, as ``num_running``."""
    num_running: int
    duration_s: float
    predicted_s: float | None = None
    """What the policy's cost model expected; None without one."""


@frozen(kw_only=True)
class RequestRecord:
    """One ended request: the numbers of ``Finished``, and the gaps between its tokens."""

    request_id: RequestId
    reason: FinishReason
    stopped_by_text: bool
    place: int | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_generated_tokens: int
    queue_s: float
    prefill_s: float
    decode_s: float
    gap_p50_s: float | None
    """Time between two tokens becoming ready, whether anybody read them or not; None with
    fewer than two tokens."""
    gap_p99_s: float | None
    gap_max_s: float | None
    gaps_s: tuple[float, ...] = ()
    """All of them, ascending."""
    cache: CacheReport
    retain: Retain = Retain.NORMAL
    adapters: tuple[AdapterUse, ...] = ()
    """Under which the answer was generated, in canonical order."""
    session: bytes | None = None
    """Opaque digest of the caller's name for the conversation."""
    purpose: int | None = None
    """Place of the request's purpose in the operator's list."""
    num_recalled_tokens: int = 0
    """Prompt tokens that kept the ids with which they were generated here."""


class Observer(Protocol):
    """Called synchronously, after the outputs of the event were handed out; must not block.

    What it raises ends the engine: a broken account is a bug.
    """

    def step(self, record: StepRecord) -> None: ...

    def request(self, record: RequestRecord) -> None: ...

    def cached(self, record: Cached) -> None:
        """A request found state."""
        ...

    def moved(self, record: TierMoves) -> None:
        """The cache moved or lost blocks since the last step."""
        ...


class NullObserver:
    """Looks away."""

    def step(self, record: StepRecord) -> None:
        pass

    def request(self, record: RequestRecord) -> None:
        pass

    def cached(self, record: Cached) -> None:
        pass

    def moved(self, record: TierMoves) -> None:
        pass


@define(eq=False)
class Gaps:
    """Times between a request's tokens; as many numbers as the answer has tokens."""

    _last_s: float | None = field(init=False, default=None)
    _gaps: list[float] = field(init=False, factory=list)

    def add(self, now: float) -> None:
        """A token became ready."""
        if self._last_s is not None:
            self._gaps.append(now - self._last_s)
        self._last_s = now

    def ascending(self) -> tuple[float, ...]:
        return tuple(sorted(self._gaps))

    def percentiles(self, *shares: float) -> tuple[float | None, ...]:
        """For each share in (0, 1], the smallest gap that at least this share does not exceed."""
        ordered = self.ascending()
        if not ordered:
            return (None,) * len(shares)
        # Nearest rank: always a gap that happened. -(-x // 1) is the ceiling of x.
        return tuple(ordered[int(-(-share * len(ordered) // 1)) - 1] for share in shares)
