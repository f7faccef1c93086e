"""The next step: what the policy asks for, as far as it fits, as a batch.

1. A share is cut to the budget, to what the request misses, and to one adapter set.
2. A request first gets all that is cached for it, when it starts and again at each chunk.
3. A request whose next block another one of this step computes waits for it: equal prompts that
   arrive together are computed once.
4. A row that goes on decoding has nothing to find and nobody to wait for.
5. A victim is preempted when its taker starts, and goes on if that one is left out.
"""

from collections.abc import Iterable

from kvtrio.core.batch import Batch, Chunk, Move, Save
from kvtrio.core.cost import Load, load_with
from kvtrio.core.events import Cached
from kvtrio.core.exchange import MOVED_BYTES
from kvtrio.core.explain import CacheReport, Prompt, explain, found_in
from kvtrio.core.index import Match
from kvtrio.core.policy import Plan, Share, Streams, checked
from kvtrio.core.request import Request
from kvtrio.core.state import State
from kvtrio.core.types import RequestId, RequestState
from kvtrio.core.views import view_of

UNHURRIED = 4
"""Where nobody streams, so many times as much may be read out in front of a step."""


def plan_step(state: State, now: float) -> Batch | None:
    """Decide the next step and hold its blocks; None if there is nothing to compute or to move."""
    if state.fetches is None and not state.exchange.has_work:
        return _plan(state, now)
    state.exchange.plan_loads(state.running.values(), now)
    if state.fetches is not None:
        state.fetches.go_on()
    batch = _plan(state, now) if state.requests else None
    if batch is not None:
        return batch
    keeper, goes_on = state.cache.keeper, False
    if keeper is not None and not state.requests:
        keeper.save_fresh(MOVED_BYTES)
        goes_on = keeper.has_fresh
    state.load = Load()
    return _launched(state, (), is_streaming=False, now=now, goes_on=goes_on)


def _plan(state: State, now: float) -> Batch | None:
    streams, view = state.streams, view_of(state, now)
    plan = state.policy.plan(view)
    checked(plan, state.requests, state.running, streams.rows)
    victims = plan.victims
    state.tables.computing.clear()
    group, rows = Streams(), list[Chunk]()
    if plan.all_streams and not victims:
        group, rows = view.streams, _rows(state, streams.rows.values(), now)
    elif plan.all_streams:
        sure = [row for request_id, row in streams.rows.items() if request_id not in victims]
        rows = _rows(state, sure, now)
    others = _others(state, plan, now)
    if plan.all_streams and victims:
        group = streams.summary()
        rows += _rows(state, [streams.rows[v] for v in victims if v in streams.rows], now)
    if not rows and not others:
        return None
    load = group.load()
    state.load = load_with(others, load, group.adapters) if others else load
    is_streaming = bool(rows) or any(chunk.request_id in streams.rows for chunk in others)
    return _launched(state, (*rows, *others), is_streaming, now)


def _others(state: State, plan: Plan, now: float) -> list[Chunk]:
    """What shares name, as far as it fits beside those who all decode."""
    chunks, num_left, rows = list[Chunk](), state.config.max_batch_tokens, state.streams.rows
    for share in plan.shares:
        # A victim's own token is kept for it until its taker starts.
        num_rows = len(rows) - (share.victim in rows) if plan.all_streams else 0
        if chunk := _apply(state, share, num_left - num_rows, now):
            chunks.append(chunk)
            num_left -= len(chunk.token_ids)
    return chunks


def _launched(
    state: State,
    chunks: tuple[Chunk, ...],
    is_streaming: bool,
    now: float,
    goes_on: bool = False,
) -> Batch | None:
    """``goes_on``: there is to be a step after this one, even if this one does nothing."""
    saves: tuple[Save, ...] = ()
    loads: tuple[Move, ...] = ()
    if state.fetches is not None or state.exchange.has_work or state.cache.loads:
        is_urgent = is_streaming or not chunks
        saves = state.exchange.plan_saves(MOVED_BYTES * (1 if is_urgent else UNHURRIED))
        loads = state.cache.take_loads()
    copies = state.cache.take_copies()
    if not (chunks or saves or loads or copies or goes_on):
        return None
    state.next_step += 1
    state.launched_s = now
    return Batch(
        step=state.next_step - 1,
        chunks=chunks,
        copies=copies,
        saves=saves,
        loads=loads,
        predicted_s=state.cost.predict(state.load),
        limit_s=state.config.max_gap_s if is_streaming else state.config.max_step_s,
    )


def _rows(state: State, requests: Iterable[Request], now: float) -> list[Chunk]:
    """The last token of each, who all decode. Hundreds do in a step: no more than they need."""
    size, chunks = state.config.block_size, list[Chunk]()
    for request in requests:
        start = request.num_computed_tokens
        if start % size == 0 or (start + 1) % size == 0:
            # It needs a block, or fills one.
            state.tables.grow(request, start + 1, now)
        request.in_flight = True
        token_ids = (request.token_ids[start],)
        tables, row = request.block_tables(), request.sample_row()
        chunks.append(Chunk(request.request_id, start, token_ids, tables, row, request.adapters))
    return chunks


def _apply(state: State, share: Share, budget: int, now: float) -> Chunk | None:
    request = state.requests[share.request_id]
    if budget < 1:
        return None
    if share.request_id in state.streams.rows:
        return _rows(state, [request], now)[0]
    if not _make_ready(state, request, share.victim, now):
        return None
    start = request.num_computed_tokens
    end = start + min(share.num_tokens, budget, request.num_missing_tokens)
    if border := request.trail.next_border(start):
        end = min(end, border)
    if request.slot is not None:
        end = state.tables.states.cut(request, end, now)
    state.tables.grow(request, end, now)
    request.in_flight = True
    return _chunk(request, end)


def _make_ready(state: State, request: Request, victim: RequestId | None, now: float) -> bool:
    """Let the request run with all that is cached for it; False if it is to wait."""
    if request.is_fetching:
        return False
    match = state.tables.match(request)
    done = request.num_computed_tokens
    if state.tables.is_being_computed(request, match.num_same if match else done):
        return False
    is_new = request.state is RequestState.WAITING
    if victim is not None:
        holder = state.requests[victim]
        if request.submit.place not in (None, holder.place):
            return False
        state.preempt(holder, now)
        match = state.tables.match(request)  # what the victim left may replace a part of it
    if is_new and not state.start(request, now):
        return False
    if is_new and not request.num_preemptions:
        request.report = _explain(state, request, match, now)
    found = match if match and match.num_tokens > done else None
    if found:
        state.tables.hold(found, now)
    if is_new:
        state.tables.states.begin(request, match, now)
    if found:
        _use(state, request, found, now)
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
    found = found_in(match, num_more)
    request.num_accounted_tokens = done + num_more
    state.tables.use(request, match, now)
    request.report = request.report.plus(found)
    if num_more:
        state.news.append(Cached(request.request_id, found, request.report))


def _chunk(request: Request, end: int) -> Chunk:
    start = request.num_computed_tokens
    return Chunk(
        request.request_id,
        start,
        tuple(request.token_ids[start:end]),
        request.block_tables(),
        request.sample_row() if end == request.num_tokens else None,
        request.trail.context_at(start).adapters,
    )
