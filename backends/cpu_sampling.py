"""Sampling requests as numbers for the native side, and its candidates as messages.

The native side ranks: each row gets as many of its best raw logits as can decide its token. What
is then done with them (bias, penalties, filters, the draw) is done here. Only a row that depends on
all its logits is looked at whole.
"""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from kvtrio.core.batch import Sampled, SampleRow
from kvtrio.core.sampling import SamplingParams
from kvtrio.kernels import sampling_numpy as kernels

MAX_CANDIDATES = 256
"""A row that needs more of its best logits is ranked whole."""


@frozen(eq=False)
class RowPlan:
    """How one row's token will be chosen."""

    row: SampleRow
    edits: kernels.Edits | None
    num_candidates: int
    """Best raw logits that are needed; 0: all of them."""
    width: int
    """How many of the best, after edits, may be chosen; 1: greedy."""


@frozen(eq=False)
class Candidates:
    """What the native side found for M sampled rows."""

    values: NDArray[np.float32]
    """[M, C] raw logits, largest first, ties by id; -inf behind what a row asked for."""
    ids: NDArray[np.int32]
    """[M, C]."""
    log_sums: NDArray[np.float64]
    """[M]: log sum exp of the raw logits; only where a row reports log-probabilities."""
    logits: NDArray[np.float32]
    """[M, V]: raw."""


def plan_rows(rows: Sequence[SampleRow], vocab_size: int) -> list[RowPlan]:
    """What to ask the native side for."""
    return [_plan(row, vocab_size) for row in rows]


def _plan(row: SampleRow, vocab_size: int) -> RowPlan:
    params = row.params
    edits = _edits(row) if params.logit_bias or params.has_penalties else None
    if params.temperature <= 0:
        width, is_whole = 1, False
    else:
        width = min(params.top_k, vocab_size) if params.top_k > 0 else vocab_size
        is_whole = params.top_n_sigma > 0
    needed = width if edits is None else width + len(edits.ids)
    if params.num_logprobs is not None:
        needed = max(needed, min(params.num_logprobs, vocab_size))
    is_whole = is_whole or needed > min(MAX_CANDIDATES, vocab_size)
    return RowPlan(row, edits, 0 if is_whole else needed, width)


def _edits(row: SampleRow) -> kernels.Edits:
    params = row.params
    counts = Counter(row.recent) if params.has_penalties else Counter[int]()
    ids = list(dict.fromkeys([*counts, *(token for token, _ in params.logit_bias)]))
    place = {token: i for i, token in enumerate(ids)}
    repeat = np.ones(len(ids), np.float32)
    repeat[: len(counts)] = params.repeat_penalty
    offset = np.zeros(len(ids), np.float32)
    offset[: len(counts)] = [_offset(params, count) for count in counts.values()]
    return kernels.Edits(
        ids=np.array(ids, np.int64),
        bias_places=np.array([place[token] for token, _ in params.logit_bias], np.int64),
        bias=np.array([value for _, value in params.logit_bias], np.float32),
        repeat=repeat,
        offset=offset,
    )


def _offset(params: SamplingParams, count: int) -> float:
    return count * params.frequency_penalty + params.presence_penalty


def sample_rows(plans: Sequence[RowPlan], found: Candidates) -> tuple[Sampled, ...]:
    """One token per row."""
    tokens = _tokens(plans, found)
    return tuple(
        Sampled(token) if plan.row.params.num_logprobs is None else _report(plan, found, i, token)
        for i, (plan, token) in enumerate(zip(plans, tokens, strict=True))
    )


def _tokens(plans: Sequence[RowPlan], found: Candidates) -> list[int]:
    if all(plan.width == 1 and plan.edits is None for plan in plans):
        tokens: list[int] = found.ids[:, 0].tolist()
        return tokens
    few = [i for i, plan in enumerate(plans) if plan.num_candidates]
    chosen: dict[int, int] = {}
    if few:
        values, ids = _ranked([plans[i] for i in few], few, found)
        drawn = kernels.choose(values, ids, _filters([plans[i] for i in few])).tolist()
        chosen = dict(zip(few, drawn, strict=True))
    return [
        chosen[i] if i in chosen else _whole(plan, found.logits[i]) for i, plan in enumerate(plans)
    ]


def _ranked(
    plans: Sequence[RowPlan], places: list[int], found: Candidates
) -> tuple[kernels.Floats, kernels.Ids]:
    """The candidates of some rows after their edits, each row cut to its width."""
    is_all = len(places) == len(found.ids)
    values = (found.values if is_all else found.values[places]).astype(np.float64)
    ids = found.ids if is_all else found.ids[places]
    if all(plan.width == values.shape[1] and plan.edits is None for plan in plans):
        return values, ids
    ids = ids.copy()
    for n, (plan, place) in enumerate(zip(plans, places, strict=True)):
        if plan.edits is not None:
            ranked = (found.values[place, : plan.num_candidates], ids[n, : plan.num_candidates])
            row = found.logits[place]
            edited = kernels.edited(row[plan.edits.ids], plan.edits, len(row))
            best, best_ids = kernels.merged(ranked, plan.edits, edited, plan.width)
            values[n, : plan.width], ids[n, : plan.width] = best, best_ids
        values[n, plan.width :] = kernels.BANNED
    return values, ids


def _whole(plan: RowPlan, logits: NDArray[np.float32]) -> int:
    params = plan.row.params
    row = logits if plan.edits is None else kernels.edited_row(logits, plan.edits)
    ranked, ids = kernels.best(row, plan.width)
    values = ranked.astype(np.float64)
    if params.top_n_sigma > 0 and plan.width > 1:
        values[values < kernels.sigma_floor(row, params.top_n_sigma)] = kernels.BANNED
    return int(kernels.choose(values[None], ids[None], _filters([plan]))[0])


def _filters(plans: Sequence[RowPlan]) -> kernels.Filters:
    rows = [plan.row for plan in plans]
    columns = np.array([_numbers(row.params, row.draw) for row in rows])
    is_typical = any(row.params.typical_p < 1 for row in rows)
    return kernels.Filters(
        typical_p=columns[:, :1] if is_typical else None,
        top_p=columns[:, 1:2],
        min_gap=columns[:, 2:3],
        temperature=columns[:, 3:4],
        draw=columns[:, 4:],
    )


def _numbers(params: SamplingParams, draw: float) -> tuple[float, float, float, float, float]:
    min_p = min(params.min_p, 1.0)
    return (
        params.typical_p,
        params.top_p if params.top_p < 1 else math.inf,
        math.log(min_p) if min_p > 0 else -math.inf,
        params.temperature if params.temperature > 0 else 1.0,
        draw,
    )


def _report(plan: RowPlan, found: Candidates, place: int, token: int) -> Sampled:
    """The chosen token with log-probabilities of the raw logits."""
    row, log_sum = found.logits[place], float(found.log_sums[place])
    count = min(plan.row.params.num_logprobs or 0, len(row))
    if plan.num_candidates:
        values, ids = found.values[place, :count], found.ids[place, :count]
    elif count:
        values, ids = kernels.best(row, count)
    else:
        return Sampled(token, float(row[token]) - log_sum)
    top = zip(ids.tolist(), (values.astype(np.float64) - log_sum).tolist(), strict=True)
    return Sampled(token, float(row[token]) - log_sum, tuple(top))
