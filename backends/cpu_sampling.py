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
    needs_log_sum: bool

    @property
    def is_partial(self) -> bool:
        """More may be chosen than are asked for: as a rule the filters drop those."""
        return 0 < self.num_candidates < self.width


@frozen(eq=False)
class Candidates:
    """What the native side found for M sampled rows."""

    values: NDArray[np.float32]
    """[M, C] raw logits, largest first, ties by id; -inf behind what a row asked for."""
    ids: NDArray[np.int32]
    """[M, C]."""
    log_sums: NDArray[np.float64]
    """[M]: log sum exp of the raw logits; only where a row needs it."""
    logits: NDArray[np.float32]
    """[M, V]: raw."""


def plan_rows(rows: Sequence[SampleRow], vocab_size: int) -> list[RowPlan]:
    """What to ask the native side for."""
    return [_plan(row, vocab_size) for row in rows]


def _plan(row: SampleRow, vocab_size: int) -> RowPlan:
    params = row.params
    edits = _edits(row) if params.logit_bias or params.has_penalties else None
    width, most = _width(params, vocab_size), min(MAX_CANDIDATES, vocab_size)
    num_reported = min(params.num_logprobs or 0, vocab_size)
    needed = max(num_reported, width + (len(edits.ids) if edits else 0))
    needs_log_sum = params.num_logprobs is not None
    if width > 1 and params.top_n_sigma > 0:
        needed = 0
    elif needed > most:
        is_partial = edits is None and num_reported <= most and _drops_most(params)
        needed = most if is_partial else 0
        needs_log_sum = needs_log_sum or is_partial
    return RowPlan(row, edits, needed, width, needs_log_sum)


def _width(params: SamplingParams, vocab_size: int) -> int:
    if params.temperature <= 0:
        return 1
    return min(params.top_k, vocab_size) if params.top_k > 0 else vocab_size


def _drops_most(params: SamplingParams) -> bool:
    """Whether the filters behind top-k, as a rule, leave few tokens."""
    return params.typical_p >= 1 and (params.top_p < 1 or params.min_p > 0) and params.top_k <= 0


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
    values, ids = found.values.tolist(), found.ids.tolist()
    chosen = []
    for i, plan in enumerate(plans):
        token = None
        if plan.is_partial:
            token = _of_some(plan, values[i], ids[i], float(found.log_sums[i]))
        elif plan.num_candidates:
            token = _of_few(plan, values[i], ids[i], found.logits[i])
        chosen.append(_of_all(plan, found.logits[i]) if token is None else token)
    return chosen


def _of_some(plan: RowPlan, values: list[float], ids: list[int], log_sum: float) -> int | None:
    """From the raw best, of which there are fewer than may be chosen; None: they do not decide."""
    count = plan.num_candidates
    whole = math.exp(log_sum - values[0])
    return kernels.choose_of_few(values[:count], ids, _filters(plan.row), whole)


def _of_few(
    plan: RowPlan, values: list[float], ids: list[int], logits: NDArray[np.float32]
) -> int | None:
    """From the raw best, of which there are all that may be chosen, and more: never None."""
    if plan.edits is not None:
        count = plan.num_candidates
        ranked = np.array(values[:count], np.float32), np.array(ids[:count])
        edited = kernels.edited(logits[plan.edits.ids], plan.edits, len(logits))
        best, best_ids = kernels.merged(ranked, plan.edits, edited, plan.width)
        values, ids = best.tolist(), best_ids.tolist()
    filters, width = _filters(plan.row), plan.width
    if width == 1:
        return ids[0]
    if filters.typical_p < 1:
        return kernels.choose(np.array(values[:width]), np.array(ids[:width]), filters)
    return kernels.choose_of_few(values[:width], ids, filters)


def _of_all(plan: RowPlan, logits: NDArray[np.float32]) -> int:
    params = plan.row.params
    row = logits if plan.edits is None else kernels.edited_row(logits, plan.edits)
    ranked, ids = kernels.best(row, plan.width)
    values = ranked.astype(np.float64)
    if params.top_n_sigma > 0 and plan.width > 1:
        kept = values >= kernels.sigma_floor(row, params.top_n_sigma)
        values, ids = values[kept], ids[kept]
    return kernels.choose(values, ids, _filters(plan.row))


def _filters(row: SampleRow) -> kernels.Filters:
    params = row.params
    min_p = min(params.min_p, 1.0)
    return kernels.Filters(
        params.typical_p,
        params.top_p,
        math.log(min_p) if min_p > 0 else -math.inf,
        params.temperature if params.temperature > 0 else 1.0,
        row.draw,
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
