"""Sampling in plain Python, one row at a time: what every implementation must equal."""

import math
from itertools import pairwise

import numpy as np
from attrs import frozen
from hypothesis import strategies as st

BANNED = -math.inf
VOCAB = 24


@frozen(kw_only=True)
class Row:
    """One request's parameters."""

    top_n_sigma: float = -1.0
    top_k: int = 0
    typical_p: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    temperature: float = 1.0
    draw: float = 0.0


def chances(kept: list[tuple[float, int]]) -> list[float]:
    weights = [math.exp(value - max(v for v, _ in kept)) for value, _ in kept]
    return [weight / sum(weights) for weight in weights]


class Close(Exception):
    """A decision hangs on the last bits, where two correct programs may differ."""


def compare(a: float, b: float) -> bool:
    """a >= b, if that is clear."""
    if a != b and abs(a - b) < 1e-11:
        raise Close
    return a >= b


def naive(logits: list[float], row: Row) -> int:
    """The filters one after the other, on a list of (logit, id), best first."""
    kept = sorted(
        ((v, i) for i, v in enumerate(logits) if v != BANNED), key=lambda c: (-c[0], c[1])
    )
    if row.top_n_sigma > 0:
        floor = kept[0][0] - row.top_n_sigma * float(np.std([v for v, _ in kept]))
        kept = [c for c in kept if compare(c[0], floor)]
    kept = kept[: row.top_k] if row.top_k > 0 else kept
    if row.typical_p < 1:
        kept = naive_typical(kept, row.typical_p)
    if row.top_p < 1:
        sums = np.cumsum([0.0, *chances(kept)])
        kept = [c for n, c in enumerate(kept) if n == 0 or not compare(sums[n], row.top_p)]
    if row.min_p > 0:
        floor = kept[0][0] + math.log(row.min_p)
        kept = [c for c in kept if compare(c[0], floor)]
    sums = np.cumsum(chances([(v / row.temperature, i) for v, i in kept]))
    reached = [n for n, s in enumerate(sums) if not compare(row.draw * sums[-1], s)]
    return kept[reached[0] if reached else -1][1]


def naive_typical(kept: list[tuple[float, int]], limit: float) -> list[tuple[float, int]]:
    likely = chances(kept)
    entropy = sum(-p * math.log(p) for p in likely if p > 0)
    oddness = [abs(-math.log(p) - entropy) if p > 0 else math.inf for p in likely]
    order = sorted(range(len(kept)), key=oddness.__getitem__)
    gaps = np.diff([oddness[n] for n in order if oddness[n] < math.inf])
    ties = [kept[a][0] != kept[b][0] for a, b in pairwise(order)]
    if any(gap < 1e-9 and tie for gap, tie in zip(gaps, ties, strict=False)):
        raise Close
    chosen, total = [], 0.0
    for n in order:
        if chosen and not compare(limit, total):
            break
        chosen.append(n)
        total += likely[n]
    return [kept[n] for n in sorted(chosen)]


ratios = st.one_of(st.just(0.0), st.just(1.0), st.floats(0.0, 1.0))
rows = st.builds(
    Row,
    top_n_sigma=st.one_of(st.just(-1.0), st.floats(0.1, 3.0)),
    top_k=st.integers(0, VOCAB + 5),
    typical_p=ratios,
    top_p=ratios,
    min_p=ratios,
    temperature=st.floats(0.05, 5.0),
    draw=st.floats(0.0, 1.0, exclude_max=True),
)
values = st.one_of(st.integers(-3, 3).map(float), st.floats(-20.0, 20.0, width=32), st.just(BANNED))
vocabularies = st.lists(values, min_size=VOCAB, max_size=VOCAB).filter(lambda x: max(x) > BANNED)
