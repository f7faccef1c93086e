"""The next step: what the policy asks for, as far as it fits, as a batch.

1. A share is cut to the budget, to what the request misses, and to one adapter set.
2. A request first gets all that is cached for it, when it starts and again at each chunk.
3. A request whose next block another one of this step computes waits for it: equal prompts that
   arrive together are computed once.
"""

from attrs import evolve

from kvtrio.core.batch import Batch, Chunk, SampleRow
from kvtrio.core.cost import load_of
from kvtrio.core.events import Cached
from kvtrio.core.explain import CacheReport, Prompt, count_host_tokens, explain
from kvtrio.core.index import Match
from kvtrio.core.policy import RequestView, Share, View, checked
from kvtrio.core.request import Request
from kvtrio.core.sampling import draw
from kvtrio.core.state import State
from kvtrio.core.types import RequestState


def plan_step(state: State, now: float) -> Batch | None:
    """Decide the next step and hold its blocks; None if there is nothing to compute."""
    plan = checked(state.policy.plan(_view(state, now)), state.requests, state.running)
    for victim in plan.victims:
        state.preempt(state.requests[victim], now)
    state.tables.computing.clear()
    chunks: list[Chunk] = []
    budget = state.config.max_batch_tokens
    for share in plan.shares:
        if chunk := _apply(state, share, budget, now):
            chunks.append(chunk)
            budget -= len(chunk.token_ids)
    return _launched(state, tuple(chunks), now) if chunks else None


def _launched(state: State, chunks: tuple[Chunk, ...], now: float) -> Batch:
    state.next_step += 1
    state.launched_s = now
    batch = Batch(state.next_step - 1, chunks, state.cache.take_copies())
    is_streaming = any(len(c.token_ids) == 1 and c.sample is not None for c in chunks)
    limit_s = state.config.max_gap_s if is_streaming else state.config.max_step_s
    return evolve(batch, predicted_s=state.cost.predict(load_of(batch)), limit_s=limit_s)


def _view(state: State, now: float) -> View:
    num_free = state.places.num_free
    waiting = _startable(state) if num_free else state.waiting.shown()
    return View(
        now=now,
        running=tuple(map(_request_view, state.running.values())),
        waiting=tuple(_request_view(r, _num_known(state, r) if num_free else 0) for r in waiting),
        num_free_places=num_free,
        max_batch_tokens=state.config.max_batch_tokens,
        block_size=state.config.block_size,
        max_gap_s=state.config.max_gap_s,
        max_step_s=state.config.max_step_s,
        cost=state.cost,
        service=state.service.counters,
    )


def _num_known(state: State, request: Request) -> int:
    match = state.tables.match(request)
    return match.num_tokens if match else 0


def _startable(state: State) -> list[Request]:
    is_free = [request is None for request in state.places.running]
    return [
        request
        for request in state.waiting.shown()
        if request.submit.place is None or is_free[request.submit.place]
    ]


def _apply(state: State, share: Share, budget: int, now: float) -> Chunk | None:
    request = state.requests[share.request_id]
    if budget < 1:
        return None
    # A row that goes on decoding has nothing to find and nobody to wait for.
    is_row = request.num_missing_tokens == 1 and request.num_computed_tokens > 0
    if not is_row and not _make_ready(state, request, now):
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
    if is_new and not request.num_preemptions:
        request.report = _explain(state, request, match, now)
    if match:
        _use(state, request, match, now)
    return True


def _explain(state: State, request: Request, match: Match | None, now: float) -> CacheReport:
    if not request.submit.reuse:
        return CacheReport()
    found = match or state.cache.match(request.trail, 0)
    prompt = Prompt(request.trail, state.note_session(request.submit, now))
    return explain(state.cache, prompt, found, now)


def _use(state: State, request: Request, match: Match, now: float) -> None:
    # What was accounted for before a preemption is not counted again.
    done = max(request.num_computed_tokens, request.num_accounted_tokens)
    num_more = max(0, min(match.num_tokens, request.num_prompt_tokens) - done)
    num_host = min(count_host_tokens(match), num_more)
    request.num_accounted_tokens = done + num_more
    state.tables.use(request, match, now)
    request.report = request.report.plus(num_more - num_host, num_host)
    if num_more:
        state.news.append(Cached(request.request_id, num_more, num_host, request.report))


def _request_view(request: Request, num_known: int = 0) -> RequestView:
    submit = request.submit
    return RequestView(
        request_id=request.request_id,
        num_tokens=request.num_tokens,
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=max(request.num_computed_tokens, num_known),
        arrival_s=request.arrival_s,
        is_running=request.state is RequestState.RUNNING,
        priority=submit.priority,
        tenant=submit.tenant,
        adapters=request.adapter_set,
        num_preemptions=request.num_preemptions,
        place=submit.place if request.place is None else request.place,
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
        tuple(map(tuple, request.tables)),
        _sample_row(request) if end == request.num_tokens else None,
        request.trail.context_at(start).adapters,
    )
