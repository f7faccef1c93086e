"""The next step: what the policy asks for, as far as it fits, as a batch.

1. A share is cut to the budget, to what the request misses, and to one adapter set.
2. A request first gets all that is cached for it, when it starts and again at each chunk.
3. A request whose next block another one of this step computes waits for it: equal prompts that
   arrive together are computed once.
"""

from kvtrio.core.batch import Batch, Chunk, SampleRow
from kvtrio.core.events import Cached
from kvtrio.core.explain import CacheReport, count_host_tokens, explain
from kvtrio.core.index import Match
from kvtrio.core.policy import RequestView, Share, View, checked
from kvtrio.core.request import Request
from kvtrio.core.sampling import draw
from kvtrio.core.state import State
from kvtrio.core.types import RequestState

MAX_STARTABLE = 8
"""How many waiting requests a policy is shown at a time, in order of arrival."""


def plan_step(state: State, now: float) -> Batch | None:
    """Decide the next step and hold its blocks; None if there is nothing to compute."""
    shares = checked(state.policy.plan(_view(state, now)), state.requests)
    chunks: list[Chunk] = []
    state.tables.computing.clear()
    budget = state.config.max_batch_tokens
    for share in shares:
        if chunk := _apply(state, share, budget, now):
            chunks.append(chunk)
            budget -= len(chunk.token_ids)
    if not chunks:
        return None
    state.next_step += 1
    return Batch(state.next_step - 1, tuple(chunks), state.cache.take_copies())


def _view(state: State, now: float) -> View:
    num_free = state.places.num_free
    waiting = _startable(state)[:MAX_STARTABLE] if num_free else ()
    running = [r for r in state.requests.values() if r.state is RequestState.RUNNING]
    return View(
        now=now,
        running=tuple(_request_view(request) for request in running),
        waiting=tuple(_request_view(r, _num_known(state, r)) for r in waiting),
        num_free_places=num_free,
        max_batch_tokens=state.config.max_batch_tokens,
        block_size=state.config.block_size,
    )


def _num_known(state: State, request: Request) -> int:
    match = state.tables.match(request)
    return match.num_tokens if match else 0


def _startable(state: State) -> tuple[Request, ...]:
    is_free = [request is None for request in state.places.running]
    return tuple(
        request
        for request in state.waiting.values()
        if request.submit.place is None or is_free[request.submit.place]
    )


def _apply(state: State, share: Share, budget: int, now: float) -> Chunk | None:
    request = state.requests[share.request_id]
    if budget < 1 or not _make_ready(state, request, now):
        return None
    start = request.num_computed_tokens
    end = start + min(share.num_tokens, budget, request.num_missing_tokens)
    if border := request.trail.next_border(start):
        end = min(end, border)
    state.tables.grow(request, end, now)
    request.in_flight = True
    return _chunk(request, end)


def _make_ready(state: State, request: Request, now: float) -> bool:
    """Let the request run with all that is cached for it; False if it is to wait."""
    match = state.tables.match(request)
    num_known = match.num_tokens if match else request.num_computed_tokens
    if state.tables.is_being_computed(request, num_known):
        return False
    is_new = request.state is RequestState.WAITING
    if is_new and not state.start(request, now):
        return False
    if is_new:
        request.report = _explain(state, request, match, now)
    if match:
        _use(state, request, match, now)
    return True


def _explain(state: State, request: Request, match: Match | None, now: float) -> CacheReport:
    if not request.submit.reuse:
        return CacheReport()
    others = state.contexts.others(request.trail.contexts[0][1])
    found = match or state.cache.match(request.trail, 0)
    return explain(state.cache, request.trail, found, others, now)


def _use(state: State, request: Request, match: Match, now: float) -> None:
    num_more = match.num_tokens - request.num_computed_tokens
    num_host = min(count_host_tokens(match), num_more)
    state.tables.use(request, match, now)
    request.report = request.report.plus(num_more - num_host, num_host)
    state.news.append(Cached(request.request_id, num_more, num_host, request.report))


def _request_view(request: Request, num_known: int = 0) -> RequestView:
    return RequestView(
        request_id=request.request_id,
        num_tokens=request.num_tokens,
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=max(request.num_computed_tokens, num_known),
        arrival_s=request.arrival_s,
        is_running=request.state is RequestState.RUNNING,
    )


def _sample_row(request: Request) -> SampleRow:
    params = request.submit.sampling
    recent = request.token_ids[-params.repeat_last_n :] if params.has_penalties else ()
    return SampleRow(params, draw(params.seed, request.num_generated_tokens), tuple(recent))


def _chunk(request: Request, end: int) -> Chunk:
    start = request.num_computed_tokens
    return Chunk(
        request.request_id,
        start,
        tuple(request.token_ids[start:end]),
        tuple(zip(*(block.ids for block in request.blocks), strict=True)),
        _sample_row(request) if end == request.num_tokens else None,
        request.trail.context_at(start).adapters,
    )
