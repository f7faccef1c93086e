"""The rules of ``kernels/sampling.py`` in numpy, over the few best candidates of each row.

The same three rules hold, and the same order of filters; decisions are made in float64 with running
sums in order, so the width that other rows force on the arrays changes nothing. Two correct
programs may still differ where a decision hangs on the last bit of an exponential.

Shapes: M rows, V vocabulary, C candidates, best first, padded with -inf.
"""

import math
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, eq=False)
class Filters:
    """Per row, float64 [M, 1]; what is off never drops anything."""

    typical_p: Floats | None
    """1 or more: off; None: off in all rows."""
    top_p: Floats
    """Infinite: off."""
    min_gap: Floats
    """The logarithm of min-p; -inf: off."""
    temperature: Floats
    """Above 0."""
    draw: Floats
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


def choose(values: Floats, ids: Ids, filters: Filters) -> Ids:
    """Draw one id per row from its candidates: values float64 [M, C], ids [M, C]; returns [M]."""
    if filters.typical_p is not None:
        values, ids = _keep_typical(values, ids, filters.typical_p)
    top = values[:, :1]
    gaps = values - top
    kept = values >= top + filters.min_gap
    kept[:, 1:] &= _sums_before(np.exp(gaps)) < filters.top_p
    kept[:, 0] = True
    with np.errstate(over="ignore"):
        sums = np.add.accumulate(np.exp(gaps / filters.temperature) * kept, 1)
    places = np.add.reduce(sums <= filters.draw * sums[:, -1:], 1)
    if np.maximum.reduce(places) == values.shape[1]:
        # A draw just below 1 rounded up to the whole: it is the last candidate's with a chance.
        places = np.minimum(places, (sums < sums[:, -1:]).sum(1))
    chosen: Ids = ids[np.arange(len(ids)), places]
    return chosen


def _sums_before(weights: Floats) -> Floats:
    """Probability of all better ones, for each candidate but the best: [M, C - 1]."""
    whole = np.add.accumulate(weights, 1)[:, -1:]
    sums: Floats = np.add.accumulate(weights[:, :-1] / whole, 1)
    return sums


def _keep_typical(values: Floats, ids: Ids, limits: Floats) -> tuple[Floats, Ids]:
    """The tokens whose surprise is nearest to the entropy, until their probability exceeds the
    limit; what stays moves up, in order."""
    with np.errstate(divide="ignore", invalid="ignore"):
        weights = np.exp(values - values[:, :1])
        chances = weights / np.add.accumulate(weights, 1)[:, -1:]
        surprise = -np.log(chances)
        parts = np.where(chances > 0, chances * surprise, 0.0)
        entropy = np.add.accumulate(parts, 1)[:, -1:]
        oddness = np.where(values == BANNED, math.inf, np.abs(surprise - entropy))
    order = np.argsort(oddness, 1, kind="stable")
    sums = np.add.accumulate(np.take_along_axis(chances, order, 1), 1)
    near = np.ones(values.shape, bool)
    near[:, 1:] = sums[:, :-1] <= limits
    kept = np.empty_like(near)
    np.put_along_axis(kept, order, near, 1)
    kept |= limits >= 1
    moved = np.argsort(~kept, 1, kind="stable")
    values = np.where(kept, values, BANNED)
    return np.take_along_axis(values, moved, 1), np.take_along_axis(ids, moved, 1)
