"""What the engine tells observers: numbers, enums and ids; no text and no token."""

from enum import Enum
from typing import Protocol, Self

from attrs import define, field, frozen

from kvtrio.core.batch import Batch
from kvtrio.core.cost import CostModel
from kvtrio.core.events import Cached, Gap, Rejected
from kvtrio.core.explain import CacheReport
from kvtrio.core.identity import AdapterUse
from kvtrio.core.state import CoreStatistics
from kvtrio.core.storage import TierMoves
from kvtrio.core.stored import StoreFault
from kvtrio.core.types import FinishReason, RequestId, Retain


class BreachReason(Enum):
    """Why a step took longer than it may."""

    ROWS = "rows"
    """The decoding rows alone were expected to: streams go on, whatever it costs."""
    ONE_BLOCK = "one_block"
    """Expected, for one block of a prompt: without it no prompt would ever be read."""
    POLICY = "policy"
    """Expected, for more than a block: the policy does not keep the bound."""
    MISPREDICTED = "mispredicted"
    """It was expected to take less."""


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
    predicted_s: float
    """What the cost model expected, with its margin."""
    limit_s: float
    """What the step may take."""
    breach: BreachReason | None = None
    """Why it took longer than that; None if it did not."""


def breach_of(
    batch: Batch, num_prefill_tokens: int, block_size: int, duration_s: float
) -> BreachReason | None:
    """Why a step exceeded its limit; None if it did not."""
    if duration_s <= batch.limit_s:
        return None
    if batch.predicted_s <= batch.limit_s:
        return BreachReason.MISPREDICTED
    if num_prefill_tokens == 0:
        return BreachReason.ROWS
    is_one = num_prefill_tokens <= block_size
    return BreachReason.ONE_BLOCK if is_one else BreachReason.POLICY


@frozen(kw_only=True)
class CostRecord:
    """What the cost model has learned: seconds per unit of each thing that a step does."""

    num_observed: int
    """Steps it was fitted to."""
    margin: float
    """What predictions are multiplied by."""
    base_s: float
    prefill_token_s: float
    prefill_context_s: float
    """Per token of prefill and position it attends to."""
    decode_row_s: float
    decode_context_s: float
    adapter_s: float
    prefill_chunk_s: float
    """Per request whose prompt is read, beside its tokens."""

    @classmethod
    def of(cls, cost: CostModel) -> Self:
        per_unit = {f"{name}_s": seconds for name, seconds in cost.coefficients().items()}
        return cls(num_observed=cost.num_observed, margin=cost.margin, **per_unit)


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
    tenant: bytes = b""
    """Who was served; empty where nobody asked who it is."""
    purpose: int | None = None
    """Place of the request's purpose in the operator's list."""
    num_recalled_tokens: int = 0
    """Prompt tokens that kept the ids with which they were generated here."""
    is_copy: bool = False
    """One more answer to a prompt whose first answer has a record of its own."""
    num_recomputed_tokens: int = 0
    """Computed again after a preemption; in none of the other counts."""
    num_preemptions: int = 0
    longest_gap: Gap | None = None
    """As the reader saw it, with its cause; None with fewer than two tokens."""


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

    def lost(self, fault: StoreFault) -> None:
        """A block or a state on disk could not be used, and was removed."""
        ...

    def rejected(self, record: Rejected) -> None:
        """A request was not admitted."""
        ...

    def cost(self, record: CostRecord) -> None:
        """What was learned so far; now and then, and at the end."""
        ...

    def usage(self, record: CoreStatistics) -> None:
        """How full the tiers are; now and then."""
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

    def lost(self, fault: StoreFault) -> None:
        pass

    def rejected(self, record: Rejected) -> None:
        pass

    def cost(self, record: CostRecord) -> None:
        pass

    def usage(self, record: CoreStatistics) -> None:
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
