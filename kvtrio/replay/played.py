"""What a replay tells in a few lines."""

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence

from attrs import define, field

from kvtrio.replay.results import Outcome, Result, Verdict
from kvtrio.replay.target import OK

LATE_S = 0.1
"""Sent so long after its time, a request was held up by answers that it needs, or by us."""


def _times() -> "array[float]":
    return array("d")


@define(eq=False)
class Played:
    """Takes results as they come."""

    num_planned: int
    outcomes: Counter[Outcome] = field(factory=Counter)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_late: int = 0
    statuses: Counter[int] = field(factory=Counter)
    """HTTP's, of what was refused or failed; 0: no answer came."""
    _first_s: "array[float]" = field(init=False, factory=_times)
    _gaps_s: "array[float]" = field(init=False, factory=_times)

    @property
    def num_results(self) -> int:
        return sum(self.outcomes.values())

    def take(self, result: Result) -> None:
        self.outcomes[result.outcome] += 1
        if result.outcome in (Outcome.REFUSED, Outcome.FAILED):
            self.statuses[result.status] += 1
        self.num_late += result.sent_s - result.planned_s > LATE_S
        if result.num_prompt_tokens and result.num_cached_tokens is not None:
            self.num_prompt_tokens += result.num_prompt_tokens
            self.num_cached_tokens += result.num_cached_tokens
        if result.first_token_s is not None:
            self._first_s.append(result.first_token_s)
        self._gaps_s.extend(result.gaps_s)

    def lines(self, wall_s: float, verdicts: Sequence[Verdict]) -> Iterator[str]:
        counts = ", ".join(f"{self.outcomes[each]} {each.value}" for each in Outcome)
        yield f"{self.num_results} of {self.num_planned} requests in {wall_s:.1f} s: {counts}"
        if self.statuses:
            yield "not answered: " + ", ".join(self._unanswered())
        if self.num_prompt_tokens:
            share = 100 * self.num_cached_tokens / self.num_prompt_tokens
            yield f"reused: {share:.1f} % of {self.num_prompt_tokens:,} prompt tokens"
        yield from _percentiles("first token", self._first_s)
        yield from _percentiles("between tokens", self._gaps_s)
        if self.num_late:
            yield f"sent late, by {LATE_S} s or more: {self.num_late}"
        if verdicts:
            yield from _judged(verdicts)

    def _unanswered(self) -> Iterator[str]:
        words = {0: "without any answer", OK: "broken off"}
        for status, number in sorted(self.statuses.items()):
            yield f"{number} {words.get(status, f'with status {status}')}"


def _percentiles(name: str, values_s: "array[float]") -> Iterator[str]:
    if values_s:
        ordered = sorted(values_s)
        p50, p99 = (ordered[int(-(-share * len(ordered) // 1)) - 1] for share in (0.5, 0.99))
        yield f"{name}: p50 {p50:.3f} s, p99 {p99:.3f} s, longest {ordered[-1]:.3f} s"


def _judged(verdicts: Sequence[Verdict]) -> Iterator[str]:
    num_met = sum(each.is_met is True for each in verdicts)
    unknown = sum(each.is_met is None for each in verdicts)
    untold = f", {unknown} cannot be told" if unknown else ""
    yield f"expected: {num_met} of {len(verdicts)} came true{untold}"
    for each in verdicts:
        if each.is_met is False:
            yield f"  not so: request {each.request}, {each.what}"
