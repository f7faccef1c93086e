"""Whether what a scenario expects came true."""

from collections.abc import Iterator, Mapping, Sequence

from attrs import define, field

from kvtrio.replay.results import Outcome, Result, Verdict
from kvtrio.replay.scenario import Expect

ANSWERED = (Outcome.DONE, Outcome.LEFT)


@define(eq=False)
class Judge:
    """Takes results as they come; ``verdicts`` at the end. ``counts_tokens``: the prompts are sent
    as token ids, so that numbers of tokens are the scenario's."""

    expects: Sequence[Expect]
    counts_tokens: bool
    is_doubtful: bool = field(init=False, default=False)
    """Something was left out: what comes from now on proves nothing."""
    _results: dict[int, Result] = field(init=False, factory=dict)
    _answers: dict[int, tuple[int, ...]] = field(init=False, factory=dict)
    _wanted: frozenset[int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        others = [(each.output_as, each.output_unlike) for each in self.expects]
        named = {each for pair in others for each in pair if each is not None}
        self._wanted = frozenset(named | {each.request for each in self.expects})

    def take(self, result: Result, answer: Sequence[int]) -> None:
        is_proof = result.outcome in ANSWERED and not self.is_doubtful
        if result.id in self._wanted and is_proof:
            self._results[result.id] = result
            self._answers[result.id] = tuple(answer)

    def doubt(self) -> None:
        self.is_doubtful = True

    def verdicts(self) -> Iterator[Verdict]:
        """One for each thing that is expected, in order."""
        for expect in self.expects:
            result = self._results.get(expect.request)
            found = self._of_result(expect, result) | self._of_answers(expect)
            for what, is_met in found.items():
                yield Verdict(request=expect.request, what=what, is_met=is_met)

    def _of_result(self, expect: Expect, result: Result | None) -> dict[str, bool | None]:
        cached = result.num_cached_tokens if result and self.counts_tokens else None
        path = result.path if result else None
        reason = result.miss_reason if result else None
        first_s = result.first_token_s if result else None
        gap_s = result.gap_max_s if result else None
        found: dict[str, bool | None] = {}
        if expect.min_cached is not None:
            found["min_cached"] = None if cached is None else cached >= expect.min_cached
        if expect.max_cached is not None:
            found["max_cached"] = None if cached is None else cached <= expect.max_cached
        if expect.paths:
            found["paths"] = None if path is None else path in expect.paths
        if expect.reasons:
            found["reasons"] = None if reason is None else reason in expect.reasons
        if expect.max_first_token_s is not None:
            is_soon = None if first_s is None else first_s <= expect.max_first_token_s
            found["max_first_token_s"] = is_soon
        if expect.max_gap_s is not None:
            found["max_gap_s"] = None if gap_s is None else gap_s <= expect.max_gap_s
        return found

    def _of_answers(self, expect: Expect) -> dict[str, bool | None]:
        found: dict[str, bool | None] = {}
        if expect.output_as is not None:
            found["output_as"] = self._are_equal(expect.request, expect.output_as)
        if expect.output_unlike is not None:
            are_equal = self._are_equal(expect.request, expect.output_unlike)
            found["output_unlike"] = None if are_equal is None else not are_equal
        return found

    def _are_equal(self, one: int, other: int) -> bool | None:
        answers: Mapping[int, tuple[int, ...]] = self._answers
        if one not in answers or other not in answers:
            return None
        return answers[one] == answers[other]
