"""How long a step takes, learned from the steps that were run.

Seconds are a non-negative sum over what a step does: a constant, tokens of prefill, what they
attend to, decoding rows, what those attend to, distinct adapters. Three rules keep the fit sane:

1. Old steps fade; where nothing new is learned the fit rests on what it was over the long run,
   and before that on the prior, made as fast as the machine has shown itself. A feature that is
   constant, or absent, for hours keeps its weight: nothing winds up, and nothing that was learned
   is forgotten for want of practice.
2. Steps of one crowd that decodes are much alike: the fit takes some of them, and the margin all.
3. Predictions are scaled by a quantile of what measured over predicted lately was, and never by
   less than 1: a bound is kept by being pessimistic about noise, not about the mean.

The prior is a slow machine, so the first steps are small ones, and the fit grows from there.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Set
from operator import mul, truediv

from attrs import define, evolve, field

from kvtrio.core.batch import Batch, Chunk
from kvtrio.core.messages import message

FADE = 0.98
"""Weight of a step against the next one: about the last 50 count."""
PRIOR_WEIGHT = 0.05
"""The prior counts as so many steps, at each feature's typical size."""
DRIFT = 0.01
"""How far the anchor follows the fit with each step."""
KNOWN = 0.05
"""Practice with which the fit of a feature stands on its own."""
SWEEPS = 8
"""Rounds of coordinate descent per fit; it starts from the last fit."""
TYPICAL_S = 0.05
"""A step that counts once in the fit; shorter ones count more, longer ones less."""
MOST_SHARE = 10.0
NUM_FIRST = 50
"""So many steps in a row that decode for as many rows are all taken into the fit."""
ALIKE = 7
"""And then one in so many."""
NUM_RESIDUALS = 128
QUANTILE = 0.9
ALARMING = 1.5
"""Measured over predicted, from which on a step is not noise but news: the machine got slower."""
CALM = 0.8
"""How an alarm fades with each step."""


@message(kw_only=True)
class Load:
    """What a step does."""

    num_prefill_tokens: int = 0
    num_prefill_chunks: int = 0
    """Requests whose prompts are read; a chunk costs something however short it is."""
    prefill_context: float = 0.0
    """Sum over prefill tokens of the positions each attends to."""
    num_decode_rows: int = 0
    decode_context: float = 0.0
    num_adapters: int = 0

    def features(self) -> tuple[float, ...]:
        return (
            1.0,
            self.num_prefill_tokens,
            self.prefill_context,
            self.num_decode_rows,
            self.decode_context,
            self.num_adapters,
            self.num_prefill_chunks,
        )

    def plus_chunk(self, start: int, num_tokens: int) -> "Load":
        """And ``num_tokens`` more tokens of a prompt, from position ``start`` on."""
        return Load(
            num_prefill_tokens=self.num_prefill_tokens + num_tokens,
            num_prefill_chunks=self.num_prefill_chunks + 1,
            prefill_context=self.prefill_context + num_tokens * (start + num_tokens / 2),
            num_decode_rows=self.num_decode_rows,
            decode_context=self.decode_context,
            num_adapters=self.num_adapters,
        )

    def plus_row(self, position: int) -> "Load":
        """And one decoding row."""
        return evolve(
            self,
            num_decode_rows=self.num_decode_rows + 1,
            decode_context=self.decode_context + position,
        )

    def plus_adapters(self, num_adapters: int) -> "Load":
        return evolve(self, num_adapters=self.num_adapters + num_adapters)


def load_of(batch: Batch) -> Load:
    """The load of a planned step."""
    return load_with(batch.chunks, Load(), frozenset())


def load_with(chunks: Iterable[Chunk], rows: Load, adapters: Set[int]) -> Load:
    """That of ``chunks`` beside decoding ``rows`` under ``adapters`` (hashes, 0: none)."""
    num_tokens = num_reads = num_rows = 0
    context = row_context = 0.0
    sets = set(adapters)
    for chunk in chunks:
        num = len(chunk.token_ids)
        sets.add(hash(chunk.adapters) if chunk.adapters else 0)
        if num == 1:
            num_rows += 1
            row_context += chunk.start
        else:
            num_reads += 1
            num_tokens += num
            context += num * (chunk.start + num / 2)
    return Load(
        num_prefill_tokens=num_tokens,
        num_prefill_chunks=num_reads,
        prefill_context=context,
        num_decode_rows=rows.num_decode_rows + num_rows,
        decode_context=rows.decode_context + row_context,
        num_adapters=len(sets - {0}),
    )


NAMES = (
    "base",
    "prefill_token",
    "prefill_context",
    "decode_row",
    "decode_context",
    "adapter",
    "prefill_chunk",
)
SCALES = (1.0, 256.0, 256.0 * 2048.0, 4.0, 4.0 * 2048.0, 2.0, 1.0)
"""Typical sizes, so that one weight of the prior suits all."""
SLOW = (0.02, 0.004, 1e-6, 0.01, 2e-6, 0.01, 0.01)
"""Prior: seconds per unit on a slow machine."""


@define(eq=False)
class CostModel:
    """``observe`` steps, ``predict`` steps; see the module's rules."""

    prior: tuple[float, ...] = SLOW
    weights: list[float] = field(init=False)
    num_observed: int = field(init=False, default=0)
    most_rows: int = field(init=False, default=0)
    """Decoding rows of the fullest step that was measured."""
    most_adapters: int = field(init=False, default=0)
    """And adapters among them."""
    _gram: list[list[float]] = field(init=False)
    _moment: list[float] = field(init=False)
    _anchor: list[float] = field(init=False)
    """The fit over the long run; before that the prior, on a machine as fast as this one seems."""
    _practice: list[float] = field(init=False)
    """Per feature how much was measured, in squares of its typical size."""
    _speed: float = field(init=False, default=1.0)
    """Seconds here for one of the prior's, lately."""
    _recent: deque[float] = field(init=False, factory=deque)
    _sorted: list[float] = field(init=False, factory=list)
    _expected: tuple[Load, float] | None = field(init=False, default=None)
    """What was foretold last: the same load is asked about when planned and when measured."""
    _rows: tuple[int, int] = field(init=False, default=(0, 0))
    """Decoding rows and adapters of the last step."""
    _num_alike: int = field(init=False, default=0)
    """Steps before it that had as many."""
    _alarm: float = field(init=False, default=1.0)
    """Measured over predicted of the worst step lately, calming down step by step."""

    def __attrs_post_init__(self) -> None:
        size = len(self.prior)
        self.weights = [w * s for w, s in zip(self.prior, SCALES, strict=True)]
        self._anchor = list(self.weights)
        self._gram = [[0.0] * size for _ in range(size)]
        self._moment = [0.0] * size
        self._practice = [0.0] * size

    def observe(self, load: Load, seconds: float) -> None:
        """A step of ``load`` took ``seconds``."""
        mean = self.expect(load)
        if not 0.0 < seconds < math.inf:
            return  # a clock that was set, say: nothing to learn
        ratio = seconds / mean if self.num_observed and mean > 0.0 else 1.0
        if self.num_observed and mean > 0.0:
            self._note(ratio)
        self._alarm = max(ratio, 1.0 + CALM * (self._alarm - 1.0))
        self.num_observed += 1
        self.most_rows = max(self.most_rows, load.num_decode_rows)
        among_rows = min(load.num_adapters, load.num_decode_rows)
        self.most_adapters = max(self.most_adapters, among_rows)
        if self._is_instructive(load):
            self._learn(_scaled(load), seconds, ratio > ALARMING)

    def _is_instructive(self, load: Load) -> bool:
        """Whether the fit takes the step in: of many that are alike it takes some."""
        rows = load.num_decode_rows, load.num_adapters
        self._num_alike = self._num_alike + 1 if rows == self._rows else 0
        self._rows = rows
        num_alike = self._num_alike
        return load.num_prefill_tokens > 0 or num_alike < NUM_FIRST or num_alike % ALIKE == 0

    def _learn(self, x: list[float], seconds: float, is_news: bool) -> None:
        # Errors count relative to the step: a short one is to be predicted as well as a long one.
        # One that took much longer than thought proves the fit wrong: it counts in full.
        self._compare(x, seconds)
        share = TYPICAL_S / max(seconds, TYPICAL_S / MOST_SHARE)
        if is_news:
            share = max(share, 1.0)
        x, seconds = [share * v for v in x], share * seconds
        for i, (row, moment) in enumerate(zip(self._gram, self._moment, strict=True)):
            self._gram[i] = [FADE * old + x[i] * v for old, v in zip(row, x, strict=True)]
            self._moment[i] = FADE * moment + x[i] * seconds
        self._fit()

    def _compare(self, x: list[float], seconds: float) -> None:
        """With the machine of the prior, for the sake of what was hardly measured yet."""
        self._practice = [old + v * v for old, v in zip(self._practice, x, strict=True)]
        slow_s = sum(w * s * v for w, s, v in zip(self.prior, SCALES, x, strict=True))
        if slow_s > 0.0:
            self._speed += (1.0 - FADE) * (seconds / slow_s - self._speed)

    def _fit(self) -> None:
        """Non-negative least squares with an anchor, by coordinate descent."""
        weights, self._expected = self.weights, None
        for _ in range(SWEEPS):
            for i, row in enumerate(self._gram):
                others = _dot(row, weights) - row[i] * weights[i]
                pull = self._moment[i] - others + PRIOR_WEIGHT * self._anchor[i]
                weights[i] = max(0.0, pull / (row[i] + PRIOR_WEIGHT))
        for i, weight in enumerate(weights):
            if self._practice[i] < KNOWN:
                self._anchor[i] = self._speed * self.prior[i] * SCALES[i]
            else:
                self._anchor[i] += DRIFT * (weight - self._anchor[i])

    def _note(self, ratio: float) -> None:
        if len(self._recent) == NUM_RESIDUALS:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(ratio)
        insort(self._sorted, ratio)

    @property
    def margin(self) -> float:
        """What predictions are multiplied by."""
        if not self._sorted:
            return 1.0
        index = min(int(QUANTILE * len(self._sorted)), len(self._sorted) - 1)
        alarm = self._alarm if self._alarm > ALARMING else 1.0
        return max(1.0, self._sorted[index], alarm)

    def predict(self, load: Load) -> float:
        """Seconds that a step of ``load`` will hardly exceed."""
        return self.margin * self.expect(load)

    def expect(self, load: Load) -> float:
        """Seconds that such steps take on average: for sums over many of them."""
        if self._expected is None or self._expected[0] is not load:
            self._expected = load, _dot(self.weights, _scaled(load))
        return self._expected[1]

    def most_tokens(self, load: Load, start: int, most: int, seconds: float) -> int:
        """The most prefill tokens from ``start`` on that fit into ``seconds`` beside ``load``."""
        if self.predict(load.plus_chunk(start, most)) <= seconds:
            return most
        low, high = 0, most - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self.predict(load.plus_chunk(start, middle)) <= seconds:
                low = middle
            else:
                high = middle - 1
        return low

    def coefficients(self) -> dict[str, float]:
        """Seconds per unit of each feature, for the log and the metrics."""
        parts: Iterable[tuple[str, float, float]] = zip(NAMES, self.weights, SCALES, strict=True)
        return {name: weight / scale for name, weight, scale in parts}


def _scaled(load: Load) -> list[float]:
    return list(map(truediv, load.features(), SCALES))


def _dot(a: list[float], b: list[float]) -> float:
    return float(sum(map(mul, a, b)))
