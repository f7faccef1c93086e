"""How far a difference could be chance: the bootstrap over groups of whole sessions.

Requests of one session depend on each other, so that sessions are drawn, not requests: each side's
sessions fall into groups by digest, and every round draws as many groups as there are, with
repetition (Efron, "Bootstrap methods", 1979; of clusters, Davison and Hinkley, 1997, ch. 3.8). Two
replays of one scenario have the same sessions, and the same groups are drawn for both.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import frozen

NUM_GROUPS = 256
NUM_ROUNDS = 2000
SEED = 20260101
CONFIDENCE = 0.95
FEWEST_GROUPS = 8
"""With fewer there is no interval that means anything."""
BINS_PER_DECADE = 100
LOWEST = 1e-5
Numbers = np.ndarray[Any, np.dtype[np.float64]]


@frozen(eq=False)
class Sums:
    """Per group and measure: what is divided, and by what; float64 [groups, measures]."""

    over: Numbers
    under: Numbers


@frozen(eq=False)
class Histogram:
    """Per group: how many values lie in each class, on a scale of powers of ten; float64
    [groups, classes]. The first class begins at ``LOWEST``."""

    counts: Numbers


def draws(num_groups: int, rng: np.random.Generator) -> Numbers:
    """How often each group is drawn in each round; float64 [rounds, groups]."""
    shares = np.full(num_groups, 1.0 / num_groups)
    return rng.multinomial(num_groups, shares, size=NUM_ROUNDS).astype(np.float64)


def ratios(sums: Sums, weights: Numbers) -> Numbers:
    """Each round's ratios; NaN where nothing is divided by; float64 [rounds, measures]."""
    over, under = weights @ sums.over, weights @ sums.under
    return np.divide(over, under, out=np.full_like(over, np.nan), where=under > 0)


def heights_of(histogram: Histogram, weights: Numbers) -> Numbers:
    """Each round's values up to the end of each class; float64 [rounds, classes]."""
    heights: Numbers = np.cumsum(weights @ histogram.counts, axis=1)
    return heights


def quantiles(heights: Numbers, share: float) -> Numbers:
    """Each round's quantile, within a class on a straight line; float64 [rounds]."""
    rank = share * heights[:, -1:]
    index = np.argmax(heights >= rank, axis=1)
    rows = np.arange(len(heights))
    before = np.where(index > 0, heights[rows, index - 1], 0.0)
    inside = heights[rows, index] - before
    part = np.divide(rank[:, 0] - before, inside, out=np.zeros_like(inside), where=inside > 0)
    values: Numbers = LOWEST * 10 ** ((index + part) / BINS_PER_DECADE)
    values[heights[:, -1] == 0] = np.nan
    return values


def interval(differences: Numbers) -> tuple[float, float] | None:
    """What holds the middle ``CONFIDENCE`` of the rounds."""
    known = differences[np.isfinite(differences)]
    if len(known) < NUM_ROUNDS // 2:
        return None
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(known, (tail, 1 - tail))
    return float(low), float(high)


def class_of(column: str) -> str:
    """SQL for the class of a value in seconds."""
    return f"CAST(floor(log10(greatest({column}, {LOWEST}) / {LOWEST}) * {BINS_PER_DECADE}) AS INT)"


def histogram_of(rows: Sequence[tuple[int, int, int]], num_groups: int) -> Histogram:
    """From (group, class, number)."""
    size = max((row[1] for row in rows), default=0) + 1
    counts = np.zeros((num_groups, size))
    for group, place, number in rows:
        counts[group, place] = number
    return Histogram(counts)
