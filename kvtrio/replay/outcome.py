"""What a simulation came to, in numbers that fit on a screen; ``kvtrio analyze`` has the rest."""

from collections import Counter

from attrs import define, field

from kvtrio.core.events import Cached, Rejected
from kvtrio.core.explain import CachePath
from kvtrio.core.state import CoreStatistics
from kvtrio.core.storage import TierMoves
from kvtrio.core.stored import StoreFault
from kvtrio.engine.records import CostRecord, RequestRecord, StepRecord

Numbers = dict[str, float | int | None]


@define(eq=False)
class Outcome:
    """Implements the engine's ``Observer``."""

    num_requests: int = 0
    num_rejected: int = 0
    num_prompt_tokens: int = 0
    num_device_tokens: int = 0
    num_host_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_breaches: int = 0
    paths: Counter[CachePath] = field(factory=Counter)
    first_tokens_s: list[float] = field(factory=list)
    longest_gaps_s: list[float] = field(factory=list)
    """Of each answer with two tokens."""

    def step(self, record: StepRecord) -> None:
        self.num_breaches += record.breach is not None

    def request(self, record: RequestRecord) -> None:
        self.num_requests += 1
        self.num_prompt_tokens += record.num_prompt_tokens
        self.num_device_tokens += record.cache.num_device_tokens
        self.num_host_tokens += record.cache.num_host_tokens
        self.num_generated_tokens += record.num_generated_tokens
        self.num_preemptions += record.num_preemptions
        self.paths[record.cache.path] += 1
        if record.num_generated_tokens:
            self.first_tokens_s.append(record.queue_s + record.prefill_s)
        if record.gap_max_s is not None:
            self.longest_gaps_s.append(record.gap_max_s)

    def cached(self, record: Cached) -> None:
        pass

    def lost(self, fault: StoreFault) -> None:
        pass

    def moved(self, record: TierMoves) -> None:
        pass

    def rejected(self, record: Rejected) -> None:
        self.num_rejected += 1

    def cost(self, record: CostRecord) -> None:
        pass

    def usage(self, record: CoreStatistics) -> None:
        pass

    def rows(self, simulated_s: float, num_steps: int) -> Numbers:
        """By name, in the order in which they are shown."""
        num_cached = self.num_device_tokens + self.num_host_tokens
        return {
            "requests": self.num_requests,
            "refused": self.num_rejected,
            "simulated seconds": simulated_s,
            "steps": num_steps,
            "prompt tokens": self.num_prompt_tokens,
            "of these from the cache": _share(num_cached, self.num_prompt_tokens),
            "from RAM": _share(self.num_host_tokens, self.num_prompt_tokens),
            "requests that reused nothing": self.paths[CachePath.NONE],
            "generated tokens": self.num_generated_tokens,
            "first token, median s": quantile(self.first_tokens_s, 0.5),
            "first token, p99 s": quantile(self.first_tokens_s, 0.99),
            "longest gap, median of answers s": quantile(self.longest_gaps_s, 0.5),
            "longest gap, p99 s": quantile(self.longest_gaps_s, 0.99),
            "longest gap of all s": quantile(self.longest_gaps_s, 1.0),
            "steps over their limit": self.num_breaches,
            "preemptions": self.num_preemptions,
        }


def quantile(values: list[float], share: float) -> float | None:
    """The smallest that at least this share does not exceed; None of none."""
    ordered = sorted(values)
    return ordered[int(-(-share * len(ordered) // 1)) - 1] if ordered else None


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def side_by_side(columns: dict[str, Numbers]) -> str:
    """One line per row, one column per run."""
    names = list(next(iter(columns.values())))
    cells = [["", *columns]]
    cells += [[name, *(_shown(column[name]) for column in columns.values())] for name in names]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip()
        for line in cells
    )


def _shown(value: float | int | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
