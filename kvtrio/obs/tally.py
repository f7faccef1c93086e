"""Running totals of what the engine reports: the one source of every metric.

Plain numbers rather than a metrics library's objects: three sets of names are made of them, and a
finished answer of thousands of tokens has thousands of gaps to count.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence

from attrs import define, field

from kvtrio.core.events import Cached, Rejected
from kvtrio.core.explain import MissReason, TurnClass
from kvtrio.core.state import CoreStatistics
from kvtrio.core.storage import TierMoves
from kvtrio.core.stored import StoreFault
from kvtrio.core.types import FinishReason, GapCause, RejectReason
from kvtrio.engine.records import BreachReason, CostRecord, RequestRecord, StepRecord

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
RATIOS = (0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)
TOKENS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0)


@define(eq=False)
class Spread:
    """A histogram: how many values lie at or below each bound, and their sum."""

    bounds: tuple[float, ...] = SECONDS
    """Ascending; above the last there is one more class."""
    counts: list[int] = field(init=False)
    """Per class, not summed up."""
    total: float = field(init=False, default=0.0)

    def __attrs_post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    @property
    def count(self) -> int:
        return sum(self.counts)

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add_all(self, ascending: Sequence[float]) -> None:
        """Count many values at the cost of a search per bound."""
        before = 0
        for index, bound in enumerate(self.bounds):
            upto = bisect_right(ascending, bound)
            self.counts[index] += upto - before
            before = upto
        self.counts[-1] += len(ascending) - before
        self.total += sum(ascending)


@define(eq=False)
class Requests:
    """Over all ended requests. A prompt counts with its first answer, as ``usage`` has it."""

    num_computed_tokens: int = 0
    num_device_tokens: int = 0
    num_host_tokens: int = 0
    num_disk_tokens: int = 0
    num_recalled_tokens: int = 0
    num_copied_computed_tokens: int = 0
    """Of prompts, for answers after the first, as the next; in none of the counts above."""
    num_copied_reused_tokens: int = 0
    num_generated_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_preemptions: int = 0
    num_slow_readers: int = 0
    """Answers whose longest gap was their reader's."""
    longest_tokens: int = 0
    """Prompt and answer of the longest request."""
    by_reason: Counter[FinishReason] = field(factory=Counter)
    by_miss: Counter[tuple[MissReason, TurnClass]] = field(factory=Counter)
    prefill_total_s: float = 0.0
    """Of prompts that were read to their end."""
    decode_total_s: float = 0.0
    queue: Spread = field(factory=Spread)
    prefill: Spread = field(factory=Spread)
    decode: Spread = field(factory=Spread)
    whole: Spread = field(factory=Spread)
    """From arrival to the end."""
    first_token: Spread = field(factory=Spread)
    """From arrival to the first token."""
    gaps: Spread = field(factory=Spread)
    """Between any two tokens of an answer."""
    longest_gap: Spread = field(factory=Spread)
    """One per answer of two tokens or more."""
    prompt_tokens: Spread = field(factory=lambda: Spread(TOKENS))
    answer_tokens: Spread = field(factory=lambda: Spread(TOKENS))

    @property
    def num_cached_tokens(self) -> int:
        return self.num_device_tokens + self.num_host_tokens + self.num_disk_tokens

    @property
    def num_prompt_tokens(self) -> int:
        """Computed or reused; a request aborted before its end counts as far as it came."""
        return self.num_computed_tokens + self.num_cached_tokens

    def add(self, record: RequestRecord) -> None:
        report, total = record.cache, record.num_prompt_tokens + record.num_generated_tokens
        self._add_prompt(record)
        self.num_generated_tokens += record.num_generated_tokens
        self.num_recomputed_tokens += record.num_recomputed_tokens
        self.num_preemptions += record.num_preemptions
        self.longest_tokens = max(self.longest_tokens, total)
        self.by_reason[record.reason] += 1
        if record.place is not None:
            self.by_miss[report.reason, report.turn] += 1
        self.queue.add(record.queue_s)
        self.whole.add(record.queue_s + record.prefill_s + record.decode_s)
        if record.num_generated_tokens:
            self._add_answer(record)

    def _add_prompt(self, record: RequestRecord) -> None:
        report = record.cache
        if record.is_copy:
            self.num_copied_computed_tokens += record.num_computed_tokens
            self.num_copied_reused_tokens += report.num_reused_tokens
            return
        self.num_computed_tokens += record.num_computed_tokens
        self.num_device_tokens += report.num_device_tokens
        self.num_host_tokens += report.num_host_tokens
        self.num_disk_tokens += report.num_disk_tokens
        self.num_recalled_tokens += record.num_recalled_tokens
        if record.num_computed_tokens + record.num_cached_tokens == record.num_prompt_tokens:
            self.prefill_total_s += record.prefill_s
            self.prompt_tokens.add(record.num_prompt_tokens)

    def _add_answer(self, record: RequestRecord) -> None:
        self.decode_total_s += record.decode_s
        self.prefill.add(record.prefill_s)
        self.decode.add(record.decode_s)
        self.first_token.add(record.queue_s + record.prefill_s)
        self.answer_tokens.add(record.num_generated_tokens)
        self.gaps.add_all(record.gaps_s)
        if record.gap_max_s is not None:
            self.longest_gap.add(record.gap_max_s)
        if record.longest_gap is not None:
            self.num_slow_readers += record.longest_gap.cause is GapCause.READER


@define(eq=False)
class Tally:
    """Implements the engine's ``Observer``."""

    requests: Requests = field(factory=Requests)
    num_steps: int = 0
    num_chunks: int = 0
    num_prefill_tokens: int = 0
    num_decode_rows: int = 0
    step_time: Spread = field(factory=Spread)
    step_tokens: Spread = field(factory=lambda: Spread(TOKENS))
    accuracy: Spread = field(factory=lambda: Spread(RATIOS))
    """Measured over predicted duration of steps."""
    by_breach: Counter[BreachReason] = field(factory=Counter)
    by_fault: Counter[StoreFault] = field(factory=Counter)
    """Of state on disk that could not be used."""
    by_rejection: Counter[RejectReason] = field(factory=Counter)
    moves: TierMoves = field(factory=TierMoves)
    """Since the start."""

    def step(self, record: StepRecord) -> None:
        self.num_steps += 1
        self.num_chunks += record.num_chunks
        self.num_prefill_tokens += record.num_prefill_tokens
        self.num_decode_rows += record.num_decode_rows
        self.step_time.add(record.duration_s)
        self.step_tokens.add(record.num_prefill_tokens + record.num_decode_rows)
        if record.predicted_s > 0:
            self.accuracy.add(record.duration_s / record.predicted_s)
        if record.breach is not None:
            self.by_breach[record.breach] += 1

    def request(self, record: RequestRecord) -> None:
        self.requests.add(record)

    def cached(self, record: Cached) -> None:
        """Counted with its request, at the end."""

    def rejected(self, record: Rejected) -> None:
        self.by_rejection[record.reason] += 1

    def cost(self, record: CostRecord) -> None:
        """Metrics show it as it is when they are asked for."""

    def usage(self, record: CoreStatistics) -> None:
        """As ``cost``."""

    def lost(self, fault: StoreFault) -> None:
        self.by_fault[fault] += 1

    def moved(self, record: TierMoves) -> None:
        self.moves.num_promoted += record.num_promoted
        self.moves.num_demoted += record.num_demoted
        self.moves.num_from_disk += record.num_from_disk
        self.moves.num_dropped += record.num_dropped
        self.moves.num_dropped_tokens += record.num_dropped_tokens
        self.moves.longest_idle_s = max(self.moves.longest_idle_s, record.longest_idle_s)
