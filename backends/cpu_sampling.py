"""Sampling requests as numbers for the native side, and its candidates as messages.

The native side ranks: each row gets as many of its best raw logits as can decide its token. What
is then done with them (bias, penalties, filters, the draw) is done here. Only a row that depends on
all its logits is looked at whole.
"""

import math
from collections import Counter
from collections.abc import Container, Sequence
from functools import lru_cache

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from kvtrio.core.batch import Sampled, SampleRow
from kvtrio.core.sampling import SamplingParams
from kvtrio.kernels import sampling_numpy as kernels

MAX_CANDIDATES = 256
"""A row that needs more of its best logits is ranked whole."""

Ranked = tuple[list[float], list[int]]
"""Values and ids of one row's best, largest first."""


@frozen(eq=False)
class RowPlan:
    """How one row's token will be chosen."""

    params: SamplingParams
    edits: kernels.Edits | None
    banned: frozenset[int] | None
    """What edits do, where banning tokens, and not all, is all they do; None: they do more."""
    num_candidates: int
    """Best raw logits that are needed; 0: all of them."""
    width: int
    """How many of the best, after edits, may be chosen; 1: greedy."""
    needs_log_sum: bool
    is_greedy: bool = field(init=False)
    """The token is the best that is not banned, and among those asked for."""

    @is_greedy.default
    def _is_greedy(self) -> bool:
        return self.width == 1 and self.banned is not None and self.num_candidates > 0

    @property
    def is_partial(self) -> bool:
        """More may be chosen than are asked for: as a rule the filters drop those."""
        return 0 < self.num_candidates < self.width


@frozen(eq=False)
class Candidates:
    """What the native side found for M sampled rows."""

    values: list[list[float]]
    """[M][C] raw logits, largest first, ties by id; -inf behind what a row asked for."""
    ids: list[list[int]]
    """[M][C]."""
    log_sums: Sequence[float]
    """[M]: log sum exp of the raw logits; only where a row needs it."""
    logits: NDArray[np.float32]
    """[M, V]: raw."""


def plan_rows(rows: Sequence[SampleRow], vocab_size: int) -> list[RowPlan]:
    """What to ask the native side for."""
    return [
        _plan(row.params, vocab_size, _edits(row.params, row.recent))
        if row.params.has_penalties
        else _lasting_plan(row.params, vocab_size)
        for row in rows
    ]


@lru_cache(maxsize=1024)
def _lasting_plan(params: SamplingParams, vocab_size: int) -> RowPlan:
    """Of a request whose plan is the same for every token."""
    return _plan(params, vocab_size, _edits(params, ()) if params.logit_bias else None)


def _plan(params: SamplingParams, vocab_size: int, edits: kernels.Edits | None) -> RowPlan:
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
    banned = _banned(params, vocab_size)
    return RowPlan(params, edits, banned, needed, width, needs_log_sum)


def _banned(params: SamplingParams, vocab_size: int) -> frozenset[int] | None:
    if params.has_penalties or any(bias > -math.inf for _, bias in params.logit_bias):
        return None
    banned = frozenset(token for token, _ in params.logit_bias)
    return banned if len(banned) < vocab_size else None


def _width(params: SamplingParams, vocab_size: int) -> int:
    if params.temperature <= 0:
        return 1
    return min(params.top_k, vocab_size) if params.top_k > 0 else vocab_size


def _drops_most(params: SamplingParams) -> bool:
    """Whether the filters behind top-k, as a rule, leave few tokens."""
    return params.typical_p >= 1 and (params.top_p < 1 or params.min_p > 0) and params.top_k <= 0


def _edits(params: SamplingParams, recent: Sequence[int]) -> kernels.Edits:
    counts = Counter(recent)
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


def sample_rows(
    rows: Sequence[SampleRow], plans: Sequence[RowPlan], found: Candidates
) -> tuple[Sampled, ...]:
    """One token per row."""
    tokens = _tokens(rows, plans, found)
    return tuple(
        Sampled(token) if plan.params.num_logprobs is None else _report(plan, found, i, token)
        for i, (plan, token) in enumerate(zip(plans, tokens, strict=True))
    )


def sample_finite(
    rows: Sequence[SampleRow],
    plans: Sequence[RowPlan],
    found: Candidates,
    are_finite: Sequence[int],
) -> tuple[Sampled | None, ...]:
    """One token per row whose logits are all finite, None for the others."""
    kept = [i for i, is_finite in enumerate(are_finite) if is_finite]
    few = Candidates(
        values=[found.values[i] for i in kept],
        ids=[found.ids[i] for i in kept],
        log_sums=[found.log_sums[i] for i in kept],
        logits=found.logits[kept],
    )
    each = iter(sample_rows([rows[i] for i in kept], [plans[i] for i in kept], few))
    return tuple(next(each) if is_finite else None for is_finite in are_finite)


def _tokens(rows: Sequence[SampleRow], plans: Sequence[RowPlan], found: Candidates) -> list[int]:
    chosen = []
    for i, (row, plan) in enumerate(zip(rows, plans, strict=True)):
        token, ranked = None, (found.values[i], found.ids[i])
        if plan.is_greedy:
            token = _first(found.ids[i], plan.banned or ())
        elif plan.is_partial:
            token = _of_some(plan, ranked, found.log_sums[i], row.draw)
        elif plan.num_candidates:
            token = _of_few(plan, _edited_few(plan, ranked, found.logits, i), row.draw)
        chosen.append(_of_all(plan, found.logits[i], row.draw) if token is None else token)
    return chosen


def _first(ids: list[int], banned: Container[int]) -> int:
    """Of the best, the first that may be chosen: there is one. Without numpy, whose every call is
    slow right after a forward pass."""
    return next(token for token in ids if token not in banned)


def _of_some(plan: RowPlan, ranked: Ranked, log_sum: float, draw: float) -> int | None:
    """From the raw best, of which there are fewer than may be chosen; None: they do not decide."""
    values, ids = ranked
    whole = math.exp(log_sum - values[0])
    kept = values[: plan.num_candidates]
    return kernels.choose_of_few(kept, ids, _filters(plan.params, draw), whole)


def _edited_few(plan: RowPlan, ranked: Ranked, logits: NDArray[np.float32], place: int) -> Ranked:
    """The best after edits, at least as many as may be chosen, from enough of the raw best."""
    if plan.edits is None:
        return ranked
    values, ids = ranked[0][: plan.num_candidates], ranked[1][: plan.num_candidates]
    if plan.banned is not None:
        kept = [i for i, token in enumerate(ids) if token not in plan.banned]
        return [values[i] for i in kept], [ids[i] for i in kept]
    logits = logits[place]
    edited = kernels.edited(logits[plan.edits.ids], plan.edits, len(logits))
    raw = np.array(values, np.float32), np.array(ids)
    best, best_ids = kernels.merged(raw, plan.edits, edited, plan.width)
    return best.tolist(), best_ids.tolist()


def _of_few(plan: RowPlan, ranked: Ranked, draw: float) -> int:
    """From the best, of which there are all that may be chosen."""
    values, ids = ranked
    width = plan.width
    if width == 1:
        return ids[0]
    filters = _filters(plan.params, draw)
    if filters.typical_p < 1:
        return kernels.choose(np.array(values[:width]), np.array(ids[:width]), filters)
    token = kernels.choose_of_few(values[:width], ids, filters)
    assert token is not None, "nobody else may be chosen"
    return token


def _of_all(plan: RowPlan, logits: NDArray[np.float32], draw: float) -> int:
    params = plan.params
    row = logits if plan.edits is None else kernels.edited_row(logits, plan.edits)
    ranked, ids = kernels.best(row, plan.width)
    values = ranked.astype(np.float64)
    if params.top_n_sigma > 0 and plan.width > 1:
        kept = values >= kernels.sigma_floor(row, params.top_n_sigma)
        values, ids = values[kept], ids[kept]
    return kernels.choose(values, ids, _filters(params, draw))


def _filters(params: SamplingParams, draw: float) -> kernels.Filters:
    min_p = min(params.min_p, 1.0)
    return kernels.Filters(
        params.typical_p,
        params.top_p,
        math.log(min_p) if min_p > 0 else -math.inf,
        params.temperature if params.temperature > 0 else 1.0,
        draw,
    )


def _report(plan: RowPlan, found: Candidates, place: int, token: int) -> Sampled:
    """The chosen token with log-probabilities of the raw logits."""
    row, log_sum = found.logits[place], found.log_sums[place]
    count = min(plan.params.num_logprobs or 0, len(row))
    if plan.num_candidates:
        values, ids = found.values[place][:count], found.ids[place][:count]
    elif count:
        ranked, ranked_ids = kernels.best(row, count)
        values, ids = ranked.tolist(), ranked_ids.tolist()
    else:
        values, ids = [], []
    top = tuple((i, value - log_sum) for i, value in zip(ids, values, strict=True))
    return Sampled(token, float(row[token]) - log_sum, top)
