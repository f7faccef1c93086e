"""The rules of ``kernels/sampling.py`` for one row at a time, without torch.

The same three rules hold, and the same order of filters; decisions are made in float64 with running
sums in order. Two correct programs may still differ where a decision hangs on the last bit of an
exponential.

A few candidates are looked at in plain Python: right after a forward pass, when the caches hold
weights, that takes a third of what a dozen of numpy's operations take. Whole rows are numpy's.

Shapes: V vocabulary, C candidates, best first.
"""

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Logits = NDArray[np.float32]
Ids = NDArray[np.signedinteger[Any]]

BANNED = float("-inf")
LARGEST = float(np.finfo(np.float32).max)
FEW = 4
"""Below one in so many values, ranking looks for the threshold first."""


@dataclass(frozen=True, eq=False)
class Edits:
    """What changes some logits of one row before anything is chosen."""

    ids: NDArray[np.int64]
    """[n], each once: the tokens that change."""
    bias_places: NDArray[np.int64]
    """[b]: places in ``ids``; one may repeat."""
    bias: Logits
    """[b]: added first."""
    repeat: Logits
    """[n]: then x / repeat where x > 0, else x * repeat; 1: off."""
    offset: Logits
    """[n]: then subtracted."""


class Filters(NamedTuple):
    """One row's; what is off never drops anything."""

    typical_p: float
    """Off: 1 or more."""
    top_p: float
    """Off: 1 or more."""
    min_gap: float
    """The logarithm of min-p, at most 0; off: -inf."""
    temperature: float
    """Above 0."""
    draw: float
    """In [0, 1)."""


def edited(raw: Logits, edits: Edits, num_tokens: int) -> Logits:
    """New logits float32 [n] of ``edits.ids``, whose raw ones are ``raw`` float32 [n].

    What overflows is clamped. A row whose every one of ``num_tokens`` tokens is banned ignores its
    bias, as there is nothing else to choose.
    """
    with np.errstate(all="ignore"):
        out = raw.copy()
        np.add.at(out, edits.bias_places, edits.bias)
        if len(out) == num_tokens and bool((out == BANNED).all()):
            out = raw
        out = np.where(out > 0, out / edits.repeat, out * edits.repeat) - edits.offset
    return np.nan_to_num(out, copy=False, nan=BANNED, posinf=LARGEST, neginf=BANNED)


def edited_row(logits: Logits, edits: Edits) -> Logits:
    """A whole row float32 [V] with its edits, as a new array."""
    out = logits.copy()
    out[edits.ids] = edited(logits[edits.ids], edits, len(logits))
    return out


def merged(
    ranked: tuple[Logits, Ids], edits: Edits, values: Logits, count: int
) -> tuple[Logits, Ids]:
    """The ``count`` best after ``edits``, from the best before them: values and ids.

    ``ranked`` holds the raw best, at least ``count`` + n of them, so that enough are left when all
    edited ones fall; ``values`` float32 [n] are the edited ones' new logits.
    """
    is_old = ~np.isin(ranked[1], edits.ids)
    pool = np.concatenate((ranked[0][is_old], values))
    ids = np.concatenate((ranked[1][is_old], edits.ids))
    order = np.argsort(_rank_keys(pool, ids))[:count]
    return pool[order], ids[order]


def best(logits: Logits, count: int) -> tuple[Logits, Ids]:
    """The ``count`` largest of one row float32 [V] and their ids, largest first, ties by id."""
    if FEW * count < len(logits):
        threshold = np.partition(logits, len(logits) - count)[len(logits) - count]
        ids = np.flatnonzero(logits >= threshold)
    else:
        ids = np.arange(len(logits))
    keys = np.sort(_rank_keys(logits[ids], ids))[:count]
    ids = (keys & 0xFFFFFFFF).astype(np.int64)
    return logits[ids], ids


def _rank_keys(values: Logits, ids: Ids) -> NDArray[np.uint64]:
    """One integer each, ascending as (value descending, id ascending): it sorts without ties, much
    faster than a stable sort of the values."""
    # Adding 0 makes -0 equal to 0. Floats order like their bits, negative ones in reverse.
    bits = (values + np.float32(0)).view(np.int32)
    ascending = np.where(bits < 0, ~bits, bits ^ np.int32(-(2**31))).view(np.uint32)
    return (~ascending).astype(np.uint64) << np.uint64(32) | ids.astype(np.uint64)


def sigma_floor(logits: Logits, width: float) -> float:
    """max - width * standard deviation of the logits of one row that are not banned."""
    kept = logits[logits != BANNED].astype(np.float64)
    return float(kept.max() - width * kept.std())


def log_sum(logits: Logits) -> float:
    """log sum exp of one row float32 [V], summed in float64."""
    wide = logits.astype(np.float64)
    top = wide.max()
    return float(top + math.log(np.exp(wide - top).sum()))


def choose_of_few(
    values: list[float], ids: list[int], filters: Filters, whole: float = 0.0
) -> int | None:
    """Draw one of C candidates, at least one; typical-p must be off.

    ``whole``: where they are only the best of more, the sum of exp(x - best) over all. Then the
    answer is None unless the filters keep none of the others.
    """
    top = values[0]
    weights = [math.exp(value - top) for value in values]
    limit = filters.top_p * (whole or sum(weights)) if filters.top_p < 1 else math.inf
    floor = top + filters.min_gap
    kept, before = 1, weights[0]
    while kept < len(values) and before < limit and values[kept] >= floor:
        before += weights[kept]
        kept += 1
    if whole and kept == len(values):
        return None
    temperature = filters.temperature
    sums = list(accumulate([math.exp((value - top) / temperature) for value in values[:kept]]))
    place = bisect_right(sums, filters.draw * sums[-1])
    if place == kept:
        # A draw just below 1 rounded up to the whole: it is the last candidate's with a chance.
        place = bisect_left(sums, sums[-1])
    return ids[place]


def choose(values: Floats, ids: Ids, filters: Filters) -> int:
    """Draw one of any number of candidates: values float64 [C], ids [C]."""
    if filters.typical_p < 1:
        kept = _typical(values, filters.typical_p)
        values, ids = values[kept], ids[kept]
    gaps = values - values[0]
    kept = values >= values[0] + filters.min_gap
    if filters.top_p < 1:
        weights = np.exp(gaps)
        kept[1:] &= np.cumsum(weights)[:-1] < filters.top_p * np.cumsum(weights)[-1]
    kept[0] = True
    with np.errstate(over="ignore"):
        sums = np.cumsum(np.exp(gaps[kept] / filters.temperature))
    place = int(np.searchsorted(sums, filters.draw * sums[-1], "right"))
    if place == len(sums):
        place = int(np.searchsorted(sums, sums[-1]))
    return int(ids[kept][place])


def _typical(values: Floats, limit: float) -> NDArray[np.bool_]:
    """The tokens whose surprise is nearest to the entropy, until their probability exceeds the
    limit."""
    with np.errstate(divide="ignore", invalid="ignore"):
        weights = np.exp(values - values[0])
        chances = weights / np.cumsum(weights)[-1]
        surprise = -np.log(chances)
        entropy = np.cumsum(np.where(chances > 0, chances * surprise, 0.0))[-1]
        oddness = np.where(values == BANNED, math.inf, np.abs(surprise - entropy))
    order = np.argsort(oddness, kind="stable")
    near = np.ones(len(values), bool)
    near[1:] = np.cumsum(chances[order])[:-1] <= limit
    kept = np.empty_like(near)
    kept[order] = near
    return kept
